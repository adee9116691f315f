"""What does PrecisionCallback cost a step of transformers.Trainer?

    python -m bench.callback_cost [--steps 60] [--rounds 5]

A small GPT-2 on random tokens, trained by the real Trainer in turn (A B C A B C ...): without a
callback, with PrecisionCallback, and with a callback that calls mlflow.log_metrics with three
numbers after each step, which are at hand already. SQLite stores, one thread. The time of a step is
the time between the ends of the 10th and the last step, over their number: the beginning and the
end of a training are not in it. Writes bench/results/callback_cost.md.
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from bench.common import median, spread, table, versions, write
from runner.integrations.transformers import PrecisionCallback

WARM_UP_STEPS = 10
BATCH = 8
LENGTH = 64


class StepClock(TrainerCallback):
    """Notes when each step has ended, the other callbacks' work included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    @property
    def step_ms(self) -> float:
        """Return the mean milliseconds of a step after the first ones."""
        ends = self.ends[WARM_UP_STEPS:]
        return (ends[-1] - ends[0]) / (len(ends) - 1) * 1e3


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


def train(steps: int, folder: Path, *callbacks: TrainerCallback) -> float:
    """Train a small GPT-2; return the milliseconds of a step."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4)
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
        GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[*callbacks, clock]
    )
    trainer.train()
    return clock.step_ms


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        ways: dict[str, Callable[[], tuple[TrainerCallback, ...]]] = {
            "no callback": lambda: (),
            "PrecisionCallback": lambda: (PrecisionCallback(),),
            "mlflow.log_metrics in each step": lambda: (
                HandWritten(f"sqlite:///{folder}/by_hand.db"),
            ),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(given.rounds + 1):
            for way, callbacks in ways.items():
                milliseconds = train(given.steps, folder, *callbacks())
                if turn:  # the first round makes the stores
                    times[way].append(milliseconds)
    plain = times["no callback"]
    rows = []
    for way, found in times.items():
        ratios = [one / other for one, other in zip(found, plain, strict=True)]
        rows.append([way, spread(found, ".2f"), spread(ratios, ".3f")])
    body = table(["way", "ms per step", "over no callback"], rows)
    body += (
        f"\n\nMedian (least to greatest) of {given.rounds} rounds; ratios are those of one round. "
        f"{versions('transformers', 'mlflow')}. A step without a callback takes "
        f"{median(plain):.1f} ms."
    )
    write("callback_cost", "What does PrecisionCallback cost a step?", body)


if __name__ == "__main__":
    main()
