"""mode=plan device=<card> from the command line: printed, compared, recorded, refused."""

import re

import pytest
import yaml
from run_folders import read_json

GPT = (
    "mode=plan model=gpt model.layers=2 model.width=2048 model.heads=16 data=synthetic_tokens "
    "data.meta.classes=8192 data.meta.input=[512] train.batch_size=8 train.max_steps=1000"
).split()


def test_a_sweep_of_plans_has_one_table_one_sentence_and_the_parents_metrics(
    main, tmp_path, store, reader
):
    done = main(
        *("-m", *GPT, "precision=bf16-mixed,transformer-engine", "device=h100,a100-80"),
        f"tracking.uri={store}",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ).check_ok()
    text = " ".join(done.stdout.split())
    assert re.search(
        r"On NVIDIA H100 SXM: transformer-engine, 1\.\d\d to 1\.\d\d × bf16-mixed, "
        r"[\d.]+ GiB of 80, [\d.]+ to [\d.]+ USD, "
        r"quality: not tried\. On NVIDIA A100 SXM 80 GB: bf16-mixed, ",
        text,
    )
    assert "The quality was not tried" in text
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "it lacks float8 products" in page
    run_id = re.search(r"parent run (\w+)", done.stdout)[1]
    run = reader().get_run(run_id)
    name = "plan/speed_ratio/transformer-engine/NVIDIA-H100-SXM"
    plan = read_json(tmp_path / "sweep" / "2" / "plan.json")
    assert run.data.metrics[name] == pytest.approx(plan["ratio"][1])
    assert "On NVIDIA H100 SXM: transformer-engine" in run.data.tags["answer"]


def test_the_verdict_of_a_sweep_stands_beside_the_speed(main, tmp_path):
    words = "model=mlp data=digits train.max_steps=12 tracking=none".split()
    sweep = tmp_path / "tried"
    main(
        *("-m", *words, "precision=32-true,bf16-mixed", "seed=0,1,2"), f"hydra.sweep.dir={sweep}"
    ).check_ok()
    done = main(*GPT, "precision=bf16-mixed", "device=h100", f"plan.quality={sweep}").check_ok()
    assert re.search(r"│ quality\s+│ [\w ]+ \(3 seeds\)", done.stdout)
    lacking = main(*GPT, "precision=bf16-true", "device=h100", f"plan.quality={sweep}")
    assert lacking.rc == 2
    assert "has not tried precision=bf16-true, but 32-true, bf16-mixed" in lacking.stderr


def test_a_measured_device_is_a_card(main, tmp_path):
    done = main("doctor", "--measure").check_ok()
    assert "mode=plan device=my-cpu" in done.stdout
    card = yaml.safe_load((tmp_path / "device" / "my-cpu.yaml").read_text())
    assert card["tflops"]["float32"] > 0
    assert card["bandwidth"] > 1
    words = [*GPT, "--config-dir", ".", "device=my-cpu", "precision=32-true", "model.width=256"]
    text = main(*words).check_ok().stdout
    assert "step, ms" in text


def test_a_plan_for_this_machine_says_what_no_step_is_below(main):
    text = (
        main("mode=plan", "model=mlp", "data=digits", "model.hidden=[1024,1024]").check_ok().stdout
    )
    bound, expected = re.search(
        r"at least ([\d.]+) ms, .*expected: ([\d.]+) ms", text.replace("│", " ").replace("\n", " ")
    ).groups()
    assert 0 < float(bound) < float(expected)


def test_what_a_sweep_varies_beside_them_is_named_and_a_moved_sweep_keeps_its_answer(
    main, tmp_path
):
    sweep = tmp_path / "sweep"
    words = [word for word in GPT if not word.startswith("model.width")]
    done = main(
        *("-m", *words, "device=h100", "precision=tf32", "model.width=512,1024"),
        *("tracking=none", f"hydra.sweep.dir={sweep}"),
    ).check_ok()
    for width in (512, 1024):
        answer = rf"On NVIDIA H100 SXM model.width={width}: bf16-mixed, for tf32 is 0\.\d\d to"
        assert re.search(answer, " ".join(done.stdout.split()))
    moved = sweep.rename(tmp_path / "moved")
    again = main("report", moved).check_ok()
    assert "bf16-mixed, for tf32 is 0." in again.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("device=h100 mode=train", "device=NVIDIA H100 SXM is for mode=plan."),
        ("device=h1000", "device=h1000 is not known. Type device=h100. Allowed: a100-40, "),
        ("device=h100 plan.gpus=3", "plan.gpus=3 does not divide it. Type a multiple of 3."),
        ("device=h100 plan.gpus=0", "plan.gpus=0"),
        ("device=h100 plan.strategy=tp", "plan.strategy=tp is not known. Allowed: fsdp, ddp."),
        ("device=h100 plan.anchor=0", "plan.anchor=0 is not allowed."),
        ("device.price=2", "device.* is of a card."),
        ("device=h100 device.price=-1", "device.price=-1 is negative."),
        ("device=h100 device.link=0 plan.gpus=8", "plan.gpus=8 needs device.link"),
        ("plan.anchor=1000", "plan.* is for a card. Type mode=plan device=h100"),
        (
            "device=h100 device.bandwidth=-1",
            "device.bandwidth=-1 is not allowed. Allowed: above 0.",
        ),
        ("device=h100 plan.quality=nowhere", "nowhere is no sweep"),
        ("device=h100 optimizer=adamw8bit", "Type another one, optimizer=adamw, or mode=plan"),
    ],
)
def test_wrong_words_are_refused(main, words, message):
    done = main(*GPT[1:], *([] if "mode=" in words else ["mode=plan"]), *words.split())
    assert done.rc == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
