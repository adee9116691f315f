"""Each planted case is harmed by the precision it names, and one module in float32 repairs it.

Losses are val/loss over SEEDS. A precision shares initial weights and batches with float32, so it
is judged by the mean of the differences, in units of float32's own deviation between seeds."""

import io
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import pytest
from rich.console import Console

from runner.modes.run import run
from runner.utils.errors import Diverged

# 16-true warns that the cases' eps is small for their learning rate; it is large enough here.
pytestmark = pytest.mark.filterwarnings("ignore:optimizer.eps")

CONF = Path(__file__).parents[2] / "helpers" / "planted" / "conf"
SEEDS = range(3)
# In float32's deviations between seeds.
MIN_HARMFUL_GAP = 5.0
MAX_HARMLESS_GAP = 2.0
UNTRACKED = "accelerator=cpu tracking=none checkpoint.final=false"
FP8 = ("precision=float8-tensorwise", "precision.emulate=true")


@pytest.fixture(scope="session")
def losses(compose, tmp_path_factory):
    """One loss for each seed; infinity where a guard stopped the run."""

    @cache
    def losses_of(case, *typed):
        # bfloat16 harms the head slowly.
        steps = 200 if case == "harmed_in_the_head" else 100
        spec = compose(
            *f"hydra.searchpath=[file://{CONF}] experiment={case} {UNTRACKED}".split(),
            f"train.max_steps={steps}",
            f"train.eval_every={steps}",
            *typed,
        )
        return [loss(replace(spec, seed=seed)) for seed in SEEDS]

    def loss(spec):
        try:
            result = run(spec, tmp_path_factory.mktemp("run"), console=Console(file=io.StringIO()))
        except Diverged:
            return math.inf
        return result.metrics["val/loss"]

    return losses_of


@pytest.fixture
def gap(losses):
    """Return how much worse a precision is than float32, in float32's deviations between seeds."""

    def of(case, *typed):
        plain = losses(case, "precision=32-true")
        worse = fmean(losses(case, *typed)) - fmean(plain)
        return worse / stdev(plain)

    return of


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_a_run_beyond_float16s_range_is_stopped(losses, precision):
    assert losses("broken_by_range", f"precision={precision}") == [math.inf] * len(SEEDS)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_trains_the_model_beyond_float16s_range(gap, precision):
    assert abs(gap("broken_by_range", f"precision={precision}")) < MAX_HARMLESS_GAP


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_one_module_in_float32_repairs_the_lack_of_range(gap, precision):
    repaired = gap("broken_by_range", f"precision={precision}", "precision.keep_fp32=[wide]")
    assert abs(repaired) < MAX_HARMLESS_GAP


def test_no_other_module_repairs_the_lack_of_range(losses):
    others = losses("broken_by_range", "precision=16-mixed", "precision.keep_fp32=[stem,body,head]")
    assert others == [math.inf] * len(SEEDS)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_harms_a_model_that_needs_more_bits(gap, precision):
    assert gap("harmed_by_precision", f"precision={precision}") > MIN_HARMFUL_GAP


def test_float16_has_enough_bits_for_that_model(gap):
    assert abs(gap("harmed_by_precision", "precision=16-mixed")) < MAX_HARMLESS_GAP


def test_one_module_in_float32_repairs_the_lack_of_precision(gap):
    repaired = gap("harmed_by_precision", "precision=bf16-mixed", "precision.keep_fp32=[clock]")
    assert abs(repaired) < MAX_HARMLESS_GAP


def test_no_other_module_repairs_the_lack_of_precision(gap):
    others = "precision.keep_fp32=[stem,body,head]"
    assert gap("harmed_by_precision", "precision=bf16-mixed", others) > MIN_HARMFUL_GAP


def test_fp8_harms_the_head(gap):
    assert gap("harmed_in_the_head", *FP8) > MIN_HARMFUL_GAP
    assert gap("harmed_in_the_head", *FP8, "precision.ignore_modules=[stem,body]") > MIN_HARMFUL_GAP


def test_fp8_outside_the_head_does_no_harm(gap):
    assert (
        abs(gap("harmed_in_the_head", *FP8, "precision.ignore_modules=[head]")) < MAX_HARMLESS_GAP
    )
    assert abs(gap("harmed_in_the_head", "precision=bf16-mixed")) < MAX_HARMLESS_GAP


def test_a_head_in_float32_repairs_bf16_true(gap):
    assert gap("harmed_in_the_head", "precision=bf16-true") > MIN_HARMFUL_GAP
    repaired = gap("harmed_in_the_head", "precision=bf16-true", "precision.keep_fp32=[head]")
    assert abs(repaired) < MAX_HARMLESS_GAP


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_no_native_precision_harms_the_case_harmed_by_nothing(gap, precision):
    assert abs(gap("harmed_by_nothing", f"precision={precision}")) < MAX_HARMLESS_GAP
