"""Several processes train what one does: the same losses, norms, weights and skipped steps."""

import json

import pytest
import torch
from processes import NET, close

pytestmark = pytest.mark.slow

PRECISIONS = {
    "64-true": {"rtol": 1e-12, "atol": 1e-12},
    "32-true": {"rtol": 1e-5, "atol": 1e-6},
    "bf16-mixed": {"rtol": 2e-2, "atol": 1e-2},
    "16-mixed": {"rtol": 2e-3, "atol": 1e-3},
    "bf16-true": {"rtol": 5e-2, "atol": 3e-2},
}
"""By how much losses may differ: a product is rounded once, whatever rows it sums over."""
SPIKE = (
    "precision=16-mixed",
    "data._target_=spike.made",
    "data.shuffle=false",
    "data.meta.input=[16]",
    "data.meta.classes=4",
    "train.batch_size=10",
    "train.max_steps=4",
    "train.eval_every=4",
)


def jobs(strategy, precisions=tuple(PRECISIONS)):
    own = [*NET, f"strategy={strategy}"]
    made = {name: [f"precision={name}", "train.clip_norm=1"] for name in precisions} | {
        "accumulated": ["train.accumulate=3", "train.batch_size=10"],
        "uneven": ["debug.overfit=67", "train.batch_size=33", "train.eval_every=null"],
        "spike": SPIKE,
    }
    return {f"{strategy}-{name}": [*own, *typed] for name, typed in made.items()}


@pytest.fixture(scope="module")
def alone(run_in_processes, tmp_path_factory):
    return run_in_processes(1, jobs("single"), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module", params=[2, 4])
def several(request, run_in_processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"several-{request.param}")
    precisions = PRECISIONS if request.param == 2 else ("64-true",)
    both = {**jobs("ddp", precisions), **jobs("fsdp", precisions)}
    return run_in_processes(request.param, both, folder)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_train_as_one(alone, several, strategy):
    shared = [name for name in PRECISIONS if f"{strategy}-{name}" in several]
    assert "64-true" in shared
    for name in shared:
        one, many, within = alone[f"single-{name}"], several[f"{strategy}-{name}"], PRECISIONS[name]
        for key in ("train/loss", "train/grad_norm", "val/loss"):
            close(one.values(key), many.values(key), **within)
        for key in ("train/loss", "train/grad_norm", "val/accuracy"):
            assert many.values(key) == many.values(key, rank=1)
        close(one.values("train/lr"), many.values("train/lr"), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["accumulated", "uneven"])
def test_every_example_weighs_the_same(alone, several, strategy, kind):
    """In steps of several micro-batches, and in batches that do not divide: of 67 examples the last
    batch of an epoch has one, which every process computes and only one counts."""
    one, many = alone[f"single-{kind}"], several[f"{strategy}-{kind}"]
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/accuracy"):
        close(one.values(key), many.values(key), **PRECISIONS["32-true"])
    close(one.weights(), many.weights(), rtol=1e-4, atol=1e-5)
    assert {t.dtype for t in many.weights().values()} == {torch.float32}


def test_fsdp_reduces_once_per_step(several):
    """Not once per micro-batch: six steps of one, and of three."""
    for name in ("fsdp-64-true", "fsdp-accumulated"):
        assert several[name].text("reductions-0.txt") == "6"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_overflow_in_one_process_skips_the_step_in_all(alone, several, strategy):
    one, many = alone["single-spike"], several[f"{strategy}-spike"]
    assert many.values("loss_scale/overflow") == {1: 0, 2: 0, 3: 1, 4: 0}
    for key in ("overflow", "value", "skipped_steps"):
        assert many.values(f"loss_scale/{key}") == one.values(f"loss_scale/{key}")
        assert many.values(f"loss_scale/{key}", rank=1) == one.values(f"loss_scale/{key}")
    close(one.weights(), many.weights(), rtol=2e-3, atol=1e-3)


def test_processes_agree_on_what_was_converted(run_in_processes, tmp_path):
    typed = [
        *NET[2:],
        "~model",
        "+model._target_=nets.Parts",
        "strategy=ddp",
        "precision=float8-tensorwise",
        "precision.emulate=true",
    ]
    found = run_in_processes(2, {"parts": typed}, tmp_path)["parts"]
    assert found.values("val/loss") == found.values("val/loss", rank=1)
    fates = [
        {row["module"]: row["done"] for row in json.loads(found.text(f"{own}conversion.json"))}
        for own in ("", "ranks/1/")
    ]
    assert fates[0] == fates[1] == {"first": True, "second": False, "head": True}
