"""A run that SIGTERM or SIGINT stops at any moment ends as it should: ten minutes.

A float16 run with evaluations, checkpoints and an exported model gets either signal at evenly
spread moments from its first handler of signals (before, there is nothing but Python) to its end.
`python -m pytest -m soak tests/soak -s` prints how each run ended.
"""

import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from quiet_mlflow import MlflowClient

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MOMENTS = 12
AT_ONCE = 2
LATEST_END = 60  # seconds from the signal to the end of the process; 3 on an idle machine
LAST_STEP = 600
OVERRIDES = (
    "model=mlp",
    "data=digits",
    f"train.max_steps={LAST_STEP}",
    "train.log_every=10",
    "train.eval_every=50",
    "precision=16-mixed",
    "checkpoint.every_steps=100",
)
BEFORE_JOURNAL, BEFORE_STEP, TRAINING, EXPORTING, OVER = range(5)


def start(folder, env):
    command = [sys.executable, "-m", "runner", *OVERRIDES]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=env, text=True, **pipes)


def wait_for_handlers(process):
    """Wait until a process handles SIGTERM itself."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = int(status.read_text().partition("SigCgt:")[2].split()[0], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.05)


def phase(folder, process):
    """Return the phase that a run has reached, read from its folder."""
    if process.poll() is not None:
        return OVER
    journals = [path.read_text() for path in folder.glob("outputs/runs/*/journal.jsonl")]
    if not journals:
        return BEFORE_JOURNAL
    if '"train/loss"' not in journals[0]:
        return BEFORE_STEP
    is_trained = any(folder.glob(f"outputs/runs/*/checkpoints/step-*{LAST_STEP}.pt"))
    return EXPORTING if is_trained else TRAINING


def runs_of(folder):
    client = MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return client, client.search_runs(experiments)


def final_statuses(folder):
    """Return the statuses of a folder's MLflow runs; the writer process may outlive a run."""
    if not any(folder.glob("outputs/runs/*/journal.jsonl")):
        return []
    deadline = time.monotonic() + 60
    while True:
        statuses = [run.info.status for run in runs_of(folder)[1]]
        is_final = statuses and "RUNNING" not in statuses
        if is_final or time.monotonic() > deadline:
            return statuses
        time.sleep(0.5)


def make_store(home, env):
    """Train undisturbed runs at once; keep the store of one, emptied, and return the seconds.

    Creating a store's tables takes seconds, which the runs that are signalled need not spend.
    """
    folders = [home / f"whole-{number}" for number in range(AT_ONCE)]
    for folder in folders:
        folder.mkdir()
    began = time.monotonic()
    for process in [start(folder, env) for folder in folders]:
        output = process.communicate()[0]
        assert process.returncode == 0, output
    seconds = time.monotonic() - began
    store = home / "store"
    (store / "outputs").mkdir(parents=True)
    for name in ("mlflow.db", "mlartifacts"):
        shutil.move(folders[0] / "outputs" / name, store / "outputs" / name)
    client, runs = runs_of(store)
    for run in runs:
        client.delete_run(run.info.run_id)
    return seconds


def faults_after(folder, env, number, moment):
    """Send a signal to a new run at a moment; return what is wrong about its end."""
    shutil.copytree(folder.parent / "store", folder)
    process = start(folder, env)
    wait_for_handlers(process)
    time.sleep(moment)
    reached = phase(folder, process)
    began = time.monotonic()
    process.send_signal(number)
    try:
        output = process.communicate(timeout=600)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0]
    seconds = time.monotonic() - began
    status, statuses = process.returncode, final_statuses(folder)
    has_checkpoint = any(folder.glob("outputs/runs/*/checkpoints/step-*.pt"))
    checks = {
        f"exit status {status}": status not in (0, 128 + number),
        "not stopped": status == 0 and reached < EXPORTING,
        f"a traceback: {output[-3000:]}": "Traceback" in output or "Exception ignored" in output,
        "too late": seconds > LATEST_END,
        f"MLflow: {statuses}": len(statuses) > 1 or not {*statuses} <= {"KILLED", "FINISHED"},
        "no run in MLflow": BEFORE_JOURNAL < reached < OVER and not statuses,
        "no checkpoint": reached in (TRAINING, EXPORTING) and not has_checkpoint,
    }
    name = signal.Signals(number).name
    print(f"{name} at {moment:.2f} s, phase {reached}: {status}, {seconds:.1f} s")
    return [fault for fault, is_so in checks.items() if is_so]


def test_a_run_ends_as_it_should_whenever_a_signal_comes(tmp_path, clean):
    longest = make_store(tmp_path, clean)
    moments = [longest * number / MOMENTS for number in range(MOMENTS)]
    signals = (signal.SIGTERM, signal.SIGINT)
    cases = [(number, moment) for moment in moments for number in signals]

    def faults(index):
        return faults_after(tmp_path / str(index), clean, *cases[index])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(faults, range(len(cases))))
    faulty = {cases[index]: faults for index, faults in enumerate(results) if faults}
    assert not faulty
