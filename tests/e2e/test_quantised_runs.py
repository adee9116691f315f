"""Quantisation-aware training and packed precisions, as the command line runs them."""

import json
from pathlib import Path

import pytest
import torch

MLP = ("accelerator=cpu", "model=mlp", "model.hidden=[64]", "data=digits", "tracking=none")
PACKED = ("int4", "int8", "nvfp4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, inside, result):
    """Return the folder of a short training in a precision; each is trained once."""
    made = {}

    def train(*words):
        if words not in made:
            folder = tmp_path_factory.mktemp("trained")
            with inside(folder) as main:
                done = main(*MLP, "train.max_steps=30", *words)
            assert done.rc == 0, done.stderr
            made[words] = Path(result(folder)["folder"])
        return made[words]

    return train


@pytest.fixture
def evaluate(main, tmp_path, result):
    """Return the result of an evaluation of a run."""

    def evaluated(folder, *words):
        done = main(
            "mode=evaluate", f"checkpoint={folder}", "accelerator=cpu", "tracking=none", *words
        )
        assert done.rc == 0, done.stderr
        return result(tmp_path)

    return evaluated


def metrics_of(folder):
    return json.loads((folder / "result.json").read_text())["metrics"]


@pytest.mark.parametrize("name", PACKED)
def test_what_training_saw_is_what_the_packed_model_computes(trained, evaluate, name):
    folder = trained(f"precision=qat-{name}")
    wanted = metrics_of(folder)
    found = evaluate(folder, f"precision={name}")
    assert found["trained_in"] == f"qat-{name}"
    assert found["converted"] == "2/2"
    assert found["weights_mib"] < 0.3 * found["plain_weights_mib"]
    if name == "int8":  # its products are sums of integers
        assert found["metrics"]["val/loss"] == pytest.approx(wanted["val/loss"], rel=1e-4)
    else:
        assert found["metrics"] == wanted
    assert evaluate(folder)["metrics"] == wanted
    plain = evaluate(folder, "precision=32-true")
    assert plain["metrics"]["val/loss"] != wanted["val/loss"]
    assert plain["weights_mib"] == plain["plain_weights_mib"]


def test_one_table_compares_runs_with_and_without(trained, inside, tmp_path_factory):
    folders = [trained("precision=32-true"), trained("precision=qat-int4")]
    folder = tmp_path_factory.mktemp("compared")
    with inside(folder) as main:
        done = main(
            "-m",
            "hydra/launcher=basic",
            "mode=evaluate",
            f"checkpoint={','.join(map(str, folders))}",
            "accelerator=cpu",
            "tracking=none",
            "precision=32-true,int4",
        )
    assert done.rc == 0, done.stderr
    (out,) = folder.glob("outputs/sweeps/*")
    jobs = [json.loads((out / str(i) / "result.json").read_text()) for i in range(4)]
    assert [job["precision"] for job in jobs] == ["32-true", "int4", "32-true", "int4"]
    assert jobs[0]["metrics"] == metrics_of(folders[0])
    assert jobs[3]["metrics"] == metrics_of(folders[1])


def test_a_training_on_rounded_weights_resumes_bit_by_bit(trained, main, tmp_path):
    run = (*MLP, "precision=qat-int4", "hydra.run.dir=part")
    assert main(*run, "train.max_steps=20").rc == 0
    done = main("checkpoint.resume=part", "train.max_steps=30")
    assert done.rc == 0, done.stderr
    folders = trained("precision=qat-int4"), tmp_path / "part"
    whole, resumed = (
        torch.load(folder / "checkpoints" / "step-00000030.pt", weights_only=True)
        for folder in folders
    )
    assert whole["model"].keys() == resumed["model"].keys()
    assert all(torch.equal(value, resumed["model"][key]) for key, value in whole["model"].items())


@pytest.mark.parametrize("name", PACKED)
def test_training_packed_weights_is_refused(main, name):
    done = main(*MLP, f"precision={name}", "train.max_steps=1")
    assert done.rc == 2
    assert done.stderr.startswith(f"error: mode=train with precision={name}: ")
    for part in (f"precision=qat-{name}", "mode=evaluate", "adapter=lora"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["qat-int4", "int4", "int8", "nvfp4"])
def test_a_tuned_model_is_evaluated_as_trained_and_merged(trained, evaluate, name):
    base = trained("precision=qat-int4")
    folder = trained(f"precision={name}", "adapter=lora", f"init.weights={base}")
    wanted = metrics_of(folder)
    assert evaluate(folder)["metrics"] == wanted
    merged = evaluate(folder, "precision=32-true")["metrics"]
    assert merged["val/loss"] == pytest.approx(wanted["val/loss"], rel=0.05)
    (checkpoint,) = folder.glob("checkpoints/step-00000030.pt")
    layout = torch.load(checkpoint, weights_only=True)["layout"]
    assert layout == {"int4": "int4-32", "qat-int4": ""}.get(name, name)


def test_a_packed_checkpoint_is_refused_by_another_packing(trained, main):
    base = trained("precision=qat-int4")
    folder = trained("precision=int4", "adapter=lora", f"init.weights={base}")
    for words in (["precision=int8"], ["precision=int4", "precision.group_size=16"]):
        evaluation = ("mode=evaluate", f"checkpoint={folder}", "accelerator=cpu", "tracking=none")
        done = main(*evaluation, *words)
        assert done.rc == 2
        assert "packed as int4-32" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_group_that_fits_no_layer_is_refused(main):
    done = main(*MLP, "precision=qat-int4", "precision.group_size=48", "train.max_steps=1")
    assert done.rc == 2
    assert "its input width 64 is not a multiple of precision.group_size=48" in done.stderr


def test_a_plan_counts_what_packed_weights_stand_for(main):
    done = main(*MLP, "mode=plan", "precision=int4", "adapter=lora")
    assert done.rc == 0, done.stderr
    assert "4-bit codes (4,736)" in done.stdout
    assert "6,426 (1,616 trainable)" in done.stdout
