"""What remains of a run that a signal stops at any moment of its life?

    python -m bench.kill_phases [--moments 40] [--at-once 2] [--dry]

A float16 run with evaluations, checkpoints and an exported model is sent SIGTERM, and another one
SIGINT, at evenly spread moments from half a second after its process begins to its end (before,
there is nothing but Python). Counts how they ended, by what they had done when the signal came.
Writes bench/results/kill_phases.md; --dry prints only.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench.common import spread, table, versions, write

ROOT = Path(__file__).parents[1]
TYPED = (
    "model=mlp",
    "data=digits",
    "train.max_steps=600",
    "train.log_every=10",
    "train.eval_every=50",
    "precision=16-mixed",
    "checkpoint.every_steps=100",
)
PHASES = ("starting", "before the first step", "training", "exporting and storing", "over")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class End(NamedTuple):
    """How a run ended: seconds from the signal on, and what is wrong about it."""

    phase: str
    status: int
    seconds: float
    wrong: tuple[str, ...]


def start(folder: Path) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "HYDRA_"))}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *TYPED],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def phase(folder: Path, over: bool) -> str:
    """Return the phase that a run has reached, read from its folder."""
    if over:
        return "over"
    journals = [path.read_text() for path in folder.glob("outputs/runs/*/journal.jsonl")]
    if not journals:
        return "starting"
    if '"train/loss"' not in journals[0]:
        return "before the first step"
    done = list(folder.glob("outputs/runs/*/checkpoints/step-*600.pt"))
    return "exporting and storing" if done else "training"


def clear(store: Path) -> None:
    """Delete the runs in a store; its tables stay, for their creation takes seconds."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}/outputs/mlflow.db")
    for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
        client.delete_run(run.info.run_id)


def stored(folder: Path) -> list[str]:
    """Return the statuses of a folder's MLflow runs, once none is RUNNING.

    The writer may outlive a run.
    """
    from mlflow import MlflowClient

    if not any(folder.glob("outputs/runs/*/journal.jsonl")):
        return []
    client = MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    deadline = time.monotonic() + 60
    while True:
        runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
        found = [run.info.status for run in runs]
        if (found and "RUNNING" not in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def stopped(number: int, moment: float, home: Path) -> End:
    folder = Path(tempfile.mkdtemp(dir=home))
    shutil.copytree(home / "store", folder, dirs_exist_ok=True)
    process = start(folder)
    time.sleep(moment)
    before = phase(folder, process.poll() is not None)
    began = time.monotonic()
    process.send_signal(number)
    try:
        said = "".join(process.communicate(timeout=120))
    except subprocess.TimeoutExpired:
        process.kill()
        said = "".join(process.communicate())
    seconds = time.monotonic() - began
    found = stored(folder)
    wrong = {
        f"status {process.returncode}": process.returncode not in (128 + number, 0),
        "not stopped": process.returncode == 0 and before not in PHASES[3:],
        "a traceback": "Traceback" in said or "Exception ignored" in said,
        "later than 10 s": seconds > 10,
        f"MLflow: {', '.join(found)}": not {*found} <= {"KILLED", "FINISHED"} or len(found) > 1,
        "no run in MLflow": before not in ("starting", "over") and not found,
        "no checkpoint": before in PHASES[2:4]
        and not any(folder.glob("outputs/runs/*/checkpoints/step-*.pt")),
    }
    end = End(
        before, process.returncode, seconds, tuple(text for text, is_so in wrong.items() if is_so)
    )
    print(f"{signal.Signals(number).name} at {moment:.2f} s: {end}", file=sys.stderr, flush=True)
    if end.wrong:
        print(said[-3000:], file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return end


def whole(home: Path, at_once: int) -> float:
    """Return the seconds of an undisturbed run among others like it; keep its store for those."""
    folders = [home / f"whole-{number}" for number in range(at_once)]
    for folder in folders:
        folder.mkdir()
    began = time.monotonic()
    for process in [start(folder) for folder in folders]:
        said = process.communicate()[1]
        assert process.returncode == 0, said
    for left in ("mlflow.db", "mlartifacts"):
        shutil.move(folders[0] / "outputs" / left, home / "store" / "outputs" / left)
    return time.monotonic() - began


def summary(ends: Sequence[End]) -> str:
    rows = []
    for name in PHASES:
        here = [end for end in ends if end.phase == name]
        statuses = Counter(end.status for end in here)
        wrong = Counter(text for end in here for text in end.wrong)
        rows.append(
            [
                name,
                str(len(here)),
                ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items())),
                spread([end.seconds for end in here]) if here and name != "over" else "",
                ", ".join(f"{text}: {count}" for text, count in wrong.items()) or "nothing",
            ]
        )
    head = ["the signal came", "runs", "exit statuses", "seconds to the end", "what was wrong"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    # A shell that runs this behind itself has it ignore SIGINT, and the runs would do so, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    home = Path(tempfile.mkdtemp())
    (home / "store" / "outputs").mkdir(parents=True)
    longest = whole(home, args.at_once)
    clear(home / "store")
    moments = [0.5 + longest * i / args.moments for i in range(args.moments)]
    todo = [(number, moment) for moment in moments for number in SIGNALS]
    with ThreadPoolExecutor(args.at_once) as pool:
        ends = [*pool.map(lambda one: stopped(*one, home), todo)]
    shutil.rmtree(home)
    body = summary(ends)
    if args.dry:
        print(body)
    else:
        text = f"{len(ends)} runs, {args.at_once} at once, {versions('mlflow')}.\n\n{body}"
        write("kill_phases", "Signals at every moment of a run", text)
    assert not any(end.wrong for end in ends)


if __name__ == "__main__":
    main()
