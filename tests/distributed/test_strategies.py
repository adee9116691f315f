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


RECIPE = (
    "optimizer.groups=[{match:head,lr:0.05}]",
    "optimizer.no_decay_on=norms_and_biases",
    "train.freeze=[layers.0]",
    "train.clip_value=0.02",
    "scheduler=cosine",
    "scheduler.warmup=2",
)


UPDATES = ("master_weights", "remainders", "kahan", "stochastic_rounding")

JOBS = {name: [f"precision={name}", "train.clip_norm=1"] for name in PRECISIONS} | {
    "accumulated": ["train.accumulate=3", "train.batch_size=10"],
    "uneven": ["debug.overfit=67", "train.batch_size=33", "train.eval_every=null"],
    "spike": SPIKE,
    "recipe": RECIPE,
    **{name: ["precision=bf16-true", f"precision.update={name}"] for name in UPDATES},
    "ema": ["train.ema=0.5", "precision=bf16-mixed", "train.eval_every=2"],
}
IN_FOUR = ("64-true", "uneven")
"""Jobs of four processes, too: what they share out differs, and how they agree does not."""
STRATEGIES = ("ddp", "fsdp")


def jobs(strategies, names=tuple(JOBS)):
    return {
        f"{strategy}-{name}": [*NET, f"strategy={strategy}", *JOBS[name]]
        for strategy in strategies
        for name in names
    }


@pytest.fixture(scope="module")
def alone(run_in_processes, tmp_path_factory):
    return run_in_processes(1, jobs(["single"]), tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(run_in_processes, tmp_path_factory):
    return run_in_processes(2, jobs(STRATEGIES), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(run_in_processes, tmp_path_factory):
    return run_in_processes(4, jobs(STRATEGIES, IN_FOUR), tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("processes", "name"), [*(("two", name) for name in PRECISIONS), ("four", "64-true")]
)
def test_several_processes_train_as_one(alone, request, processes, name, strategy):
    several = request.getfixturevalue(processes)
    one, many, within = alone[f"single-{name}"], several[f"{strategy}-{name}"], PRECISIONS[name]
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        close(one.values(key), many.values(key), **within)
    for key in ("train/loss", "train/grad_norm", "val/accuracy"):
        assert many.values(key) == many.values(key, rank=1)
    close(one.values("train/lr"), many.values("train/lr"), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("processes", "kind"), [("two", "accumulated"), ("two", "uneven"), ("four", "uneven")]
)
def test_every_example_weighs_the_same(alone, request, processes, kind, strategy):
    """In steps of several micro-batches, and in batches that do not divide: of 67 examples the last
    batch of an epoch has one, which every process computes and only one counts."""
    several = request.getfixturevalue(processes)
    one, many = alone[f"single-{kind}"], several[f"{strategy}-{kind}"]
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/accuracy"):
        close(one.values(key), many.values(key), **PRECISIONS["32-true"])
    close(one.weights(), many.weights(), rtol=1e-4, atol=1e-5)
    assert {t.dtype for t in many.weights().values()} == {torch.float32}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_frozen_parts_clipping_and_warm_up_are_the_same(alone, two, strategy):
    one, many = alone["single-recipe"], two[f"{strategy}-recipe"]
    for key in ("lr/head", "lr/rest", "train/lr"):
        close(one.values(key), many.values(key), rtol=0, atol=0)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        close(one.values(key), many.values(key), rtol=1e-5, atol=1e-6)
    close(one.weights(), many.weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_average_is_evaluated_and_saved(alone, two, strategy):
    one, many = alone["single-ema"], two[f"{strategy}-ema"]
    for key in ("train/loss", "val/loss"):
        close(one.values(key), many.values(key), **PRECISIONS["bf16-mixed"])
    assert many.values("val/loss") == many.values("val/loss", rank=1)
    close(one.averages(), many.averages(), rtol=1e-2, atol=1e-2)


def test_fsdp_reduces_once_per_step(two):
    """Not once per micro-batch: six steps of one, and of three."""
    for name in ("fsdp-64-true", "fsdp-accumulated"):
        assert two[name].text("reductions-0.txt") == "6"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("update", UPDATES)
def test_processes_agree_on_updated_weights(alone, two, strategy, update):
    one, many = alone[f"single-{update}"], two[f"{strategy}-{update}"]
    for key in ("train/loss", "val/loss"):
        close(one.values(key), many.values(key), **PRECISIONS["bf16-true"])
        assert many.values(key) == many.values(key, rank=1)
    assert {t.dtype for t in many.weights().values()} == {torch.bfloat16}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_in_one_process_skips_the_step_in_all(alone, two, strategy):
    one, many = alone["single-spike"], two[f"{strategy}-spike"]
    assert many.values("loss_scale/overflow") == {1: 0, 2: 0, 3: 1, 4: 0}
    for key in ("overflow", "value", "skipped_steps"):
        assert many.values(f"loss_scale/{key}") == one.values(f"loss_scale/{key}")
        assert many.values(f"loss_scale/{key}", rank=1) == one.values(f"loss_scale/{key}")
    close(one.weights(), many.weights(), rtol=2e-3, atol=1e-3)


@pytest.fixture(scope="module")
def parts(run_in_processes, tmp_path_factory):
    typed = [*NET[2:], "~model", "+model._target_=nets.Parts"]
    float8 = [*typed, "precision=float8-tensorwise", "precision.emulate=true"]
    wanted = {strategy: [*float8, f"strategy={strategy}"] for strategy in STRATEGIES}
    wanted["packed"] = [*typed, "precision=bnb-nf4", "strategy=fsdp"]
    return run_in_processes(2, wanted, tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("name", [*STRATEGIES, "packed"])
def test_processes_agree_on_what_was_converted(parts, name):
    found = parts[name]
    assert found.values("val/loss") == found.values("val/loss", rank=1)
    fates = [
        {row["module"]: row["done"] for row in json.loads(found.text(f"{own}conversion.json"))}
        for own in ("", "ranks/1/")
    ]
    assert fates[0] == fates[1] == {"first": True, "second": False, "head": True}
