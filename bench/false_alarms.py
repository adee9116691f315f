"""How often does mode=advise call a precision worse that is not?

    python -m bench.false_alarms [--comparisons 120]

Two kinds of comparison in which nothing is worse, by real trainings of an MLP on digits: float32
against float32 from weights that differ in their last bits (what rounding alone does), and against
float32 from other seeds (unpaired: as much noise as there can be). Each is judged as mode=advise
judges one of six precisions. Below, the verdicts on simulated normal differences of a known size,
which say what the test finds.
"""

import random
from collections import Counter
from collections.abc import Sequence

import torch

from bench.common import parse_options, table, write
from bench.training import CPU, training_state
from models.mlp import MLP
from runner.core import metric_names, training_loop
from runner.core.config.schema import TrainSpec
from runner.core.loop.step_records import EvalRecord
from runner.data.datasets.digits import digits
from runner.data.loader import Loader
from runner.precision.registry import load_precision
from runner.sweeps.verdict.statistics import (
    ERROR_RATE,
    MeanDifference,
    Tolerance,
    non_inferiority_test,
)
from runner.training.tasks.classification import Classification

SEEDS, JUDGED = 5, 6
ORDER = ("indistinguishable", "unclear", "worse", "better")
SPLITS = digits()


def validation_loss(seed: int, nudge: int = 0, steps: int = 60) -> float:
    """Train, and return val/loss.

    Args:
        nudge: which last bits of the first weights are changed; 0 for none.
    """
    torch.manual_seed(seed)
    precision, model = load_precision("32-true"), MLP([1, 8, 8], 10, [32])
    if nudge:
        turn = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + (torch.rand(p.shape, generator=turn) - 0.5) * 2**-22)
    state = training_state(model, precision, Classification(), lr=3e-3)
    loader = Loader(SPLITS.train, 32, shuffle=True, seed=seed, device=CPU)
    validation = Loader(SPLITS.val, 512, shuffle=False, seed=0, device=CPU)
    train = TrainSpec(max_steps=steps, eval_every=steps, log_every=steps)
    records = training_loop.fit(state, loader, validation, train)
    return next(r.metrics[metric_names.VAL_LOSS] for r in records if isinstance(r, EvalRecord))


def count_trained(comparisons: int, paired: bool) -> Counter[str]:
    """Count the verdicts on trainings of which none is worse."""
    counts: Counter[str] = Counter()
    for number in range(comparisons):
        seeds = range(number * SEEDS, (number + 1) * SEEDS)
        base = [validation_loss(seed) for seed in seeds]
        if paired:
            other = [validation_loss(seed, nudge=seed + 1) for seed in seeds]
        else:
            other = [validation_loss(seed + 10**6) for seed in seeds]
        gaps = [a - b for a, b in zip(other, base, strict=True)]
        mean = MeanDifference.of_pairs(gaps)
        counts[non_inferiority_test(mean, base, Tolerance(), JUDGED).verdict] += 1
    return counts


def count_simulated(effect: float, noise: float, count: int) -> Counter[str]:
    """Count the verdicts on normal gaps, whose sizes are in standard deviations of float32."""
    draw, counts = random.Random(0), Counter[str]()
    for _ in range(count):
        base = [draw.gauss(0, 1) for _ in range(SEEDS)]
        gaps = [draw.gauss(effect, noise) for _ in range(SEEDS)]
        mean = MeanDifference.of_pairs(gaps)
        counts[non_inferiority_test(mean, base, Tolerance(), JUDGED).verdict] += 1
    return counts


def row(name: Sequence[str], counts: Counter[str]) -> list[str]:
    """Return the cells of a row of the table."""
    total = sum(counts.values())
    return [*name, str(total), *(f"{counts[verdict] / total:.1%}" for verdict in ORDER)]


def main() -> None:
    """Count the verdicts on trained and on simulated comparisons."""
    chosen = parse_options(__doc__, comparisons=120)
    torch.set_num_threads(1)
    trained = [
        row(["last bits of the weights"], count_trained(chosen.comparisons, paired=True)),
        row(["other seeds, unpaired"], count_trained(chosen.comparisons, paired=False)),
    ]
    made = [
        row([f"{effect:g}", f"{noise:g}"], count_simulated(effect, noise, 4000))
        for noise in (0.1, 0.5, 1.4)
        for effect in (0.0, 0.5, 1.0, 2.0, 4.0)
    ]
    head = ["comparisons", *ORDER]
    body = (
        f"{SEEDS} seeds a side, {JUDGED} precisions judged together at {ERROR_RATE:.0%}, "
        "tolerance 1.\n\n"
        f"{table(['what differs', *head], trained)}\n\n"
        "Simulated, in standard deviations of float32 between seeds: the true gap, and the noise "
        f"of a pair's gap.\n\n{table(['true gap', 'noise', *head], made)}"
    )
    write("false_alarms", "How often is a precision called worse that is not?", body)


if __name__ == "__main__":
    main()
