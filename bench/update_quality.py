"""What does each rule of precision.update recover of what bf16-true loses?

    python -m bench.update_quality [--seeds 5]

Every contender trains from the same weights on the same batches as float32, for each seed; the
verdict is that of mode=advise: a one-sided paired t test, tolerance one standard deviation of
float32's loss between seeds. ResNet-18 on scikit-learn's digits, and a byte-level GPT on Python's
documentation.
"""

import argparse
import tempfile
from pathlib import Path

import runner
from bench.common import table, write
from runner.modes.result import RunResult
from runner.sweeps.report.statistics import (
    baseline_spread,
    non_inferiority_test,
)
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.formatting import format_number

COMMON = (
    *("accelerator=cpu", "tracking=none", "checkpoint.final=false"),
    *("scheduler=cosine", "optimizer.lr=3e-4"),
)
TRAININGS = {
    "GPT, text": (
        *("model=gpt", "data=text", "model.layers=2", "model.width=64", "model.heads=2"),
        *("data.context=64", "train.batch_size=16", "train.clip_norm=1.0"),
        *("train.max_steps=300", "train.eval_every=300"),
    ),
    "ResNet-18, digits": (
        *("model=resnet", "data=digits", "train.batch_size=16"),
        *("train.max_steps=40", "train.eval_every=40"),
    ),
}
RULES = ("nearest", "stochastic_rounding", "kahan", "remainders", "master_weights")


def results_of(seeds: int, *words: str) -> list[RunResult]:
    """Return the results of a training, one for each seed."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            runner.run([*COMMON, *words, f"seed={seed}"], out=Path(folder) / str(seed))
            for seed in range(seeds)
        ]


def rows_of(training: str, words: tuple[str, ...], seeds: int) -> list[list[str]]:
    """Return the table's rows for one training."""
    base = results_of(seeds, *words, "precision=32-true")
    losses = [result.metrics[VAL_LOSS] for result in base]
    spread = baseline_spread(losses)
    mean = sum(losses) / seeds
    rows = [[training, "32-true", f"{mean:.4f} (sd {spread:.2g})", "", "baseline", ""]]
    for rule in RULES:
        made = results_of(seeds, *words, "precision=bf16-true", f"precision.update={rule}")
        gaps = [one.metrics[VAL_LOSS] - loss for one, loss in zip(made, losses, strict=True)]
        test = non_inferiority_test(gaps, spread, len(RULES))
        held = [(one.weights_mib or 0) + (one.optimizer_mib or 0) for one in (made[0], base[0])]
        rows.append(
            [
                training,
                f"bf16-true {rule}",
                f"{mean + test.value:.4f}",
                f"{test.value:+.4f} ± {format_number(test.ci_half_width)}",
                str(test.verdict),
                f"{held[0] / held[1]:.2f}",
            ]
        )
    return rows


def main() -> None:
    """Train every contender on every task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args()
    rows = [
        row
        for training, words in TRAININGS.items()
        for row in rows_of(training, words, chosen.seeds)
    ]
    head = ["training", "contender", "val/loss", "against float32", "verdict", "memory × float32"]
    body = (
        f"{chosen.seeds} seeds, AdamW at 3e-4 with a cosine schedule. Memory is weights plus "
        f"optimizer state.\n\n{table(head, rows)}"
    )
    write("update_quality", "What does each rule of precision.update recover?", body)


if __name__ == "__main__":
    main()
