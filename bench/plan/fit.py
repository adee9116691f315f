"""Fit the constants of runner.planning.card_speed to published steps, and say how wrong they are.

    python -m bench.plan.fit

Each pair of published speeds has one ratio. The constants are fitted to the sum of |error|^1.3 of
the logarithms, with a weak prior, once to all rows and once without each source, whose rows are
then predicted. The interval's width is the 80th percentile of those errors over the time that the
format changes; its coverage is that of widths from the other sources alone.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from hydra import compose, initialize_config_module
from scipy.optimize import minimize

from bench.common import RESULTS, table, write, write_rows
from bench.plan.published import PAIRS, SPEEDS, Job, Pair
from runner.config.hydra_plugins import VERSION_BASE
from runner.config.resolve import register_schema, resolve_spec
from runner.core.config.schema import RunSpec
from runner.core.policy.precision import ConversionPlan
from runner.planning.card_plan import rehearse
from runner.planning.card_speed import (
    ATTENTION_REACH,
    FIT,
    LEAST_ERROR,
    Fit,
    StepSeconds,
    recipe_change,
    recipe_of,
    step_seconds,
)
from runner.planning.room import DeviceSpec
from runner.planning.step_cost import StepCost
from runner.precision.registry import load_precision
from runner.rooms import install_rooms

PRIOR = {
    "product": (1.25, 0.1),
    "narrow_product": (1.15, 0.15),
    "narrow_width": (300.0, 300.0),
    "rowwise": (0.8, 0.1),
    "block": (0.85, 0.1),
    "mxfp8": (0.9, 0.1),
    "tf32": (0.75, 0.05),
}
"""Mean and standard deviation of each constant before any row is seen: what products within steps
and kernels of recipes are reported to reach."""
WEIGHT = 0.02  # of the prior
POWER = 1.3
COVERAGE = 0.8


class Prediction(NamedTuple):
    """A pair with its predicted ratio.

    Attributes:
        pair: the published speeds.
        ratio: predicted.
        turnover: time that changes, over the step's time.
    """

    pair: Pair
    ratio: float
    turnover: float

    @property
    def error(self) -> float:
        """Return the logarithm of predicted over published."""
        return math.log(self.ratio / (self.pair.speed / self.pair.base_speed))


def spec_of(overrides: Sequence[str]) -> RunSpec:
    """Return the spec of a plan."""
    register_schema()
    with initialize_config_module("runner.conf", **VERSION_BASE):
        words = ["mode=plan", "accelerator=cpu", *overrides]
        return resolve_spec(compose("config", overrides=words))


@cache
def cost_of(overrides: tuple[str, ...], precision: str, ignored: tuple[str, ...]) -> StepCost:
    """Return a step with its linear layers watched, but for those that are ignored."""
    # The emulated products of a CPU are others.
    name = "32-true" if precision == "tf32" else precision
    spec = spec_of([*overrides, f"precision={name}"])
    plain = rehearse(spec, None, ConversionPlan(), spec.train.batch_size)
    linear = [
        name
        for name, module in plain.model.named_modules()
        if type(module).__name__ == "Linear" and not name.endswith(ignored or ("?",))
    ]
    return rehearse(spec, None, ConversionPlan(), spec.train.batch_size, linear).cost


def sharded(step: StepSeconds, job: Job) -> StepSeconds:
    """Return a step whose update is shared by the cards."""
    return replace(step, update=step.update / job.gpus)


@cache
def card_of(job_card: tuple[str, ...]) -> DeviceSpec:
    """Return the card of a job."""
    return spec_of(job_card).section(DeviceSpec)


def seconds_in(pair: Pair, job: Job, precision: str, beside: str, fit: Fit) -> StepSeconds:
    """Return the predicted time of a micro-batch and an update in a precision."""
    card = card_of(tuple(job.card))
    recipe = recipe_of(precision_value(precision))
    cost = cost_of(tuple(job.overrides), beside, tuple(pair.ignored))
    tf32 = precision == "tf32"
    is_fused = job.compiled and (pair.fuses or recipe is None)
    step = step_seconds(cost, card, tf32, is_fused, fit)
    if recipe:
        change = recipe_change(cost, card, recipe, fit)
        step = replace(step, gain=change.gain, casts=change.casts)
    return sharded(step, job)


precision_value = cache(load_precision)


def recipe_name(precision: str) -> bool:
    """Return whether a precision converts layers."""
    return precision.startswith(("transformer-engine", "float8-", "torchao-"))


def predict(pair: Pair, fit: Fit) -> Prediction:
    """Return the ratio of a pair's speeds with some constants."""
    job = pair.job or pair.base
    base_beside = "bf16-true" if recipe_name(pair.base_precision) else pair.base_precision
    base = seconds_in(pair, pair.base, pair.base_precision, base_beside, fit)
    own = seconds_in(pair, job, pair.precision, pair.beside, fit)
    scaled = base.total / pair.base.rows * job.rows
    return Prediction(pair, scaled / own.total, own.turnover(scaled))


def fitted(pairs: Sequence[Pair]) -> Fit:
    """Return the constants that fit some pairs."""
    means, deviations = (np.array(each) for each in zip(*PRIOR.values(), strict=True))

    def loss(scaled: Any) -> float:
        values = means + scaled * deviations
        if min(values) <= 0:
            return 1e6 - min(values)
        fit = replace(FIT, **dict(zip(PRIOR, map(float, values), strict=True)))
        errors = [abs(predict(pair, fit).error) ** POWER for pair in pairs]
        return sum(errors) + WEIGHT * float(scaled @ scaled)

    found = np.zeros(len(PRIOR))
    for _ in range(2):
        found = minimize(loss, found, method="Nelder-Mead", options={"maxiter": 800}).x
    values = (means + found * deviations).round(3)
    return replace(FIT, **dict(zip(PRIOR, map(float, values), strict=True)))


def standardized(prediction: Prediction) -> float:
    """Return an error in the unit of Fit.error."""
    return max(abs(prediction.error) - LEAST_ERROR, 0) / max(prediction.turnover, 1e-9)


def main() -> None:
    """Fit, leave each source out, and write both."""
    install_rooms()
    sources = list(dict.fromkeys(pair.source for pair in PAIRS))
    everything = fitted(PAIRS)
    left_out: list[Prediction] = []
    for source in sources:
        fit = fitted([pair for pair in PAIRS if pair.source != source])
        left_out += [predict(pair, fit) for pair in PAIRS if pair.source == source]
    changed = [one for one in left_out if one.turnover > 0]
    width = float(np.quantile([*map(standardized, changed)], COVERAGE))
    covered = []
    for source in sources:
        others = [standardized(one) for one in changed if one.pair.source != source]
        own_width = float(np.quantile(others, COVERAGE))
        covered += [
            abs(one.error) <= LEAST_ERROR + own_width * one.turnover
            for one in left_out
            if one.pair.source == source
        ]
    times = []
    for each in SPEEDS:
        pair = Pair(
            each.source, each.name, each.job, each.precision, each.speed, each.precision, each.speed
        )
        step = seconds_in(pair, each.job, each.precision, each.precision, everything)
        times.append((each, each.job.rows / each.speed / step.total))
    slowest, fastest = np.quantile([factor for _, factor in times], (0.9, 0.1))
    constants = replace(
        everything,
        error=round(width, 3),
        slowest=round(float(slowest), 2),
        fastest=round(float(fastest), 2),
    )
    report(constants, left_out, covered, times, sources)


def report(
    constants: Fit,
    left_out: Sequence[Prediction],
    covered: Sequence[bool],
    times: Any,
    sources: Any,
) -> None:
    """Write the page and the file of constants."""
    errors = np.abs([math.exp(one.error) - 1 for one in left_out])
    facts = {
        "rows": len(left_out),
        "median error of the ratio": f"{np.median(errors):.1%}",
        "within 15 %": f"{(errors <= 0.15).sum()} of {len(errors)}",
        "covered by the 80 % interval": f"{np.mean(covered):.0%}",
    }
    rows = []
    for one in left_out:
        true = one.pair.speed / one.pair.base_speed
        half = LEAST_ERROR + constants.error * one.turnover
        interval = f"{one.ratio * math.exp(-half):.2f} to {one.ratio * math.exp(half):.2f}"
        now = predict(one.pair, constants)
        rows.append(
            [
                *(one.pair.source, one.pair.name, one.pair.precision, one.pair.base_precision),
                *(f"{true:.3f}", f"{one.ratio:.3f}", f"{math.exp(one.error) - 1:+.1%}", interval),
                f"{now.ratio:.3f}",
            ]
        )
    head = [
        "source",
        "job",
        "precision",
        "against",
        "published",
        "predicted without the source",
        "error",
        "80 % interval",
        "fitted to all",
    ]
    time_rows = [
        [each.source, each.name, each.precision, f"{each.speed:,.0f}", f"{factor:.2f}"]
        for each, factor in times
    ]
    time_head = [
        "source",
        "job",
        "precision",
        "published, per second and card",
        "its time over the predicted",
    ]
    body = [
        table(["what", "value"], [[name, str(value)] for name, value in facts.items()]),
        f"Attention reaches {ATTENTION_REACH} of the rate of products in all rows: an assumption.",
        "## Ratios",
        table(head, rows),
        "## Times of a step, from which the range without an anchor is",
        table(time_head, time_rows),
        "## Constants",
        table(["constant", "value"], [[k, str(v)] for k, v in asdict(constants).items()]),
    ]
    write("plan", (__doc__ or "").splitlines()[0], "\n\n".join(body))
    write_rows(RESULTS / "plan.json", {"constants": asdict(constants), "facts": facts})


if __name__ == "__main__":
    main()
