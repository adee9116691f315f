"""A run that is stopped from outside: checkpoint, KILLED in the store, the shell's exit status."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch


def wait_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path, root, store, lab_writer):
    """Starts an endless run in a folder of its own; returns its process and the folder."""
    started = []

    def run(name):
        folder = lab_writer(tmp_path / name)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "HYDRA_"))}
        process = subprocess.Popen(
            [sys.executable, "-m", "runner", "--config-dir", "lab/conf", "model=net",
             "model._target_=lab.nets.Slow", "train.max_steps=10000000", "train.log_every=1",
             "train.eval_every=100000", f"tracking.uri={store}", f"tracking.run_name={name}",
             "precision=16-mixed"],
            cwd=folder, env={**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process, folder

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def steps_taken(folder):
    return any(
        path.read_text().count('"train/loss"') > 5
        for path in folder.glob("outputs/runs/*/journal.jsonl")
    )


@pytest.mark.slow
def test_a_signal_leaves_a_checkpoint_and_a_killed_run(start, reader, run_named):
    cases = [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "SIGINT")]
    running = [start(name) for *_, name in cases]  # side by side: starting takes seconds
    for (number, status, name), (process, folder) in zip(cases, running, strict=True):
        wait_for(lambda folder=folder: steps_taken(folder))
        process.send_signal(number)
        _, stderr = process.communicate(timeout=90)
        assert process.returncode == status
        assert stderr.splitlines()[-1] == f"error: Stopped by {name}."
        assert "Traceback" not in stderr
        (checkpoint,) = folder.glob("outputs/runs/*/checkpoints/step-*.pt")
        content = torch.load(checkpoint, weights_only=True)
        wait_for(lambda name=name: run_named(name).info.status == "KILLED")  # it may come later
        run = run_named(name)
        assert run.data.tags["error"] == f"Stopped by {name}."
        last = max(p.step for p in reader().get_metric_history(run.info.run_id, "train/loss"))
        assert content["step"] == last > 5
