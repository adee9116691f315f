"""How often does a sweep recommend what trains worse, and how many seeds does a true answer need?

    python -m bench.sweep_errors [--sweeps 400]

Simulated sweeps: 32-true and precisions that are twice as fast, whose losses are normal and judged
as by `python -m runner -m`. Effects are in tolerances: the default one, a standard deviation of
32-true's loss between seeds. `spread` is the precision's deviation over 32-true's, `pairing` the
correlation of the losses of one seed. From an effect of 1 on a recommendation is wrong.
"""

import random
from collections.abc import Sequence
from math import sqrt

from bench.common import parse_options, table, write
from runner.core.run.run_result import RunResult
from runner.sweeps.report.conclusion import sweep_conclusion
from runner.sweeps.verdict.compare import BASELINE, compare_with_baselines

EFFECTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
SEEDS = (2, 3, 5, 10)
SPREADS = (0.5, 1.0, 2.0)
PAIRINGS = (0.0, 0.9, 0.99)
POWER = 0.8


def job(precision: str, seed: int, loss: float) -> RunResult:
    """Return the result of a job."""
    return RunResult(
        precision=precision,
        label=f"{precision} seed={seed}",
        folder="",
        group=precision,
        seed=seed,
        device="simulated",
        quality="val/loss",
        direction="min",
        metrics={"val/loss": loss},
        examples_per_second=1.0 if precision == BASELINE else 2.0,
    )


def recommends(
    draw: random.Random, seeds: int, effect: float, spread: float, pairing: float, count: int
) -> bool:
    """Return whether a simulated sweep of a number of fast precisions recommends one of them."""
    results = []
    for seed in range(seeds):
        base = draw.gauss(0, 1)
        results.append(job(BASELINE, seed, 10 + base))
        for number in range(count):
            own = pairing * base + sqrt(1 - pairing**2) * draw.gauss(0, 1)
            results.append(job(f"b{number}", seed, 10 + effect + spread * own))
    answer = sweep_conclusion(compare_with_baselines(results))
    pick = answer.pick
    return pick is not None and not pick.is_baseline


def share(sweeps: int, *settings: float, count: int = 1) -> float:
    """Return the share of sweeps that recommend a fast precision."""
    draw = random.Random(0)
    seeds, *rest = settings
    return sum(recommends(draw, int(seeds), *rest, count) for _ in range(sweeps)) / sweeps


def needed(sweeps: int, spread: float, pairing: float) -> str:
    """Return the seeds with which a precision that is as good is recommended in 80 % of sweeps."""
    for seeds in (3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50):
        if share(sweeps, seeds, 0.0, spread, pairing) >= POWER:
            return str(seeds)
    return "over 50"


def rows(sweeps: int, count: int) -> Sequence[Sequence[str]]:
    """Return a row for each spread, pairing and number of seeds."""
    made = []
    for spread in SPREADS:
        for pairing in PAIRINGS:
            for seeds in SEEDS:
                shares = [share(sweeps, seeds, e, spread, pairing, count=count) for e in EFFECTS]
                cells = [f"{value:.1%}" for value in shares]
                made.append([f"{spread:g}", f"{pairing:g}", str(seeds), *cells])
    return made


def main() -> None:
    """Simulate sweeps."""
    sweeps = parse_options(__doc__, sweeps=400).sweeps
    head = ["spread", "pairing", "seeds", *(f"effect {effect:g}" for effect in EFFECTS)]
    power = [
        [f"{spread:g}", f"{pairing:g}", needed(sweeps // 4, spread, pairing)]
        for spread in SPREADS
        for pairing in PAIRINGS
    ]
    body = (
        f"{sweeps} sweeps in each cell: the share that recommends a fast precision. From effect 1 "
        "on that is wrong.\n\nOne precision beside 32-true:\n\n"
        f"{table(head, rows(sweeps, 1))}\n\nThree, all of this effect:\n\n"
        f"{table(head, rows(sweeps // 4, 3))}\n\n"
        f"Seeds with which a precision of effect 0 is recommended in {POWER:.0%} of sweeps "
        f"({sweeps // 4} each):\n\n{table(['spread', 'pairing', 'seeds'], power)}"
    )
    write("sweep_errors", "How often does a sweep recommend what trains worse?", body)


if __name__ == "__main__":
    main()
