"""Several processes train what one does: the same losses, norms, weights and skipped steps."""

import json
from functools import cache
from itertools import product

import pytest
import torch
from processes import IMAGES, MLP, SGD, close

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
    "precision=16-mixed data._target_=spike.made data.shuffle=false data.meta.input=[16] "
    "data.meta.classes=4 train.batch_size=10 train.max_steps=4 train.eval_every=4"
)
RECIPE = (
    "optimizer.groups=[{match:head,lr:0.05}] optimizer.no_decay_on=norms_and_biases "
    "train.freeze=[layers.0] train.clip_value=0.02 scheduler=cosine scheduler.warmup=2"
)
UPDATES = ("master_weights", "remainders", "kahan", "stochastic_rounding")
JOBS = {name: f"precision={name} train.clip_norm=1" for name in PRECISIONS} | {
    "accumulated": "train.accumulate=3 train.batch_size=10",
    "summed": "precision=bf16-true train.accumulate=128 train.batch_size=2 train.max_steps=1",
    "uneven": "debug.overfit=67 train.batch_size=33 train.eval_every=null",
    "spike": SPIKE,
    "recipe": RECIPE,
    **{name: f"precision=bf16-true precision.update={name}" for name in UPDATES},
    "ema": "train.ema=0.5 precision=bf16-mixed train.eval_every=2",
    "state": "optimizer=adamw optimizer.lr=0.01 optimizer.state_dtype=bfloat16",
}
STRATEGIES = ("ddp", "fsdp")
SECOND_EXAMPLES = {
    "ddp": ("64-true", "bf16-mixed", "bf16-true", "recipe", "ema", "remainders", "kahan"),
    "fsdp": ("32-true", "16-mixed", "master_weights", "stochastic_rounding"),
}
"""Jobs of the second tier: the other strategy shows the same in the first."""


def is_second(processes, strategy, name):
    # What four processes share out differs, and how they agree does not.
    return processes == 4 or name in SECOND_EXAMPLES[strategy]


def rows(names, processes=2):
    """Return parameters (processes, strategy, name)."""
    return [
        pytest.param(*row, marks=pytest.mark.extended if is_second(*row) else ())
        for row in product([processes], STRATEGIES, names)
    ]


@pytest.fixture(scope="module")
def alone(run_in_processes, tmp_path_factory):
    jobs = {name: f"{MLP} {IMAGES} {SGD} {more}" for name, more in JOBS.items()}
    return run_in_processes(1, jobs, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def several(run_in_processes, tmp_path_factory):
    """Return the outcome of a job; all jobs of one tier and number of processes run together."""

    @cache
    def outcomes(processes, of_second):
        names = JOBS if processes == 2 else ("64-true", "uneven")
        jobs = {
            f"{strategy}-{name}": f"{MLP} {IMAGES} {SGD} strategy={strategy} {JOBS[name]}"
            for strategy, name in product(STRATEGIES, names)
            if is_second(processes, strategy, name) == of_second
        }
        return run_in_processes(processes, jobs, tmp_path_factory.mktemp("several"))

    def outcome(processes, strategy, name):
        of_second = is_second(processes, strategy, name)
        return outcomes(processes, of_second)[f"{strategy}-{name}"]

    return outcome


PLACE = ("processes", "strategy", "name")


@pytest.mark.parametrize(PLACE, [*rows(PRECISIONS), *rows(["64-true"], 4)])
def test_several_processes_train_as_one(alone, several, processes, strategy, name):
    one, many, within = alone[name], several(processes, strategy, name), PRECISIONS[name]
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        close(one.values(key), many.values(key), **within)
    for key in ("train/loss", "train/grad_norm", "val/accuracy"):
        assert many.values(key) == many.values(key, rank=1)
    close(one.values("train/lr"), many.values("train/lr"), rtol=0, atol=0)


@pytest.mark.parametrize(PLACE, [*rows(["accumulated", "uneven"]), *rows(["uneven"], 4)])
def test_every_example_weighs_the_same(alone, several, processes, strategy, name):
    """In steps of several micro-batches, and in batches that do not divide: of 67 examples the last
    batch of an epoch has one, which every process computes and only one counts."""
    one, many = alone[name], several(processes, strategy, name)
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/accuracy"):
        close(one.values(key), many.values(key), **PRECISIONS["32-true"])
    close(one.weights(), many.weights(), rtol=1e-4, atol=1e-5)
    assert {t.dtype for t in many.weights().values()} == {torch.float32}


@pytest.mark.parametrize(PLACE, rows(["summed"]))
def test_micro_batches_of_16_bits_are_added_in_float32(alone, several, processes, strategy, name):
    """Their sums in bfloat16 differ by two thousandths."""
    one, many = alone[name], several(processes, strategy, name)
    close(one.values("train/grad_norm"), many.values("train/grad_norm"), rtol=5e-4, atol=0)


@pytest.mark.parametrize(PLACE, rows(["recipe"]))
def test_groups_freezing_clipping_and_warm_up_are_alike(alone, several, processes, strategy, name):
    one, many = alone[name], several(processes, strategy, name)
    for key in ("lr/head", "lr/rest", "train/lr"):
        close(one.values(key), many.values(key), rtol=0, atol=0)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        close(one.values(key), many.values(key), rtol=1e-5, atol=1e-6)
    close(one.weights(), many.weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(PLACE, rows(["ema"]))
def test_the_average_is_evaluated_and_saved(alone, several, processes, strategy, name):
    one, many = alone[name], several(processes, strategy, name)
    for key in ("train/loss", "val/loss"):
        close(one.values(key), many.values(key), **PRECISIONS["bf16-mixed"])
    assert many.values("val/loss") == many.values("val/loss", rank=1)
    close(one.averages(), many.averages(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["64-true", "accumulated"])
def test_fsdp_reduces_once_per_step(several, name):
    """Not once per micro-batch: six steps of one, and of three."""
    assert several(2, "fsdp", name).text("reductions-0.txt") == "6"


@pytest.mark.parametrize(PLACE, rows(UPDATES))
def test_processes_agree_on_updated_weights(alone, several, processes, strategy, name):
    one, many = alone[name], several(processes, strategy, name)
    for key in ("train/loss", "val/loss"):
        close(one.values(key), many.values(key), **PRECISIONS["bf16-true"])
        assert many.values(key) == many.values(key, rank=1)
    assert {t.dtype for t in many.weights().values()} == {torch.bfloat16}


@pytest.mark.parametrize(PLACE, rows(["state"]))
def test_state_in_bfloat16_stands_beside_float32_weights(alone, several, processes, strategy, name):
    one, many = alone[name], several(processes, strategy, name)
    for key in ("train/loss", "val/loss"):
        close(one.values(key), many.values(key), rtol=2e-3, atol=1e-3)
        assert many.values(key) == many.values(key, rank=1)
    assert {value.dtype for value in many.weights().values()} == {torch.float32}
    assert {value.dtype for value in many.moments().values()} == {torch.bfloat16}


@pytest.mark.parametrize(PLACE, rows(["spike"]))
def test_one_overflow_skips_the_step_in_all_processes(alone, several, processes, strategy, name):
    one, many = alone[name], several(processes, strategy, name)
    assert many.values("loss_scale/overflow") == {1: 0, 2: 0, 3: 1, 4: 0}
    for key in ("overflow", "value", "skipped_steps"):
        assert many.values(f"loss_scale/{key}") == one.values(f"loss_scale/{key}")
        assert many.values(f"loss_scale/{key}", rank=1) == one.values(f"loss_scale/{key}")
    close(one.weights(), many.weights(), rtol=2e-3, atol=1e-3)


@pytest.fixture(scope="module")
def parts(run_in_processes, tmp_path_factory):
    typed = f"{IMAGES} {SGD} ~model +model._target_=nets.Parts"
    float8 = f"{typed} precision=float8-tensorwise precision.emulate=true"
    wanted = {strategy: f"{float8} strategy={strategy}" for strategy in STRATEGIES}
    wanted["packed"] = f"{typed} precision=bnb-nf4 strategy=fsdp"
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
