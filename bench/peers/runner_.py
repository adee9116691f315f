"""This runner, by its command: what a user types is what is measured, Hydra, the guards, the loop,
the record of every step and the process that sends it included. Left out is what the others do not
do at the end either: the last checkpoint and the exported model."""

import json
import os
import sys
from collections.abc import Iterator

from bench.peers import jobs

FOLDER = "PEERS_FOLDER"
"""Environment variable: where runs and the store go."""


def overrides(job: jobs.Job, precision: str, steps: int, device: str) -> Iterator[str]:
    """Return the words of the command."""
    yield from (f"model={job.model}", f"data={job.data}", f"precision={precision}")
    yield f"accelerator={device}"
    for group, arguments in (("model", job.model_args), ("data", job.data_args)):
        yield from (f"{group}.{key}={json.dumps(value)}" for key, value in arguments.items())
    yield from (f"seed={jobs.SEED}", "optimizer=adamw", "optimizer.lr=1e-3")
    yield from (f"train.batch_size={job.batch}", f"train.max_steps={steps}")
    yield from ("train.eval_every=1000000000", "checkpoint.final=false")
    if precision == "16-mixed":  # PyTorch's own kernels, as the others
        yield "precision.cpu_float16=native"


def run(words: list[str]) -> None:
    from runner.__main__ import main

    sys.argv = ["runner", *words, f"hydra.run.dir={os.environ[FOLDER]}/runs/{os.getpid()}"]
    if status := main():
        raise SystemExit(status)


def train(job: jobs.Job, precision: str, steps: int, device: str) -> None:
    """Recorded in MLflow, in a SQLite store."""
    store = f"tracking.uri=sqlite:///{os.environ[FOLDER]}/mlflow.db"
    run([*overrides(job, precision, steps, device), store, "tracking.log_model=false"])


def untracked(job: jobs.Job, precision: str, steps: int, device: str) -> None:
    run([*overrides(job, precision, steps, device), "tracking=none"])
