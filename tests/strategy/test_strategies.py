"""Several processes train what one does: the same losses, norms, weights and skipped steps."""

import pytest
import torch
from processes import NET, close

PRECISIONS = {
    "64-true": {"rtol": 1e-12, "atol": 1e-12},
    "32-true": {"rtol": 1e-5, "atol": 1e-6},
    "bf16-mixed": {"rtol": 2e-2, "atol": 1e-2},
    "16-mixed": {"rtol": 2e-3, "atol": 1e-3},
    "bf16-true": {"rtol": 5e-2, "atol": 3e-2},
}
"""By how much losses may differ: a product's rounding depends on the rows of its batch."""


def jobs(strategy):
    made = {
        f"{strategy}-{name}": [
            *NET,
            f"strategy={strategy}",
            f"precision={name}",
            "train.clip_norm=1",
        ]
        for name in PRECISIONS
    }
    accumulated = [*NET, f"strategy={strategy}", "train.accumulate=3", "train.batch_size=10"]
    return {**made, f"{strategy}-accumulated": accumulated}


@pytest.fixture(scope="module")
def alone(together, tmp_path_factory):
    return together(1, jobs("single"), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module", params=[2, 4])
def several(request, together, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"several-{request.param}")
    return together(request.param, {**jobs("ddp"), **jobs("fsdp")}, folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_train_as_one(alone, several, strategy):
    for name, within in PRECISIONS.items():
        one, many = alone[f"single-{name}"], several[f"{strategy}-{name}"]
        for key in ("train/loss", "train/grad_norm", "val/loss"):
            close(one.values(key), many.values(key), **within)
        assert many.values("train/loss") == many.values("train/loss", rank=1)
        close(one.values("train/lr"), many.values("train/lr"), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_accumulated_gradients_are_those_of_one_process(alone, several, strategy):
    one, many = alone["single-accumulated"], several[f"{strategy}-accumulated"]
    within = PRECISIONS["32-true"]
    close(one.values("train/loss"), many.values("train/loss"), **within)
    close(one.weights(), many.weights(), rtol=1e-4, atol=1e-4)
    assert {t.dtype for t in many.weights().values()} == {torch.float32}
