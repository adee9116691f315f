"""Train a run that SIGKILL ends at random steps, and compare it with an undisturbed one."""

import random
import sys
import time
from typing import NamedTuple

import torch
from forked_process import ForkedProcess
from quiet_mlflow import MlflowClient

from runner.core.record import checkpoint_file
from runner.core.record import journals as journal
from runner.tracking.writer.uploader import last_steps

# A float16 GPT with dropout, shuffling, accumulation and a loss scale that moves.
OVERRIDES = (
    "model=gpt data=text model.layers=1 model.width=32 model.heads=2 model.dropout=0.2 "
    "data.context=16 data.val_fraction=0.001 train.batch_size=4 train.accumulate=2 "
    "train.log_every=5 train.eval_every=500 precision=16-mixed scheduler=cosine "
    "precision.loss_scale.growth_interval=20 checkpoint.every_steps=10 checkpoint.keep=2 "
    "tracking.log_model=false"
).split()
METRICS = (
    "train/loss train/lr train/grad_norm loss_scale/value loss_scale/overflow val/loss"
).split()


class Comparison(NamedTuple):
    """How a killed and resumed run differs from the undisturbed one.

    Attributes:
        runs: MLflow runs of the killed run.
        points, tensors: points and final weight tensors of the undisturbed run.
        lost, doubled: points that the killed run lacks or has with another value, or has twice.
        changed: final weight tensors that differ in any bit.
    """

    runs: int
    points: int
    tensors: int
    lost: int
    doubled: int
    changed: int


def compare_with_undisturbed(folder, env, kills, steps):
    """Train a run undisturbed and the same run with kills at random steps, and compare them."""
    whole, killed = folder / "whole", folder / "killed"
    assert start(whole, env, *OVERRIDES, f"train.max_steps={steps}").wait() == 0
    train_with_kills(killed, env, kills, steps)
    (points,) = points_of_runs(whole)
    killed_runs = points_of_runs(killed)
    found = killed_runs[0]
    weights, killed_weights = final_weights(whole), final_weights(killed)
    return Comparison(
        runs=len(killed_runs),
        points=sum(map(len, points.values())),
        tensors=len(weights),
        lost=sum(len({*points[key]} - {*found[key]}) for key in METRICS),
        doubled=sum(len(found[key]) - len({step for step, _ in found[key]}) for key in METRICS),
        changed=sum(not torch.equal(weights[name], killed_weights[name]) for name in weights),
    )


def start(folder, env, *arguments):
    """Start `python -m runner` in a folder, with its output in log.txt."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "runner", *arguments]
    with (folder / "log.txt").open("ab") as log:
        return ForkedProcess(command, cwd=folder, env=env, stdout=log, stderr=log)


def train_with_kills(folder, env, kills, steps):
    """Train a run to its end, killed at random steps and resumed each time."""
    targets = sorted(random.Random(0).sample(range(15, steps - 20), kills))
    arguments = (*OVERRIDES, f"train.max_steps={steps}")
    for target in targets:
        process = start(folder, env, *arguments)
        while process.poll() is None and last_recorded_step(folder) < target:
            time.sleep(0.02)
        process.kill()
        process.wait()
        arguments = ("checkpoint.resume=last",)
    last = start(folder, env, *arguments)
    assert last.wait() == 0, (folder / "log.txt").read_text()[-3000:]


def last_recorded_step(folder):
    """Return the last step in the newest journal of the runs in a folder."""
    paths = [journal.latest_journal(run) for run in folder.glob("outputs/runs/*")]
    steps = [last_steps([path]).get("train/loss", 0) for path in paths if path]
    return max(steps, default=0)


def points_of_runs(folder):
    """Return (step, text of the value) of each metric, for each MLflow run of a folder."""
    client = MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = []
    for run in client.search_runs(experiments):
        assert run.info.status == "FINISHED"
        metrics = {}
        for key in METRICS:
            history = client.get_metric_history(run.info.run_id, key)
            metrics[key] = sorted((point.step, repr(point.value)) for point in history)
        runs.append(metrics)
    return runs


def final_weights(folder):
    """Return the weights in the last checkpoint of a folder's run."""
    path = max(folder.glob("outputs/runs/*/checkpoints/step-*.pt"), key=lambda path: path.name)
    return checkpoint_file.load(path)["model"]
