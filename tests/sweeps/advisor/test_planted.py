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

from runner.core.base.errors import Diverged
from runner.core.run.run import run_spec

# 16-true warns that the cases' eps is small for their learning rate; it is large enough here.
pytestmark = pytest.mark.filterwarnings("ignore:optimizer.eps")

CONF = Path(__file__).parents[2] / "helpers" / "planted" / "conf"
SEEDS = range(3)
# In float32's deviations between seeds.
MIN_HARMFUL_GAP = 5.0
MAX_HARMLESS_GAP = 2.0
UNTRACKED = "accelerator=cpu tracking=none checkpoint.final=false"
FP8 = ["precision=float8-tensorwise", "precision.emulate=true"]


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
            result = run_spec(
                spec, tmp_path_factory.mktemp("run"), console=Console(file=io.StringIO())
            )
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


def further(*values):
    """Return a case that is a second example of another one."""
    return pytest.param(*values, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    "words",
    [
        ["precision=16-mixed"],
        further(["precision=16-true"]),
        # No other module than the wide one repairs it.
        further(["precision=16-mixed", "precision.keep_fp32=[stem,body,head]"]),
    ],
    ids=" ".join,
)
def test_a_run_beyond_float16s_range_is_stopped(losses, words):
    assert losses("broken_by_range", *words) == [math.inf] * len(SEEDS)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("harmed_by_precision", ["precision=bf16-mixed"]),
        further("harmed_by_precision", ["precision=bf16-true"]),
        # No other module than the clock repairs it.
        further(
            "harmed_by_precision", ["precision=bf16-mixed", "precision.keep_fp32=[stem,body,head]"]
        ),
        ("harmed_in_the_head", FP8),
        further("harmed_in_the_head", [*FP8, "precision.ignore_modules=[stem,body]"]),
        further("harmed_in_the_head", ["precision=bf16-true"]),
    ],
)
def test_a_precision_harms_the_case_planted_for_it(gap, case, words):
    assert gap(case, *words) > MIN_HARMFUL_GAP


@pytest.mark.parametrize(
    ("case", "words"),
    [
        # The other half's range or bits are enough.
        ("broken_by_range", ["precision=bf16-mixed"]),
        further("broken_by_range", ["precision=bf16-true"]),
        further("harmed_by_precision", ["precision=16-mixed"]),
        further("harmed_in_the_head", ["precision=bf16-mixed"]),
        # One module in float32 repairs each case.
        ("broken_by_range", ["precision=16-mixed", "precision.keep_fp32=[wide]"]),
        further("broken_by_range", ["precision=16-true", "precision.keep_fp32=[wide]"]),
        ("harmed_by_precision", ["precision=bf16-mixed", "precision.keep_fp32=[clock]"]),
        ("harmed_in_the_head", [*FP8, "precision.ignore_modules=[head]"]),
        further("harmed_in_the_head", ["precision=bf16-true", "precision.keep_fp32=[head]"]),
        ("harmed_by_nothing", ["precision=bf16-mixed"]),
        further("harmed_by_nothing", ["precision=16-mixed"]),
        further("harmed_by_nothing", ["precision=bf16-true"]),
        further("harmed_by_nothing", ["precision=16-true"]),
    ],
)
def test_another_precision_or_one_module_in_float32_does_no_harm(gap, case, words):
    assert abs(gap(case, *words)) < MAX_HARMLESS_GAP
