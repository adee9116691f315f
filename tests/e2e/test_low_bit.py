"""4-bit and 8-bit weights and adapters, as the command line runs them."""

import re

import pytest
import torch
from run_folders import job_results, only_sweep, read_json, write_files

MLP = "accelerator=cpu model=mlp model.hidden=[64] data=digits train.log_every=5".split()
TEXT = "It was the best of times, it was the worst of times. " * 40
GPT = (
    "accelerator=cpu model=gpt model.layers=1 model.width=64 data=text data.path=text.txt "
    "data.context=8 train.max_steps=2 train.batch_size=8"
).split()
SWEPT = ("bnb-nf4", "bnb-int8", "16-true")
# MiB of 64 x 64 and 64 x 10 weights in nf4 (half a byte each, a float32 per 64 of them and a table
# of 16), with float32 biases, by hand.
NUMBERS = 64 * 64 + 64 * 10
BIASES = 64 + 10
NF4 = (NUMBERS / 2 + NUMBERS / 64 * 4 + 2 * 16 * 4 + BIASES * 4) / 2**20
INT8 = (NUMBERS + (64 + 10) * 4 + BIASES * 4) / 2**20
PLAIN = (NUMBERS + BIASES) * 4 / 2**20


@pytest.fixture(scope="module")
def base(run_once):
    """A trained model in float32."""
    return run_once(*MLP, "tracking=none", "train.max_steps=40", "train.eval_every=40")


@pytest.fixture(scope="module")
def swept(base, tmp_path_factory, inside):
    """Its evaluation in three other precisions: (what was printed, the results, the report)."""
    folder = tmp_path_factory.mktemp("swept")
    typed = ("mode=evaluate", f"checkpoint={base.folder}", f"precision={','.join(SWEPT)}")
    with inside(folder) as main:
        done = main("-m", "hydra/launcher=basic", "accelerator=cpu", "tracking=none", *typed)
        done.check_ok()
    return done, job_results(folder), (only_sweep(folder) / "report.md").read_text()


@pytest.fixture(scope="module")
def gpt(tmp_path_factory, inside, store, reader):
    """Text in nf4, tracked: (what was printed, its result, conversion.json, its MLflow run)."""
    folder = write_files(tmp_path_factory.mktemp("gpt"), {"text.txt": TEXT})
    with inside(folder) as main:
        done = main(*GPT, "precision=bnb-nf4", f"tracking.uri={store}", "hydra.run.dir=run")
        done.check_ok()
    outcome = read_json(folder / "run" / "result.json")
    rows = read_json(folder / "run" / "conversion.json")
    return done, outcome, rows, reader().get_run(outcome["run_id"])


@pytest.fixture
def packed(run_once):
    """A short training in a precision, once for all tests."""
    short = (*MLP, "tracking=none", "train.max_steps=3", "optimizer.lr=0.01")
    return lambda name, *more: run_once(*short, f"precision={name}", *more)


@pytest.fixture
def evaluate(main, tmp_path, result):
    """Return what an evaluation of a checkpoint prints, and its result."""

    def run(folder, *more):
        typed = ("mode=evaluate", f"checkpoint={folder}", "accelerator=cpu", "tracking=none")
        done = main(*typed, *more).check_ok()
        return done.stdout, result(tmp_path)

    return run


def cells(text, corner):
    """The rows of the table whose head begins with `corner`: {first cell: {column: cell}}."""
    lines = [
        [cell.strip() for cell in re.split(r"[│┃|]", line.strip())[1:-1]]
        for line in text.splitlines()
        if line.startswith(("│", "┃", "|"))
    ]
    (start,) = [i for i, line in enumerate(lines) if line[0] == corner]
    head = lines[start]
    body = [line for line in lines[start + 1 :] if set(line[0]) != {"-"}]
    return {line[0]: dict(zip(head, line, strict=True)) for line in body}


# One checkpoint at several precisions


def test_a_report_has_a_table_of_what_the_precisions_cost_and_save(base, swept):
    _, results, report = swept
    rows = cells(report, "job")
    assert list(rows) == list(SWEPT)
    before = base.result["metrics"]
    for name, outcome, size in zip(SWEPT, results, (NF4, INT8, PLAIN / 2), strict=True):
        row, found = rows[name], outcome["metrics"]
        change = found["val/accuracy"] - before["val/accuracy"]
        assert row["status"] == "finished"
        assert float(row["val/accuracy"]) == pytest.approx(found["val/accuracy"], rel=1e-3)
        assert float(row["change"]) == pytest.approx(change, abs=1e-4)
        assert row["change"][0] in "+-"
        loss = found["val/loss"] - before["val/loss"]
        assert float(row["loss change"]) == pytest.approx(loss, rel=1e-3)
        assert float(row["weights MiB"]) == pytest.approx(size, rel=1e-3), name
        assert row["saved"] == f"{1 - size / PLAIN:.0%}", name
    share = "100 % of weights"
    assert [rows[name]["converted"] for name in SWEPT] == [share, share, ""]


def test_the_results_hold_the_same(base, swept):
    results = swept[1]
    assert [r["weights_mib"] for r in results] == pytest.approx([NF4, INT8, PLAIN / 2], rel=1e-9)
    assert [r["converted"] for r in results] == ["2/2", "2/2", ""]
    for outcome in results:
        assert outcome["plain_weights_mib"] == pytest.approx(PLAIN, rel=1e-9)
        assert outcome["as_trained"] == base.result["metrics"]
        assert outcome["trained_in"] == "32-true"
        assert outcome["steps"] == 40
    assert base.result["as_trained"] == {}
    assert base.result["trained_in"] == ""


def test_every_precision_computes_in_its_own_numbers(base, swept):
    losses = [outcome["metrics"]["val/loss"] for outcome in (base.result, *swept[1])]
    assert len(set(losses)) == 4
    assert losses[1:] == pytest.approx([losses[0]] * 3, rel=0.1)


def test_the_same_data_are_compared_with_the_training(base, evaluate):
    printed, found = evaluate(base.folder)
    assert found["precision"] == "32-true"  # the checkpoint's own
    assert found["as_trained"] == found["metrics"]
    assert "in 32-true; change +0" in printed


def test_other_data_are_not_compared_with_the_training(base, evaluate):
    printed, found = evaluate(base.folder, "precision=bnb-int8", "data=digits", "data.seed=1")
    assert found["as_trained"] == {}
    assert found["trained_in"] == "32-true"
    assert "as trained" not in printed
    assert "of other settings: data.seed=0 in its run, 1 here." in printed


# What a conversion tells


def test_the_console_names_what_was_converted_and_what_was_not(gpt):
    lines = [line.strip() for line in gpt[0].stdout.splitlines()]
    assert (
        "converted 4 of 6 layers, 49,152 of 66,048 matrix weights (74 %): "
        "blocks.0.attention.qkv, blocks.0.attention.projection," in lines[1]
    )
    assert (
        "skipped head (Linear, counted with token_embedding): shares a parameter with "
        "token_embedding"
    ) in lines


def test_the_conversion_is_written_whole(gpt, reader):
    _, outcome, rows, _ = gpt
    names = ["attention.qkv", "attention.projection", "expand", "contract"]
    assert [(row["module"], row["elements"]) for row in rows if not row["done"]] == [
        ("token_embedding", 256 * 64),
        ("position_embedding", 8 * 64),
        ("head", 0),
    ]
    assert rows[-1] == {
        "module": "head",
        "kind": "Linear",
        "done": False,
        "why": "shares a parameter with token_embedding",
        "elements": 0,
        "converted": 0,
        "counted_with": "token_embedding",
    }
    done = [row for row in rows if row["done"]]
    assert [row["module"] for row in done] == [f"blocks.0.{name}" for name in names]
    assert [row["converted"] for row in done] == [64 * 64 * times for times in (3, 1, 4, 4)]
    assert "conversion.json" in {a.path for a in reader().list_artifacts(outcome["run_id"])}


def test_the_store_has_the_counts_as_tags_and_the_size_as_a_metric(gpt, reader):
    _, outcome, _, run = gpt
    assert run.data.tags["precision"] == "bnb-nf4"
    assert run.data.tags["converted"] == "4/6"
    assert run.data.tags["converted_weights"] == "49152/66048"
    # embeddings, norms and biases train
    trains = 256 * 64 + 8 * 64 + 3 * 2 * 64 + (3 * 64 + 64 + 4 * 64 + 64)
    frozen = 64 * 64 * (3 + 1 + 4 + 4)
    assert run.data.tags["trainable"] == f"{trains}/{trains + frozen}"
    (point,) = reader().get_metric_history(run.info.run_id, "memory/weights_mib")
    assert point.value == outcome["weights_mib"] < outcome["plain_weights_mib"]


def test_a_run_that_converts_and_freezes_nothing_has_no_such_tags(
    main, tmp_path, store, reader, result
):
    assert main(*MLP, "train.max_steps=1", f"tracking.uri={store}").rc == 0
    outcome = result(tmp_path)
    tags = reader().get_run(outcome["run_id"]).data.tags
    assert not {"converted", "converted_weights", "trainable"} & set(tags)
    assert outcome["converted"] == ""
    assert outcome["weights_mib"] == outcome["plain_weights_mib"]


# Packed checkpoints


@pytest.mark.parametrize(("name", "size"), [("bnb-nf4", NF4), ("bnb-int8", INT8)])
def test_a_packed_checkpoint_evaluates_as_it_was_trained(packed, evaluate, name, size):
    folder, trained = packed(name).folder, packed(name).result["metrics"]
    _, found = evaluate(folder, f"precision={name}")
    assert found["metrics"] == trained
    assert found["weights_mib"] == pytest.approx(size, rel=1e-9)
    _, plain = evaluate(folder, "precision=32-true")
    assert plain["metrics"]["val/loss"] == pytest.approx(trained["val/loss"], rel=0.02)
    assert plain["trained_in"] == name
    assert plain["weights_mib"] == pytest.approx(PLAIN)


def test_a_packed_checkpoint_is_refused_by_another_packing(packed, main):
    folder = packed("bnb-nf4").folder
    done = main("mode=evaluate", f"checkpoint={folder}", "precision=bnb-int8", "tracking=none")
    done.check_refused("packed as bnb-nf4", "precision=bf16-mixed")
    done = main(*MLP, "tracking=none", "precision=bnb-int8", f"init.weights={folder}")
    done.check_refused("would round them a second time")


def test_a_packed_run_starts_from_its_own_weights(packed, main, tmp_path, result):
    before = packed("bnb-nf4")
    typed = ("tracking=none", "train.max_steps=1", "precision=bnb-nf4", "optimizer.lr=0")
    main(*MLP, *typed, f"init.weights={before.folder}").check_ok()
    assert result(tmp_path)["metrics"] == before.result["metrics"]


@pytest.mark.parametrize(
    ("name", "gone", "told", "to"),
    [
        ("bnb-nf4", "head.weight.absmax", "head.weight", "bnb-nf4"),
        ("bnb-nf4", "head.weight.absmax", "head.weight", "32-true"),
        ("bnb-int8", "head.SCB", "head.SCB", "bnb-int8"),
        ("bnb-int8", "head.SCB", "head.SCB", "32-true"),
    ],
)
def test_a_checkpoint_that_lost_a_scale_is_refused(packed, main, tmp_path, name, gone, told, to):
    (path,) = packed(name).folder.glob("checkpoints/*.pt")
    content = torch.load(path, weights_only=True)
    del content["model"][gone]
    broken = tmp_path / "broken.pt"
    torch.save(content, broken)
    done = main("mode=evaluate", f"checkpoint={broken}", f"precision={to}", "tracking=none")
    done.check_refused(told)
    assert done.stderr.startswith(f"error: checkpoint={broken} ")


def test_a_model_with_nothing_left_to_train_is_refused(lab, main):
    code = (
        "from torch import nn\n\n\ndef bare(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes, bias=False))\n"
    )
    config = "# Bare\n_target_: lab.bare.bare\nclasses: ${data.meta.classes}\n"
    write_files(lab, {"lab/bare.py": code, "lab/conf/model/bare.yaml": config})
    command = "--config-dir lab/conf model=bare accelerator=cpu tracking=none train.max_steps=1"
    done = main(*command.split(), "precision=bnb-nf4")
    others = ("adapter=lora", "precision=bnb-int8-training", "precision.ignore_modules=")
    done.check_refused(*others)
    assert main(*command.split(), "precision=bnb-nf4", "adapter=lora").rc == 0


# Adapters


@pytest.mark.parametrize("name", ["32-true", "bnb-nf4"])
def test_an_adapter_trains_with_an_8_bit_optimizer(main, tmp_path, store, reader, result, name):
    words = "adapter=lora optimizer=adamw8bit optimizer.lr=0.01 train.max_steps=40".split()
    main(*MLP, *words, f"precision={name}", f"tracking.uri={store}").check_ok()
    additions = 8 * (64 + 64) + 8 * (64 + 10)
    outcome = result(tmp_path)
    run = reader().get_run(outcome["run_id"])
    assert run.data.tags["trainable"] == f"{additions}/{additions + NUMBERS + BIASES}"
    assert run.data.params["adapter.rank"] == "8"
    history = reader().get_metric_history(run.info.run_id, "train/loss")
    first = min(history, key=lambda point: point.step).value
    assert outcome["train_loss"] < 0.9 * first


LOFTQ = "adapter.rank=4 adapter.init=loftq"
PISSA = "adapter.use_dora=true adapter.rank=4 adapter.init=pissa"


@pytest.mark.parametrize(
    ("name", "options", "other", "size"),
    [
        ("bnb-nf4", "", "32-true", PLAIN),
        ("bnb-nf4", LOFTQ, "32-true", PLAIN),
        ("32-true", PISSA, "bnb-int8", INT8),
    ],
)
def test_a_tuned_model_is_evaluated_as_trained_and_merged(
    packed, evaluate, name, options, other, size
):
    """Where it leaves its packing its adapter is merged, and before it is packed."""
    tuned = packed(name, "adapter=lora", *options.split())
    trained = tuned.result["metrics"]
    assert tuned.result["converted"] == ("2/2" if name == "bnb-nf4" else "")
    assert evaluate(tuned.folder)[1]["metrics"] == trained  # the checkpoint knows its adapter
    _, merged = evaluate(tuned.folder, f"precision={other}")
    assert merged["metrics"]["val/loss"] == pytest.approx(trained["val/loss"], rel=0.02)
    assert merged["weights_mib"] == pytest.approx(size)


@pytest.mark.parametrize(
    "name", ["bf16-true", pytest.param("bf16-mixed", marks=pytest.mark.extended)]
)
def test_an_unpacked_tuned_model_gives_its_own_numbers_in_its_own_precision(packed, evaluate, name):
    tuned = packed(name, "adapter=lora")
    loss = tuned.result["metrics"]["val/loss"]
    assert evaluate(tuned.folder)[1]["metrics"] == tuned.result["metrics"]
    _, other = evaluate(tuned.folder, "precision=32-true")
    assert other["metrics"]["val/loss"] == pytest.approx(loss, rel=0.02)


def test_an_adapter_is_merged_into_the_start_of_a_run_without_one(packed, main, tmp_path, result):
    tuned = packed("32-true", "adapter=lora", *PISSA.split())
    main(*MLP, "tracking=none", f"init.weights={tuned.folder}", "optimizer.lr=0").check_ok()
    loss = tuned.result["metrics"]["val/loss"]
    assert result(tmp_path)["metrics"]["val/loss"] == pytest.approx(loss, rel=1e-4)


def test_a_checkpoint_without_the_newer_keys_of_an_adapter_keeps_it(packed, evaluate, tmp_path):
    tuned = packed("bnb-nf4", "adapter=lora")
    (path,) = (tuned.folder / "checkpoints").glob("step-*.pt")
    content = torch.load(path)
    for key in ("use_dora", "use_rslora", "init"):
        del content["spec"]["adapter"][key]
    torch.save(content, tmp_path / "old.pt")
    _, found = evaluate(tmp_path / "old.pt")
    assert found["metrics"] == tuned.result["metrics"]


# Plans


LORA = 8 * (784 + 4096) + 8 * (4096 + 10)


@pytest.mark.parametrize(
    ("precision", "adapter", "trains"),
    [
        ("bnb-int8", "none", 4096 + 10),
        ("32-true", "lora", LORA),
        pytest.param("bnb-nf4", "none", 4096 + 10, marks=pytest.mark.extended),
        pytest.param("bnb-nf4", "lora", LORA, marks=pytest.mark.extended),
    ],
)
def test_a_plan_counts_what_would_train(main, precision, adapter, trains):
    words = "mode=plan accelerator=cpu model=mlp data=mnist model.hidden=[4096]".split()
    done = main(*words, f"precision={precision}", f"adapter={adapter}").check_ok()
    numbers, biases = 4096 * 794, 4096 + 10
    every = numbers + biases + (trains if adapter == "lora" else 0)
    assert f"{every:,} ({trains:,} trainable)" in done.stdout
    assert ("converted 2 of 2 layers" in done.stdout) == (precision != "32-true")
    if precision == "bnb-int8":
        packed, plain = (numbers + 8 * biases) / 2**20, (numbers + biases) * 4 / 2**20
        assert f"{packed:.1f} MiB (float32: {plain:.1f})" in done.stdout


def test_a_plan_leaves_the_whole_conversion(main, tmp_path):
    words = "mode=plan data=synthetic_tokens data.count=80 model.layers=4 precision=bnb-int8"
    done = main(*GPT[:4], *words.split(), "hydra.run.dir=plan").check_ok()
    rows = read_json(tmp_path / "plan" / "conversion.json")
    names = [row["module"] for row in rows if row["done"]]
    assert len(names) == 16
    assert all(name in done.stdout.replace("\n", "") for name in names)


def test_the_optimizer_state_is_reported(main, tmp_path, result):
    done = main(*MLP, "tracking=none", "train.max_steps=2", "optimizer=adamw8bit").check_ok()
    state = result(tmp_path)["optimizer_mib"]
    wide = (10 * 64 + 64 + 10) * 2 * 4  # under 4096 elements
    eight = 64 * 64 * 2 + 2 * 4096 / 256 * 4 + 2 * 256 * 4  # codes, scales and tables
    assert state == pytest.approx((wide + eight) / 2**20, rel=0.02)
    assert f"{state:.4g} MiB" in done.stdout
