"""Quantisation-aware training and packed precisions, as the command line runs them."""

import pytest
import torch
from run_folders import job_results, metrics_in

MLP = "accelerator=cpu model=mlp model.hidden=[64] data=digits tracking=none".split()
STEPS = 10
PACKED = ("int4", "int8", "nvfp4")
EVALUATE = ("mode=evaluate", "accelerator=cpu", "tracking=none")


@pytest.fixture(scope="module")
def trained(run_once):
    """Return the folder of a short training in a precision; each is trained once."""
    return lambda *words: run_once(*MLP, f"train.max_steps={STEPS}", *words).folder


@pytest.fixture
def evaluate(main, tmp_path, result):
    """Return the result of an evaluation of a run."""

    def evaluated(folder, *words):
        main(*EVALUATE, f"checkpoint={folder}", *words).check_ok()
        return result(tmp_path)

    return evaluated


@pytest.mark.parametrize("name", PACKED)
def test_what_training_saw_is_what_the_packed_model_computes(trained, evaluate, name):
    folder = trained(f"precision=qat-{name}")
    wanted = metrics_in(folder)
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


def test_one_table_compares_runs_with_and_without(trained, main, tmp_path):
    folders = [trained("precision=32-true"), trained("precision=qat-int4")]
    checkpoints = f"checkpoint={','.join(map(str, folders))}"
    main("-m", "hydra/launcher=basic", *EVALUATE, checkpoints, "precision=32-true,int4").check_ok()
    jobs = job_results(tmp_path)
    assert [job["precision"] for job in jobs] == ["32-true", "int4", "32-true", "int4"]
    assert jobs[0]["metrics"] == metrics_in(folders[0])
    assert jobs[3]["metrics"] == metrics_in(folders[1])


@pytest.mark.parametrize("name", PACKED)
def test_training_packed_weights_is_refused(main, name):
    done = main(*MLP, f"precision={name}", "train.max_steps=1")
    done.check_refused(f"precision=qat-{name}", "mode=evaluate", "adapter=lora")
    assert done.stderr.startswith(f"error: mode=train with precision={name}: ")


@pytest.mark.parametrize(
    "name",
    ["qat-int4", "int4", *(pytest.param(n, marks=pytest.mark.extended) for n in ("int8", "nvfp4"))],
)
def test_a_tuned_model_is_evaluated_as_trained_and_merged(trained, evaluate, name):
    base = trained("precision=qat-int4")
    folder = trained(f"precision={name}", "adapter=lora", f"init.weights={base}")
    wanted = metrics_in(folder)
    assert evaluate(folder)["metrics"] == wanted
    merged = evaluate(folder, "precision=32-true")["metrics"]
    assert merged["val/loss"] == pytest.approx(wanted["val/loss"], rel=0.05)
    (checkpoint,) = folder.glob(f"checkpoints/step-{STEPS:08d}.pt")
    layout = torch.load(checkpoint, weights_only=True)["layout"]
    assert layout == {"int4": "int4-32", "qat-int4": ""}.get(name, name)


def test_a_packed_checkpoint_is_refused_by_another_packing(trained, main):
    base = trained("precision=qat-int4")
    folder = trained("precision=int4", "adapter=lora", f"init.weights={base}")
    for words in (["precision=int8"], ["precision=int4", "precision.group_size=16"]):
        main(*EVALUATE, f"checkpoint={folder}", *words).check_refused("packed as int4-32")


def test_a_plan_counts_what_packed_weights_stand_for(main):
    main(*MLP, "mode=plan", "precision=int4", "adapter=lora").check_ok(
        "4-bit codes (4,736)", "6,426 (1,616 trainable)"
    )
