"""Does a run that is killed at random steps and resumed each time end as one that was not?

    python -m bench.kill_runs [--kills 50] [--steps 2000] [--dry]

A float16 GPT with dropout, shuffling, accumulation and a loss scale that moves is trained twice:
once undisturbed, once killed with SIGKILL at random steps and resumed with checkpoint.resume=last.
Then everything that MLflow and the checkpoints hold is compared, bit by bit. Writes
bench/results/kill_runs.md; --dry prints only.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.common import table, versions, write
from runner.checkpoint import checkpoint_file
from runner.tracking import journal

ROOT = Path(__file__).parents[1]
TYPED = (
    "model=gpt",
    "data=text",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.dropout=0.2",
    "data.context=16",
    "train.batch_size=4",
    "train.accumulate=2",
    "train.log_every=5",
    "train.eval_every=500",
    "precision=16-mixed",
    "scheduler=cosine",
    "precision.loss_scale.growth_interval=20",
    "checkpoint.every_steps=10",
    "checkpoint.keep=2",
    "tracking.log_model=false",
    "data.val_fraction=0.001",
)
LOGGED = (
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "loss_scale/value",
    "loss_scale/overflow",
    "val/loss",
)


def start(folder: Path, *typed: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("ab") as log:
        command = [sys.executable, "-m", "runner", *typed]
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)


def reached(folder: Path) -> int:
    """Return the last step in the newest journal."""
    found = [journal.latest_journal(run) for run in folder.glob("outputs/runs/*")]
    paths = [path for path in found if path]
    return max((journal.last_steps([p]).get("train/loss", 0) for p in paths), default=0)


def disturbed(folder: Path, steps: int, kills: int) -> list[int]:
    """Runs to the end through kills at random steps; the steps."""
    targets = sorted(random.sample(range(15, steps - 20), kills))
    for number, target in enumerate(targets):
        typed = ("checkpoint.resume=last",) if number else (*TYPED, f"train.max_steps={steps}")
        process = start(folder, *typed)
        while process.poll() is None and reached(folder) < target:
            time.sleep(0.02)
        process.kill()
        process.wait()
    last = start(folder, "checkpoint.resume=last")
    assert last.wait() == 0, (folder / "log.txt").read_text()[-3000:]
    return targets


def stored(folder: Path) -> tuple[int, dict[str, list[tuple[int, str]]]]:
    """Return the number of runs in a store, and each metric's steps and values in the last one."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    history = {
        key: sorted(
            (p.step, repr(p.value)) for p in client.get_metric_history(runs[0].info.run_id, key)
        )
        for key in LOGGED
    }
    assert runs[0].info.status == "FINISHED"
    return len(runs), history


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path = max(folder.glob("outputs/runs/*/checkpoints/step-*.pt"), key=lambda path: path.name)
    return checkpoint_file.load(path)["model"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    random.seed(0)
    home = Path(tempfile.mkdtemp())
    assert start(home / "whole", *TYPED, f"train.max_steps={args.steps}").wait() == 0
    disturbed(home / "cut", args.steps, args.kills)
    runs, found = stored(home / "cut")
    _, wanted = stored(home / "whole")
    points = sum(map(len, wanted.values()))
    missing = sum(len({*wanted[k]} - {*found[k]}) for k in LOGGED)
    doubled = sum(len(found[k]) - len({step for step, _ in found[k]}) for k in LOGGED)
    one, other = weights(home / "whole"), weights(home / "cut")
    differ = sum(not torch.equal(one[name], other[name]) for name in one)
    rows = [
        ["runs in MLflow", str(runs), "1"],
        ["points lost or altered", f"{missing} of {points:,}", "0"],
        ["points doubled", str(doubled), "0"],
        ["final weights that differ", f"{differ} of {len(one)}", "0"],
    ]
    body = table([f"after {args.kills} kills in {args.steps} steps", "found", "wanted"], rows)
    shutil.rmtree(home)
    if args.dry:
        print(body)
    else:
        write("kill_runs", "Kills at random steps", f"{versions('mlflow')}.\n\n{body}")
    assert (runs, missing, doubled, differ) == (1, 0, 0, 0)


if __name__ == "__main__":
    main()
