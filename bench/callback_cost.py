"""What does PrecisionCallback cost a step of transformers.Trainer?

    python -m bench.callback_cost [--steps 160] [--rounds 5]

A small GPT-2 on random tokens, trained by the real Trainer in turn (A B C A B C ...): without a
callback, with PrecisionCallback, and with a callback that calls mlflow.log_metrics with three
numbers after each step, which are at hand already. SQLite stores, one thread. The time of a step is
that between the 100th and the last step, over their number: the beginning and the end of a training
are not in it. CPU time is the training process's own; wall time depends on the machine's load, too.
Writes bench/results/callback_cost.md.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from bench.common import ROOT, parse_options, run_in_turn, spread, table, versions, write
from runner.integrations.transformers import PrecisionCallback

WARM_UP_STEPS = 100
"""The writer process imports mlflow meanwhile, which would slow the steps on one core."""
BATCH = 8
LENGTH = 32


class StepClock(TrainerCallback):
    """Notes when each step begins: the other callbacks' work is between two steps."""

    def __init__(self) -> None:
        self.begins: list[tuple[float, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begins.append((time.process_time(), time.perf_counter()))

    @property
    def step_ms(self) -> tuple[float, float]:
        """Return the mean milliseconds of a step after the first ones: CPU and wall time."""
        begins = self.begins[WARM_UP_STEPS:]
        cpu, wall = (last - first for first, last in zip(begins[0], begins[-1], strict=True))
        steps = len(begins) - 1
        return cpu / steps * 1e3, wall / steps * 1e3


class HandWritten(TrainerCallback):
    """Logs three numbers per step with mlflow, as a training script would."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        import mlflow

        mlflow.set_tracking_uri(self.uri)
        mlflow.start_run()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        import mlflow

        values = {"train/loss": 1.0, "train/lr": 1e-3, "train/grad_norm": 0.5}
        mlflow.log_metrics(values, step=state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        import mlflow

        mlflow.end_run()


def train(
    steps: int, folder: Path, callbacks: Callable[[], Sequence[TrainerCallback]]
) -> tuple[float, float]:
    """Train a small GPT-2; return the milliseconds of a step: CPU and wall time."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4)
    rows = torch.randint(0, 512, (64, LENGTH))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    clock = StepClock()
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[*callbacks(), clock]
    )
    trainer.train()
    return clock.step_ms


def main() -> None:
    """Measure, and write the table."""
    chosen = parse_options(__doc__, steps=160, rounds=5)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        by_hand = f"sqlite:///{folder}/by_hand.db"
        ways: dict[str, Callable[[], Sequence[TrainerCallback]]] = {
            "no callback": list,
            "PrecisionCallback": lambda: [PrecisionCallback()],
            "mlflow.log_metrics in each step": lambda: [HandWritten(by_hand)],
        }
        timed = {way: partial(train, chosen.steps, folder, make) for way, make in ways.items()}
        times = run_in_turn(timed, chosen.rounds)  # the round that is not counted makes the stores
        os.chdir(ROOT)
    plain = times["no callback"]
    rows = [[way, *_cells(found, plain)] for way, found in times.items()]
    header = ["way", "CPU ms per step", "ratio", "wall ms per step", "ratio"]
    body = table(header, rows)
    body += (
        f"\n\nMedian (least to greatest) of {chosen.rounds} rounds of {chosen.steps} steps; ratios "
        f"to no callback in the same round; load average {os.getloadavg()[1]:.1f}. "
        f"{versions('transformers', 'mlflow')}."
    )
    write("callback_cost", "What does PrecisionCallback cost a step?", body)


def _cells(
    found: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]]
) -> Iterator[str]:
    """Yield time and ratio to the training without a callback, of CPU time, then of wall time."""
    for kind in (0, 1):
        times = [one[kind] for one in found]
        ratios = [one[kind] / other[kind] for one, other in zip(found, plain, strict=True)]
        yield spread(times, ".2f")
        yield spread(ratios, ".3f")


if __name__ == "__main__":
    main()
