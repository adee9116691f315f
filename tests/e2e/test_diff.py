"""mode=diff from the command line: what it prints, writes, records and refuses."""

import json
import re
import shutil

import pytest
from run_folders import read_json
from safetensors import safe_open
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

SMALL = (
    "model=gpt model.layers=2 model.width=32 data=synthetic_tokens data.count=64 train.batch_size=4"
).split()


def diff(main, *typed):
    done = main("mode=diff", *SMALL, *typed).check_ok()
    return done.stdout


def report(tmp_path, result):
    folder = tmp_path / result(tmp_path)["folder"]
    return read_json(folder / "diff.json"), folder


def test_a_comparison_is_printed_written_and_recorded(main, tmp_path, result, store, reader):
    typed = ("precision=bf16-mixed", "against=32-true", "diff.steps=[1,3]")
    printed = diff(main, *typed, f"tracking.uri={store}")
    assert "bf16-mixed and 32-true differ by rounding alone" in printed
    content, folder = report(tmp_path, result)
    assert content["parts"] is False
    assert content["module"] is None
    assert [step["step"] for step in content["steps"]] == [1, 3]
    assert 0 < content["steps"][0]["diff/output_error"] < 0.1
    assert 0 < content["steps"][0]["diff/log_probability_rms"] < 0.1
    names = [row["module"] for row in content["steps"][0]["modules"]]
    assert {"blocks.0.attention.qkv", "blocks.1.contract", "(loss)"} <= {*names}
    page = (folder / "diff.html").read_text()
    assert f"diff: see {folder.relative_to(tmp_path) / 'diff.html'}" in printed
    assert f"run {folder.relative_to(tmp_path)}" in page
    assert "<pre>python -m runner mode=diff" in page
    assert content["sentence"].split("`")[0] in re.sub("<[^>]+>", "", page)
    assert "<script" not in page
    client, run_id = reader(), result(tmp_path)["run_id"]
    run = client.get_run(run_id)
    assert {"diff.html", "diff.json"} <= {file.path for file in client.list_artifacts(run_id)}
    assert run.data.tags["against"] == "32-true"
    assert run.data.metrics["diff/unexplained_modules"] == 0


def test_experts_are_all_that_is_converted_at_a_later_step(main):
    typed = "mode=diff ~model +model._target_=nets.OnlyExperts data=digits tracking=none".split()
    main(*typed, "precision=qat-int4", "against=32-true", "diff.steps=[2]").check_ok()


ZERO_HEAD = "mode=diff precision=bf16-mixed against=32-true model=vit data=digits tracking=none "
SMALL_VIT = "train.batch_size=8 model.layers=1 model.heads=2 model.hidden_dim=16 model.mlp_dim=16"


@pytest.mark.parametrize(
    ("typed", "steps", "text"),
    [
        ("", [1, 2], "differ by rounding alone"),
        ("diff.steps=[1]", [1], "differ by rounding alone in what was compared"),
        ("train.max_steps=1", [1], "Not compared: the output of 1 of "),
    ],
)
def test_a_later_step_compares_what_a_layer_of_zeros_hid(
    main, tmp_path, result, typed, steps, text
):
    done = main(*ZERO_HEAD.split(), *SMALL_VIT.split(), *typed.split()).check_ok()
    content, _ = report(tmp_path, result)
    assert [step["step"] for step in content["steps"]] == steps
    assert text in content["sentence"]
    assert (len(steps) > 1) == ("step 2 is compared, too; not compared before: the" in done.stdout)


def test_a_dump_is_compared_with_its_own_weights_and_batch_only(main, tmp_path, result):
    alone = ("tracking=none", "precision=32-true")
    diff(main, *alone, "diff.dump=true")
    _, folder = report(tmp_path, result)
    dump = folder / "diff-00000001.safetensors"
    assert "agree in every bit" in diff(main, *alone, f"against={dump}")
    # The reference of this command has the dump's precision, so that its weights are the same.
    mixed = diff(main, alone[0], "precision=bf16-mixed", f"against={dump}")
    assert f"bf16-mixed and 32-true of {dump} differ by rounding alone" in mixed
    assert f"32-true of {dump}" in diff(main, alone[0], "precision=bf16-true", f"against={dump}")
    other = main("mode=diff", *SMALL, *alone, "seed=1", f"against={dump}")
    other.check_refused("was written with other weights and batch")
    with safe_open(dump, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = file.metadata()
    for change, message in (
        ({"precision": "[1]"}, "is damaged (TypeError)"),
        (
            {"format": "runner-diff-1"},
            "is a dump of version 1; this program reads version 2. Write it",
        ),
    ):
        save_file(tensors, folder / "other.safetensors", {**known, **change})
        typed = (*alone, f"against={folder / 'other.safetensors'}")
        main("mode=diff", *SMALL, *typed).check_refused(message)


TRAINED = (
    *SMALL,
    *"model.dropout=0.1 train.max_steps=4 train.log_every=1 train.eval_every=2".split(),
)


@pytest.fixture(scope="module")
def trained(run_once):
    """The folder of a run in bf16-mixed with a checkpoint after its last step."""
    words = "precision=bf16-mixed checkpoint.every_steps=2 tracking=none".split()
    return run_once(*TRAINED, *words).folder


def test_a_checkpoint_is_another_start(main, trained):
    (checkpoint,) = (trained / "checkpoints").iterdir()
    printed = diff(main, "precision=32-true", "tracking=none", f"against={checkpoint}")
    assert "parts from" in printed


@pytest.mark.parametrize(
    "precision",
    [
        "precision=bf16-mixed checkpoint.every_steps=2",
        # scales by past steps
        "precision=transformer-engine precision.emulate=true",
        pytest.param("precision=bnb-nf4 adapter=lora optimizer=adamw", marks=pytest.mark.extended),
    ],
)
def test_a_run_agrees_with_itself_at_its_own_steps(main, tmp_path, result, run_once, precision):
    folder = run_once(*TRAINED, *precision.split(), "tracking=none").folder
    logged = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    losses = {
        row["step"]: row["values"]["train/loss"]
        for row in logged
        if "train/loss" in row.get("values", ())
    }
    done = main("mode=diff", "tracking=none", f"against={folder}", "diff.steps=[1,3]").check_ok()
    assert "warning: at step" not in done.stdout
    content, _ = report(tmp_path, result)
    assert content["sentence"].startswith("In all 2 steps: ")
    assert content["sentence"].endswith("agree in every bit.")
    assert [step["diff/loss"] for step in content["steps"]] == [losses[1], losses[3]]


def test_a_run_is_compared_with_another_precision(main, trained):
    main("mode=diff", "tracking=none", "precision=32-true", f"against={trained}").check_ok(
        "32-true and bf16-mixed of "
    )


def test_one_key_of_a_runs_model_is_compared(main, tmp_path, result, trained):
    """Though the command composes another model: the run's options are not typed again."""
    typed = ("tracking=none", "model.dropout=0", f"against={trained}", "diff.steps=[2]")
    main("mode=diff", *typed).check_ok()
    content, _ = report(tmp_path, result)
    assert content["module"] == "drop"  # the first of the model's dropouts
    assert content["precision"] == "bf16-mixed model.dropout=0"
    done = main("mode=diff", "tracking=none", "model.dropuot=0", f"against={trained}")
    done.check_refused("dropuot")


def test_a_training_that_is_not_the_runs_own_is_told(main, trained, tmp_path):
    """The weights of step 1 are those of the seed; later ones those of the settings."""
    own = shutil.copytree(trained, tmp_path / "own")
    resumed = ("tracking=none", f"checkpoint.resume={own}", "optimizer.lr=0.1")
    main(*resumed, "train.max_steps=6").check_ok()
    done = main("mode=diff", "tracking=none", f"against={own}", "diff.steps=[1,3]").check_ok(
        "warning: at step 3 the run recorded a loss of"
    )
    assert "warning: at step 1" not in done.stdout


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("train.batch_size=8", "the run has train.batch_size=4"),
        ("experiment=text_gpt", "Leave experiment= out"),
        ("diff.steps=[5]", "There is no step 5: the training has 4. "),
        ("data=digits", "Leave data= out"),
    ],
)
def test_what_a_run_has_is_not_typed_again(main, trained, typed, message):
    main("mode=diff", "tracking=none", f"against={trained}", typed).check_refused(message)


FUSED = (
    "mode=diff precision=bf16-true ~model +model._target_=nets.Gated data=synthetic_images "
    "data.shape=[1,8,8] data.count=64 train.batch_size=16 train.compile=regional "
    "against=train.compile=false tracking=none"
).split()


@pytest.mark.parametrize(
    ("rounding", "differs"),
    [("fused", True), pytest.param("eager", False, marks=pytest.mark.extended)],
)
def test_a_compilation_shows_what_roundings_it_removes(main, tmp_path, result, rounding, differs):
    main(*FUSED, f"train.compile_rounding={rounding}").check_ok()
    content, _ = report(tmp_path, result)
    blocks = [row for row in content["steps"][0]["modules"] if row["module"].startswith("blocks.")]
    assert len(blocks) == 2
    shares = [row["added"]["different"] / row["added"]["elements"] for row in blocks]
    assert all((0.05 < share < 0.5) == differs for share in shares)
    assert differs or not any(shares)
    assert content["parts"] is False


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("against=fp32", "Nearest: 32-true"),
        ("precision=fp16 against=32-true", "Type precision=16-mixed or"),
        ("against=outputs/runs/gone", "there is no such file or folder"),
        ("", "needs what to compare with"),
        ("against=31-true", "Nearest: 32-true"),
        ("against=train.compil=false", "there is no key train.compil"),
        ("against=model=mlp", "both executions have the same model"),
        ("against=32-true diff.steps=[0]", "names no steps"),
        ("against=32-true train.compile=true", "train.compile=regional"),
        ("mode=train against=32-true", "needs mode=diff"),
        ("against=seed=many", "does not fit"),
        ("against=train.batch_size=2", "have the same train.batch_size"),
        ("against=. diff.steps=[1,2]", "Type diff.steps=[1]"),
        (
            "against=32-true precision=float8-tensorwise precision.emulate=true "
            "precision.ignore_modules=['*'] diff.steps=[3]",
            "would convert nothing of the model",
        ),
    ],
)
def test_what_cannot_be_compared_is_one_message(main, typed, message):
    done = main("mode=diff", *SMALL, "tracking=none", *typed.split()).check_refused(message)
    # It is said before the reference is trained.
    assert "steps again" not in done.stdout + done.stderr
