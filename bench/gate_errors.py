"""How often does mode=gate err, and how many trials does it save?

    python -m bench.gate_errors [--comparisons 200]

Real trainings of an MLP on digits: float32 against float32, so that the true gap is 0, once from
weights that differ in their last bits (what rounding alone does; few of these differences are
large), once from other seeds (as much noise as there can be). A planted gap is added to the loss of
the second training: 1, 2 and 4 times the bar. The bar is given in standard deviations of a pair's
difference: a wide bar is decided soon, a narrow one late or never. Each comparison may take up to
MAX_SEEDS seeds; the same trainings serve every bar and gap.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

import torch

from bench.common import parse_options, table, write
from bench.false_alarms import validation_loss
from runner.sweeps.verdict.gate import look_until_decided
from runner.sweeps.verdict.statistics import ERROR_RATE

MAX_SEEDS = 10
BARS = {"last bits of the weights": (1.0,), "other seeds": (0.5, 1.0, 2.0)}
"""Standard deviations of a pair's difference, by what differs."""
GAPS = (0.0, 1.0, 2.0, 4.0)
"""Times the bar."""
COSTS = ("mean seeds", "trials saved")
DECISIONS = ("accepted", "rejected", "undecided")


def differences(comparisons: int) -> dict[str, list[list[float]]]:
    """Return the differences of val/loss of each comparison's pairs, by what differs in a pair."""
    made: dict[str, list[list[float]]] = {kind: [] for kind in BARS}
    nudged, other = made.values()
    for number in range(comparisons):
        seeds = range(number * MAX_SEEDS, (number + 1) * MAX_SEEDS)
        base = [validation_loss(seed) for seed in seeds]
        nudges = [validation_loss(seed, nudge=seed + 1) for seed in seeds]
        others = [validation_loss(seed + 10**6) for seed in seeds]
        nudged.append([a - b for a, b in zip(nudges, base, strict=True)])
        other.append([a - b for a, b in zip(others, base, strict=True)])
    return made


def judge(made: Sequence[Sequence[float]], bar: float, planted: float) -> list[str]:
    """Return the cells of a row: the shares of the decisions, and the seeds that they took."""
    counts: Counter[str] = Counter()
    seeds = []
    for gaps in made:
        last = look_until_decided([gap + planted for gap in gaps], bar, MAX_SEEDS)[-1]
        counts[last.decision] += 1
        seeds.append(last.seeds)
    shares = [f"{counts[decision] / len(made):.1%}" for decision in DECISIONS]
    return [*shares, f"{fmean(seeds):.1f}", f"{1 - fmean(seeds) / MAX_SEEDS:.0%}"]


def main() -> None:
    """Judge null comparisons and planted gaps."""
    chosen = parse_options(__doc__, comparisons=200)
    torch.set_num_threads(1)
    rows = []
    for kind, made in differences(chosen.comparisons).items():
        deviation = stdev(gap for gaps in made for gap in gaps)
        for bar in BARS[kind]:
            for gap in GAPS:
                cells = judge(made, bar * deviation, gap * bar * deviation)
                rows.append([kind, f"{bar:g} ({bar * deviation:.2g})", f"{gap:g}", *cells])
    body = (
        f"{chosen.comparisons} comparisons of up to {MAX_SEEDS} seeds in each row; stated are "
        f"{ERROR_RATE:.0%} accepted and {ERROR_RATE:.0%} rejected at a gap of exactly the bar. "
        "The bar is in standard deviations of a pair's difference, with the loss in parentheses. A "
        f"trial saved is one that a fixed number of {MAX_SEEDS} seeds would have trained.\n\n"
        + table(["a pair differs in", "bar", "true gap × bar", *DECISIONS, *COSTS], rows)
    )
    write("gate_errors", "How often does mode=gate err?", body)


if __name__ == "__main__":
    main()
