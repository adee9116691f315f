"""4-bit and 8-bit weights and adapters, as the command line runs them."""

import json
import re
from pathlib import Path

import pytest
import torch

MLP = ("accelerator=cpu", "model=mlp", "model.hidden=[64]", "data=digits", "train.log_every=5")
TEXT = "It was the best of times, it was the worst of times. " * 40
GPT = (
    "accelerator=cpu",
    "model=gpt",
    "model.layers=1",
    "model.width=64",
    "data=text",
    "data.path=text.txt",
    "data.context=8",
    "train.max_steps=2",
    "train.batch_size=8",
)
SWEPT = ("bnb-nf4", "bnb-int8", "16-true")
# MiB of 64 x 64 and 64 x 10 weights in nf4 (half a byte each, a float32 per 64 of them and a table
# of 16), with float32 biases, by hand.
NUMBERS = 64 * 64 + 64 * 10
BIASES = 64 + 10
NF4 = (NUMBERS / 2 + NUMBERS / 64 * 4 + 2 * 16 * 4 + BIASES * 4) / 2**20
INT8 = (NUMBERS + (64 + 10) * 4 + BIASES * 4) / 2**20
PLAIN = (NUMBERS + BIASES) * 4 / 2**20


@pytest.fixture(scope="module")
def base(tmp_path_factory, inside, result):
    """A trained model in float32: (its folder, its result)."""
    folder = tmp_path_factory.mktemp("base")
    with inside(folder) as main:
        done = main(*MLP, "tracking=none", "train.max_steps=40", "train.eval_every=40")
    assert done.rc == 0, done.stderr
    outcome = result(folder)
    return Path(outcome["folder"]), outcome


@pytest.fixture(scope="module")
def swept(base, tmp_path_factory, inside):
    """Its evaluation in three other precisions: (what was printed, the results, the folder)."""
    folder = tmp_path_factory.mktemp("swept")
    with inside(folder) as main:
        done = main(
            "-m",
            "hydra/launcher=basic",
            "mode=evaluate",
            f"checkpoint={base[0]}",
            "accelerator=cpu",
            f"precision={','.join(SWEPT)}",
            "tracking=none",
        )
    assert done.rc == 0, done.stderr
    (out,) = folder.glob("outputs/sweeps/*")
    return done, [json.loads((out / str(i) / "result.json").read_text()) for i in range(3)], out


@pytest.fixture(scope="module")
def gpt(tmp_path_factory, inside, store, reader, result):
    """Text in nf4, tracked: (what was printed, its folder, its MLflow run, the client)."""
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "text.txt").write_text(TEXT)
    with inside(folder) as main:
        done = main(*GPT, "precision=bnb-nf4", f"tracking.uri={store}")
    assert done.rc == 0, done.stderr
    outcome, client = result(folder), reader()
    return done, Path(outcome["folder"]), client.get_run(outcome["run_id"]), client


@pytest.fixture(scope="module")
def packed(tmp_path_factory, inside, result):
    """Folders of short trainings in packed precisions, each trained once."""
    made = {}

    def train(name, *more):
        if (name, more) not in made:
            folder = tmp_path_factory.mktemp("packed")
            with inside(folder) as main:
                done = main(*MLP, "tracking=none", "train.max_steps=3", f"precision={name}", *more)
            assert done.rc == 0, done.stderr
            made[name, more] = Path(result(folder)["folder"])
        return made[name, more]

    return train


@pytest.fixture
def evaluate(main):
    return lambda folder, *more: main(
        "mode=evaluate", f"checkpoint={folder}", "accelerator=cpu", "tracking=none", *more
    )


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


def test_the_sweep_prints_one_table_with_what_the_precisions_cost_and_save(base, swept):
    done, results, _ = swept
    rows = cells(done.stdout, "job")
    assert list(rows) == list(SWEPT)
    accuracy = base[1]["metrics"]["val/accuracy"]
    for name, outcome in zip(SWEPT, results, strict=True):
        row, found = rows[name], outcome["metrics"]["val/accuracy"]
        assert row["status"] == "finished"
        assert float(row["val/accuracy"]) == pytest.approx(found, rel=1e-3)
        assert float(row["change"]) == pytest.approx(found - accuracy, abs=1e-4)
        assert row["change"][0] in "+-"
        loss = outcome["metrics"]["val/loss"] - base[1]["metrics"]["val/loss"]
        assert float(row["loss change"]) == pytest.approx(loss, rel=1e-3)
    sizes = dict(zip(SWEPT, (NF4, INT8, PLAIN / 2), strict=True))
    for name, size in sizes.items():
        assert float(rows[name]["weights MiB"]) == pytest.approx(size, rel=1e-3), name
        assert rows[name]["saved"] == f"{1 - size / PLAIN:.0%}", name
    assert [rows[name]["converted"] for name in SWEPT] == ["2/2", "2/2", ""]


def test_the_results_hold_the_same(base, swept):
    _, results, _ = swept
    for outcome, size, converted in zip(
        results, (NF4, INT8, PLAIN / 2), ("2/2", "2/2", ""), strict=True
    ):
        assert outcome["weights_mib"] == pytest.approx(size, rel=1e-9)
        assert outcome["plain_weights_mib"] == pytest.approx(PLAIN, rel=1e-9)
        assert outcome["converted"] == converted
        assert outcome["as_trained"] == base[1]["metrics"]
        assert outcome["trained_in"] == "32-true"
        assert outcome["steps"] == 40
    assert base[1]["as_trained"] == {}
    assert base[1]["trained_in"] == ""


def test_every_precision_computes_in_its_own_numbers(base, swept):
    losses = [base[1]["metrics"]["val/loss"], *(r["metrics"]["val/loss"] for r in swept[1])]
    assert len(set(losses)) == 4
    assert losses[1:] == pytest.approx([losses[0]] * 3, rel=0.1)


def test_the_report_has_the_columns(base, swept):
    _, results, out = swept
    rows = cells((out / "report.md").read_text(), "job")
    assert list(rows) == list(SWEPT)
    for row, outcome in zip(rows.values(), results, strict=True):
        assert float(row["weights MiB"]) == pytest.approx(outcome["weights_mib"], rel=1e-3)
        assert row["converted"] == outcome["converted"]
        assert row["saved"].endswith("%")
        assert float(row["change"]) == pytest.approx(
            outcome["metrics"]["val/accuracy"] - base[1]["metrics"]["val/accuracy"], abs=1e-4
        )
    page = (out / "report.html").read_text()
    assert "<th>weights MiB</th>" in page
    assert "<th>loss change</th>" in page


def test_the_same_data_are_compared_with_the_training(base, evaluate, tmp_path, result):
    done = evaluate(base[0], "precision=32-true")
    assert done.rc == 0, done.stderr
    assert result(tmp_path)["as_trained"] == result(tmp_path)["metrics"]
    assert "in 32-true; change +0" in done.stdout


def test_other_data_are_not_compared_with_the_training(base, evaluate, tmp_path, result):
    done = evaluate(base[0], "precision=bnb-int8", "data=digits", "data.seed=1")
    assert done.rc == 0, done.stderr
    assert result(tmp_path)["as_trained"] == {}
    assert result(tmp_path)["trained_in"] == "32-true"
    assert "as trained" not in done.stdout


# What a conversion tells


def test_the_console_names_what_was_converted_and_what_was_not(gpt):
    done, *_ = gpt
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert (
        "converted 4 of 6 layers, 49,152 of 66,048 matrix weights (74 %): "
        "blocks.0.attention.qkv, blocks.0.attention.projection," in lines[1]
    )
    assert (
        "skipped head (Linear, counted with token_embedding): shares a parameter with "
        "token_embedding"
    ) in lines


def test_the_conversion_is_written_whole(gpt):
    _, folder, run, client = gpt
    rows = json.loads((folder / "conversion.json").read_text())
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
    assert "conversion.json" in {a.path for a in client.list_artifacts(run.info.run_id)}


def test_the_store_has_the_counts_as_tags_and_the_size_as_a_metric(gpt):
    _, folder, run, client = gpt
    assert run.data.tags["precision"] == "bnb-nf4"
    assert run.data.tags["converted"] == "4/6"
    assert run.data.tags["converted_weights"] == "49152/66048"
    # embeddings, norms and biases train
    trains = 256 * 64 + 8 * 64 + 3 * 2 * 64 + (3 * 64 + 64 + 4 * 64 + 64)
    frozen = 64 * 64 * (3 + 1 + 4 + 4)
    assert run.data.tags["trainable"] == f"{trains}/{trains + frozen}"
    (point,) = client.get_metric_history(run.info.run_id, "memory/weights_mib")
    outcome = json.loads((folder / "result.json").read_text())
    assert point.value == outcome["weights_mib"] < outcome["plain_weights_mib"]


def test_a_run_that_converts_nothing_and_freezes_nothing_has_no_such_tags(
    main, tmp_path, store, reader, result
):
    assert main(*MLP, "train.max_steps=1", f"tracking.uri={store}").rc == 0
    outcome = result(tmp_path)
    assert not {"converted", "converted_weights", "trainable"} & set(
        reader().get_run(outcome["run_id"]).data.tags
    )
    assert outcome["converted"] == ""
    assert outcome["weights_mib"] == outcome["plain_weights_mib"]


# Packed checkpoints


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8"])
def test_a_packed_checkpoint_evaluates_as_it_was_trained(packed, evaluate, tmp_path, result, name):
    folder = packed(name)
    trained = json.loads((folder / "result.json").read_text())["metrics"]
    done = evaluate(folder, f"precision={name}")
    assert done.rc == 0, done.stderr
    assert result(tmp_path)["metrics"] == trained
    size = {"bnb-nf4": NF4, "bnb-int8": INT8}[name]
    assert result(tmp_path)["weights_mib"] == pytest.approx(size, rel=1e-9)
    done = evaluate(folder, "precision=32-true")
    assert done.rc == 0, done.stderr
    assert result(tmp_path)["metrics"]["val/loss"] == pytest.approx(trained["val/loss"], rel=0.02)
    assert result(tmp_path)["trained_in"] == name
    assert result(tmp_path)["weights_mib"] == pytest.approx(PLAIN)


def test_a_packed_checkpoint_is_refused_by_another_packing(packed, evaluate):
    done = evaluate(packed("bnb-nf4"), "precision=bnb-int8")
    assert done.rc == 2
    assert "packed as bnb-nf4" in done.stderr
    assert "precision=bf16-mixed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "gone", "told"),
    [("bnb-nf4", "head.weight.absmax", "head.weight"), ("bnb-int8", "head.SCB", "head.SCB")],
)
@pytest.mark.parametrize("to", ["", "32-true"], ids=["packed", "plain"])
def test_a_checkpoint_that_lost_a_scale_is_refused(
    packed, evaluate, tmp_path, name, gone, told, to
):
    (path,) = packed(name).glob("checkpoints/*.pt")
    content = torch.load(path, weights_only=True)
    del content["model"][gone]
    torch.save(content, tmp_path / "broken.pt")
    done = evaluate(tmp_path / "broken.pt", f"precision={to or name}")
    assert done.rc == 2
    assert done.stderr.startswith(f"error: checkpoint={tmp_path / 'broken.pt'} ")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_with_nothing_left_to_train_is_refused(lab, main):
    (lab / "lab" / "bare.py").write_text(
        "from torch import nn\n\n\ndef bare(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes, bias=False))\n"
    )
    (lab / "lab" / "conf" / "model" / "bare.yaml").write_text(
        "# Bare\n_target_: lab.bare.bare\nclasses: ${data.meta.classes}\n"
    )
    command = (
        "--config-dir",
        "lab/conf",
        "model=bare",
        "accelerator=cpu",
        "tracking=none",
        "train.max_steps=1",
    )
    done = main(*command, "precision=bnb-nf4")
    assert done.rc == 2
    for part in ("adapter=lora", "precision=bnb-int8-training", "precision.ignore_modules="):
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert main(*command, "precision=bnb-nf4", "adapter=lora").rc == 0


# Adapters


@pytest.mark.parametrize("name", ["32-true", "bnb-nf4"])
def test_an_adapter_trains_with_an_8_bit_optimizer(main, tmp_path, store, reader, result, name):
    done = main(
        *MLP,
        "adapter=lora",
        "optimizer=adamw8bit",
        "optimizer.lr=0.01",
        "train.max_steps=40",
        f"precision={name}",
        f"tracking.uri={store}",
    )
    assert done.rc == 0, done.stderr
    additions = 8 * (64 + 64) + 8 * (64 + 10)
    outcome = result(tmp_path)
    run = reader().get_run(outcome["run_id"])
    assert run.data.tags["trainable"] == f"{additions}/{additions + NUMBERS + BIASES}"
    assert run.data.params["adapter.rank"] == "8"
    history = reader().get_metric_history(run.info.run_id, "train/loss")
    first = min(history, key=lambda point: point.step).value
    assert outcome["train_loss"] < 0.9 * first


def test_a_tuned_model_is_evaluated_packed_and_merged(packed, evaluate, tmp_path, result):
    folder = packed("bnb-nf4", "adapter=lora", "optimizer.lr=0.01")
    trained = json.loads((folder / "result.json").read_text())["metrics"]
    assert evaluate(folder, "precision=bnb-nf4").rc == 0  # the checkpoint knows its adapter
    assert result(tmp_path)["metrics"] == trained
    done = evaluate(folder, "precision=32-true")
    assert done.rc == 0, done.stderr
    merged = result(tmp_path)
    assert merged["metrics"]["val/loss"] == pytest.approx(trained["val/loss"], rel=0.02)
    assert merged["weights_mib"] == pytest.approx(PLAIN)


def test_a_model_tuned_from_the_packing_error_is_evaluated_packed_and_merged(
    packed, evaluate, tmp_path, result
):
    words = ("adapter=lora", "adapter.rank=4", "adapter.init=loftq", "optimizer.lr=0.01")
    folder = packed("bnb-nf4", *words)
    outcome = json.loads((folder / "result.json").read_text())
    assert outcome["converted"] == "2/2"
    trained = outcome["metrics"]
    assert evaluate(folder, "precision=bnb-nf4").rc == 0
    assert result(tmp_path)["metrics"] == trained
    assert evaluate(folder, "precision=32-true").rc == 0
    assert result(tmp_path)["metrics"]["val/loss"] == pytest.approx(trained["val/loss"], rel=0.02)


def test_a_model_tuned_from_a_changed_base_is_merged_before_it_is_packed(
    packed, evaluate, main, tmp_path, result
):
    words = ("adapter=lora", "adapter.use_dora=true", "adapter.rank=4", "optimizer.lr=0.01")
    folder = packed("32-true", *words, "adapter.init=pissa")
    trained = json.loads((folder / "result.json").read_text())["metrics"]
    assert evaluate(folder).rc == 0
    assert result(tmp_path)["metrics"] == trained
    assert evaluate(folder, "precision=bnb-int8").rc == 0
    assert result(tmp_path)["metrics"]["val/loss"] == pytest.approx(trained["val/loss"], rel=0.02)
    # As the initial weights of a run without an adapter it is merged, too.
    done = main(*MLP, "tracking=none", f"init.weights={folder}", "optimizer.lr=0")
    assert done.rc == 0, done.stderr
    assert result(tmp_path)["metrics"]["val/loss"] == pytest.approx(trained["val/loss"], rel=1e-4)


def test_a_checkpoint_from_before_the_newer_keys_of_an_adapter_keeps_its_adapter(
    packed, evaluate, tmp_path, result
):
    folder = packed("bnb-nf4", "adapter=lora", "optimizer.lr=0.01")
    trained = json.loads((folder / "result.json").read_text())["metrics"]
    (path,) = (folder / "checkpoints").glob("step-*.pt")
    content = torch.load(path)
    for key in ("use_dora", "use_rslora", "init"):
        del content["spec"]["adapter"][key]
    torch.save(content, path)
    done = evaluate(folder, "precision=bnb-nf4")
    assert done.rc == 0, done.stderr
    assert result(tmp_path)["metrics"] == trained


@pytest.mark.parametrize("name", ["bf16-true", "bf16-mixed"])
def test_an_unpacked_tuned_model_gives_its_own_numbers_in_its_own_precision(
    packed, evaluate, tmp_path, result, name
):
    folder = packed(name, "adapter=lora", "optimizer.lr=0.01")
    trained = json.loads((folder / "result.json").read_text())["metrics"]
    done = evaluate(folder)  # in the precision of the training
    assert done.rc == 0, done.stderr
    assert result(tmp_path)["metrics"] == trained
    assert evaluate(folder, "precision=32-true").rc == 0


def test_a_bad_adapter_is_refused_with_every_problem(main):
    done = main(*MLP, "tracking=none", "adapter=lora", "adapter.rank=0", "adapter.dropout=1")
    assert done.rc == 2
    assert "adapter.rank=0" in done.stderr
    assert "adapter.dropout=1" in done.stderr
    assert "Traceback" not in done.stderr


# Plans


@pytest.mark.parametrize(
    ("precision", "adapter", "trains"),
    [
        ("bnb-nf4", "none", 1024 + 10),
        ("bnb-int8", "none", 1024 + 10),
        ("bnb-nf4", "lora", 8 * (784 + 1024) + 8 * (1024 + 10)),
        ("32-true", "lora", 8 * (784 + 1024) + 8 * (1024 + 10)),
    ],
)
def test_a_plan_counts_what_would_train(main, precision, adapter, trains):
    done = main(
        "mode=plan",
        "accelerator=cpu",
        "model=mlp",
        "data=mnist",
        "model.hidden=[1024]",
        f"precision={precision}",
        f"adapter={adapter}",
    )
    assert done.rc == 0, done.stderr
    every = 1024 * 785 + 10 * 1025 + (trains if adapter == "lora" else 0)
    assert f"{every:,} ({trains:,} trainable)" in done.stdout
    assert ("converted 2 of 2 layers" in done.stdout) == (precision != "32-true")


def test_a_plan_prints_the_packed_size(main):
    done = main(
        "mode=plan",
        "accelerator=cpu",
        "model=mlp",
        "data=mnist",
        "model.hidden=[4096]",
        "precision=bnb-int8",
    )
    assert done.rc == 0, done.stderr
    numbers, biases = 4096 * 794, 4096 + 10
    packed, plain = (numbers + 8 * biases) / 2**20, (numbers + biases) * 4 / 2**20
    assert f"{packed:.1f} MiB (float32: {plain:.1f})" in done.stdout


def test_a_plan_leaves_the_whole_conversion(main, tmp_path):
    done = main(
        "mode=plan",
        *GPT[:4],
        "data=synthetic_tokens",
        "data.count=80",
        "model.layers=4",
        "precision=bnb-int8",
    )
    assert done.rc == 0, done.stderr
    (path,) = tmp_path.glob("outputs/runs/*/conversion.json")
    names = [row["module"] for row in json.loads(path.read_text()) if row["done"]]
    assert len(names) == 16
    assert all(name in done.stdout.replace("\n", "") for name in names)


def test_the_optimizer_state_is_reported(main, tmp_path, result):
    done = main(*MLP, "tracking=none", "train.max_steps=2", "optimizer=adamw8bit")
    assert done.rc == 0, done.stderr
    state = result(tmp_path)["optimizer_mib"]
    wide = (10 * 64 + 64 + 10) * 2 * 4  # under 4096 elements
    eight = 64 * 64 * 2 + 2 * 4096 / 256 * 4 + 2 * 256 * 4  # codes, scales and tables
    assert state == pytest.approx((wide + eight) / 2**20, rel=0.02)
    assert f"{state:.4g} MiB" in done.stdout


def test_a_packed_run_resumes_from_its_own_weights(main, tmp_path):
    done = main(*MLP, "tracking=none", "train.max_steps=3", "precision=bnb-nf4")
    assert done.rc == 0, done.stderr
    (run,) = tmp_path.glob("outputs/runs/*")
    done = main(
        *MLP, "tracking=none", "train.max_steps=3", "precision=bnb-nf4", f"init.weights={run}"
    )
    assert done.rc == 0, done.stderr
    done = main(*MLP, "tracking=none", "precision=bnb-int8", f"init.weights={run}")
    assert done.rc == 2
    assert "would round them a second time" in done.stderr


def test_an_evaluation_takes_the_checkpoints_own_precision(base, evaluate, tmp_path, result):
    assert evaluate(base[0]).rc == 0
    assert result(tmp_path)["precision"] == "32-true"
