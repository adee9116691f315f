"""Does the interval of the speed to an equal loss contain the true ratio?

    python -m bench.equal_loss [--count 500] [--sweeps <folder> ...]

Simulated sweeps of 3 to 5 seeds. The loss of 32-true falls from 2.3 to a floor by a power law of
the steps. The precision needs 1 / efficiency times the steps of 32-true for any loss, and a step of
it is 1.2 times as fast: the true ratio is their product. Each loss has the noise of its batch, of
which the precision shares all but its own share of the deviation; each run is off by a factor of
its own. Folders of sweeps that have run add tables of what they measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from bench.common import parse_options, table, write
from bench.sweep_errors import job
from runner.sweeps.report.load import load_from_folder
from runner.sweeps.report.wording import format_range, format_ratio
from runner.sweeps.verdict import equal_loss
from runner.sweeps.verdict.compare import BASELINE, Comparison, compare_with_baselines
from runner.sweeps.verdict.statistics import Ratio, Tolerance
from runner.tracking.history import Curve, Points, curve_points

SPEED = 1.2
SPEED_DEVIATION = 0.02
START = 2.3
ANY_LOSS = Tolerance(max_gap=1e9)


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Attributes:
        efficiency: steps of 32-true over those of the precision for any loss.
        steps: of a run.
        every: steps between two points of the curve.
        noise: relative deviation of a point's loss.
        own: share of it that the precision does not share with 32-true.
        run: relative deviation of a run's loss as a whole.
        floor: loss after infinitely many steps.
        power: of the steps, by which the loss falls.
        plateau: loss below which the precision does not fall; 0 for none.
    """

    name: str
    efficiency: float
    steps: int = 500
    every: int = 1
    noise: float = 0.2
    own: float = 0.3
    run: float = 0.01
    floor: float = 0.3
    power: float = 0.5
    plateau: float = 0.0


LONG = {"steps": 5000, "noise": 0.1, "own": 0.1, "run": 0.005, "floor": 0.0, "power": 0.3}
SPARSE = {"every": 50, "noise": 0.02, "own": 0.5}
SETTINGS = (
    *(Setting("500 losses of batches", each) for each in (0.8, 1.0, 1.3, 2.0)),
    *(Setting("5000 losses of batches, no floor", each, **LONG) for each in (0.9, 1.0, 1.1)),
    *(Setting("10 validations", each, **SPARSE) for each in (0.8, 1.0, 1.2)),
    *(Setting("8 validations", each, steps=400, **SPARSE) for each in (0.8, 1.2)),
)
PLATEAUS = (0.0, 0.5, 0.6, 0.7)


def simulated_sweep(
    setting: Setting, draw: np.random.Generator, tolerance: Tolerance
) -> tuple[Comparison, list[tuple[Curve, Curve]]]:
    """Return the comparison of a simulated precision, and the curves of each seed."""
    steps = np.arange(setting.every, setting.steps + 1, setting.every, dtype=float)
    results = []
    curves = {}
    pairs = []
    for seed in range(int(draw.integers(3, 6))):
        batches = draw.standard_normal(len(steps))
        level = exp(0.03 * draw.standard_normal())
        pair = []
        for precision in ("fast", BASELINE):
            is_fast = precision == "fast"
            seen = steps * (setting.efficiency if is_fast else 1.0)
            fallen = (1 + 50 * seen / setting.steps) ** -setting.power
            losses = setting.floor + (START - setting.floor) * fallen
            if is_fast:
                losses = np.maximum(losses, setting.plateau)
            shared = (1 - setting.own**2) ** 0.5 * batches
            noise = shared + setting.own * draw.standard_normal(len(steps))
            factor = level * exp(setting.run * draw.standard_normal())
            losses = factor * losses * np.exp(setting.noise * noise - setting.noise**2 / 2)
            speed = (SPEED if is_fast else 1.0) * exp(SPEED_DEVIATION * draw.standard_normal())
            pair.append(np.array([steps, steps, losses]))
            result = job(precision, seed, float(losses[-1]))
            timed = replace(result, examples_per_second=100 * speed, step_ms=10 / speed)
            results.append(timed)
            curves[id(results[-1])] = {"train/loss": pair[-1]}
        pairs.append((pair[0], pair[1]))
    compared = compare_with_baselines(results, tolerance=tolerance)
    (comparison,) = (each for each in compared if not each.is_baseline)
    return equal_loss.with_equal_loss(comparison, curves, tolerance), pairs


def coverage_row(setting: Setting, count: int) -> tuple[float, list[str]]:
    """Return the share of sweeps whose interval contains the true ratio, and the table's row."""
    truth = SPEED * setting.efficiency
    draw = np.random.default_rng(0)
    ratios = [simulated_sweep(setting, draw, ANY_LOSS)[0].equal_loss for _ in range(count)]
    known = [ratio for ratio in ratios if ratio]
    share = fmean(ratio.low <= truth <= ratio.high for ratio in known)
    middle = exp(fmean(log(ratio.value) for ratio in known))
    width = float(np.median([ratio.high / ratio.low for ratio in known]))
    # The same sweeps by the default tolerance, which calls some of them not reached.
    draw = np.random.default_rng(0)
    judged = [simulated_sweep(setting, draw, Tolerance())[0].equal_loss for _ in range(count)]
    missed = fmean(not ratio.value for ratio in judged if ratio)
    cells = [f"{truth:.2f}", f"{share:.1%}", f"{middle:.3f}", f"{width:.2f}", f"{missed:.1%}"]
    return share, [setting.name, *cells]


def isotonic_curve(curve: Curve) -> Points:
    """Return the blocks of the decreasing isotonic regression, each at the mean of its steps."""
    steps, losses = curve_points(curve)
    fitted = isotonic_regression(losses, increasing=False)
    starts = fitted.blocks[:-1]
    return np.add.reduceat(steps, starts) / np.diff(fitted.blocks), fitted.x[starts]


def running_mean(curve: Curve) -> Points:
    """Return the means over a window of a fifth of the curve."""
    steps, losses = curve_points(curve)
    window = np.ones(len(steps) // 5)

    def means(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.convolve(values, window / len(window), "valid")

    return means(steps), means(losses)


def growing_mean(curve: Curve) -> Points:
    """Return what the report takes."""
    return equal_loss.smoothed_curve(curve)


def method_row(setting: Setting, smooth: Callable[[Curve], Points], count: int) -> list[str]:
    """Return the bias and the coverage of one way of smoothing, by the steps alone."""
    draw = np.random.default_rng(0)
    values = []
    covered = []
    for _ in range(count):
        ratios = []
        for pair in simulated_sweep(setting, draw, ANY_LOSS)[1]:
            own, base = map(smooth, pair)
            loss = max(own[1][-1], base[1][-1])
            time = equal_loss.time_to_loss(own, loss)
            ratios.append(equal_loss.time_to_loss(base, loss) / time)
        ratio = Ratio.of_groups([*enumerate(ratios)], [(i, 1.0) for i, _ in enumerate(ratios)])
        assert ratio
        values += [log(each / setting.efficiency) for each in ratios]
        covered.append(ratio.low <= setting.efficiency <= ratio.high)
    return [f"{fmean(values):+.1%}", f"{fmean(covered):.1%}"]


def plateau_row(plateau: float, count: int) -> list[str]:
    """Return how often a precision that stops falling at a loss is said not to reach it."""
    draw = np.random.default_rng(0)
    setting = Setting("plateau", 1.0, plateau=plateau)
    found = [simulated_sweep(setting, draw, Tolerance())[0] for _ in range(count)]
    missed = fmean(not each.equal_loss.value for each in found if each.equal_loss)
    faster = fmean(each.speed_verdict == "faster" for each in found)
    return [f"{plateau:g}" if plateau else "none", f"{missed:.1%}", f"{faster:.1%}"]


def sweep_table(folder: Path) -> str:
    """Return what a sweep that has run measured, with its answer."""
    data = load_from_folder(folder)
    # A step of each job takes one millisecond: what is left is the ratio of the steps.
    jobs = [replace(each, result=replace(each.result, step_ms=1.0)) for each in data.jobs]
    by_steps = replace(data, jobs=jobs, tolerance=ANY_LOSS).compared
    rows = []
    for each, steps in zip(data.compared, by_steps, strict=True):
        if not each.is_baseline:
            ratios = map(_ratio_text, (each.speed_ratio, steps.equal_loss, each.equal_loss))
            verdict = each.verdict.value if each.verdict else ""
            rows.append([each.group.name, verdict, *ratios, each.speed_verdict])
    head = ["precision", "quality", "speed × 32-true", "steps to equal loss, any loss accepted"]
    head += ["speed to equal loss", "verdict on speed"]
    command = data.commands[0].replace(f" hydra.sweep.dir={folder}", "")
    return f"`{command}`\n\n{table(head, rows)}\n\n{data.answer.sentence}"


def _ratio_text(ratio: Ratio | None) -> str:
    if not ratio or not ratio.value:
        return "not reached" if ratio else ""
    return f"{format_ratio(ratio)} ({format_range(ratio) or 'no interval'})"


def main() -> None:
    """Simulate sweeps, and read those that have run."""
    options = parse_options(__doc__, count=500, sweeps=[])
    rows = [coverage_row(setting, options.count) for setting in SETTINGS]
    shares = [share for share, _ in rows]
    methods = {"isotonic": isotonic_curve, "fifth of the curve": running_mean}
    methods["last 30 % of the steps so far"] = growing_mean
    compared: list[Sequence[str]] = []
    for setting in SETTINGS:
        few = max(options.count // 5, 1)
        cells = [cell for each in methods.values() for cell in method_row(setting, each, few)]
        compared.append([setting.name, f"{setting.efficiency:g}", *cells])
    head = ["curve", "true ratio", "covered", "mean", "width of the interval", "not reached"]
    method_head = [f"{name}: {what}" for name in methods for what in ("bias", "covered")]
    parts = [
        f"{options.count} sweeps of 3 to 5 seeds in each row. Covered: the 95 % interval contains "
        f"the true ratio, {fmean(shares):.1%} over all rows, {min(shares):.1%} to "
        f"{max(shares):.1%}. Width: upper over lower end, median. Not reached: by the default "
        "tolerance; the other columns accept any final loss.",
        table(head, [row for _, row in rows]),
        "Ways of smoothing, by the steps alone, with a fifth of the sweeps. Bias: of the mean "
        "logarithm.",
        table(["curve", "efficiency", *method_head], compared),
        "A precision that is 1.2 × as fast in each step, and whose loss stops falling before that "
        "of 32-true, which ends near 0.58:",
        table(
            ["plateau", "not reached", "called faster"],
            [plateau_row(plateau, options.count) for plateau in PLATEAUS],
        ),
        *(sweep_table(Path(folder)) for folder in options.sweeps),
    ]
    write("equal_loss", "Does the interval of the speed to an equal loss hold?", "\n\n".join(parts))


if __name__ == "__main__":
    main()
