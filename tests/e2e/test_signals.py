"""A run that is stopped from outside: checkpoint, KILLED in the store, the shell's exit status."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from waiting import SECONDS, wait_for

PHASES = '''
"""Code that prints where it is, and stays there."""

import ctypes
import time
from pathlib import Path

import torch
from lab.data import Rows
from lab.nets import Net


def stay(seconds=300):
    Path("here").touch()
    time.sleep(seconds)


def slow_to_read(count):
    stay()


class Hung(Rows):
    """Its loading process never brings the fourth batch."""

    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() and Path("first").exists() and index > 8:
            stay()
        return super().__getitem__(index)


def hung(count):
    return Hung(count), Rows(20)


class Slow(Net):
    """Stays in the constructor, the evaluation, the export, or a call of one step."""

    def __init__(self, where: str, **sizes) -> None:
        super().__init__(**sizes)
        self.where = where
        if where == "constructor":
            stay()

    def forward(self, x):
        if self.where == "export" and torch.compiler.is_exporting():
            stay()
        if self.where == "evaluation" and self.calls and not self.training:
            stay(1)  # a batch; a hundred of them
        if self.where == "step" and self.training and self.calls == 5:
            Path("here").touch()
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):  # a deadlock: no handler of Python's runs any more
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        if self.training:
            Path("first").touch()
            time.sleep(0.01)
        return super().forward(x)
'''
SHORT = ("train.max_steps=8", "train.eval_every=4", "train.log_every=1", "train.batch_size=4")
ENDLESS = ("train.max_steps=10000000", "train.log_every=1", "train.eval_every=100000")


@pytest.fixture
def start(tmp_path, start_command, lab_writer):
    """Start a run in a folder and a process group of its own; return its process and the folder."""

    def run(name, *typed, where="nowhere", fresh=False):
        folder = lab_writer(tmp_path / name)
        (folder / "lab" / "phases.py").write_text(PHASES)
        process = start_command(
            "--config-dir",
            "lab/conf",
            "model=net",
            "data=mine",
            "model._target_=lab.phases.Slow",
            f"+model.where={where}",
            "hydra.run.dir=outputs/runs/it",
            *typed,
            cwd=folder,
            fresh=fresh,
        )
        return process, folder

    return run


def last_error(process, number):
    """Return the last line of a command that a signal ends as it should."""
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr
    return stderr.splitlines()[-1]


def checkpoint_step(folder):
    """Return the step of a run's only checkpoint; None without one."""
    found = [*folder.glob("outputs/runs/it/checkpoints/step-*.pt")]
    return torch.load(found[0], weights_only=True)["step"] if found else None


def newest_step(folder):
    """Return the step in the name of a run's newest checkpoint; 0 without one."""
    found = folder.glob("outputs/runs/it/checkpoints/step-*.pt")
    return max((int(path.stem.removeprefix("step-")) for path in found), default=0)


def is_killed(run_named, name):
    """Return a function that looks in the store, where a run's writer may still be at work."""

    def look():
        with suppress(ValueError, AttributeError):  # no experiment, no run
            return run_named(name).info.status == "KILLED"
        return False

    return look


def steps_taken(folder):
    path = folder / "outputs/runs/it/journal.jsonl"
    return path.exists() and path.read_text().count('"train/loss"') > 5


@pytest.mark.slow
def test_a_signal_leaves_a_checkpoint_and_a_killed_run(start, store, reader, run_named):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    stored = (f"tracking.uri={store}", "precision=16-mixed")
    running = [
        start(n.name, *ENDLESS, *stored, f"tracking.run_name={n.name}") for n in numbers
    ]  # side by side
    for number, (process, folder) in zip(numbers, running, strict=True):
        wait_for(lambda folder=folder: steps_taken(folder), process)
        os.killpg(process.pid, number)  # as a terminal and a batch system do it
        assert last_error(process, number) == f"error: Stopped by {number.name}."
        step = checkpoint_step(folder)
        wait_for(is_killed(run_named, number.name))
        run = run_named(number.name)
        assert run.data.tags["error"] == f"Stopped by {number.name}."
        last = max(p.step for p in reader().get_metric_history(run.info.run_id, "train/loss"))
        assert step == last > 5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_signal_in_every_phase(start, store, run_named):
    """Each is waited for by what the process itself shows, never by the clock."""

    def stored(name):
        return f"tracking.uri={store}", f"tracking.run_name={name}"

    away = ("tracking.uri=http://127.0.0.1:1", "tracking.log_model=false")
    phases = {
        "imports": start("imports", *SHORT, "tracking=none", fresh=True),
        "reading": start(
            "reading", *SHORT, "data._target_=lab.phases.slow_to_read", "tracking=none"
        ),
        "building": start("building", *SHORT, *stored("building"), where="constructor"),
        "evaluation": start(
            "evaluation", *SHORT, *stored("evaluation"), "+data.val=400", where="evaluation"
        ),
        "loading": start(
            "loading",
            *SHORT,
            "data._target_=lab.phases.hung",
            "train.num_workers=2",
            "data.shuffle=false",
            "tracking=none",
        ),
        "export": start("export", *SHORT, *stored("export"), where="export"),
        "store": start("store", *SHORT, *away),
    }
    reached = {name: (folder / "here").exists for name, (_, folder) in phases.items()}
    imports = Path(f"/proc/{phases['imports'][0].pid}/maps")
    reached["imports"] = lambda: "libtorch_cpu" in imports.read_text()
    reached["store"] = (phases["store"][1] / "outputs/runs/it/checkpoints/step-00000008.pt").exists
    for number, (name, (process, _)) in enumerate(phases.items()):
        wait_for(reached[name], process)
        sent = (signal.SIGINT, signal.SIGTERM)[number % 2]
        os.killpg(process.pid, sent)
        assert last_error(process, sent) == f"error: Stopped by {sent.name}.", name
    steps = {name: checkpoint_step(folder) for name, (_, folder) in phases.items()}
    assert steps.pop("loading") > 0
    assert steps == {
        "imports": None,
        "reading": None,
        "building": None,
        "evaluation": 4,
        "export": 8,
        "store": 8,
    }
    for name in ("building", "evaluation", "export"):
        wait_for(is_killed(run_named, name))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_step_that_does_not(start):
    process, folder = start("step", *ENDLESS, "tracking=none", where="step")
    wait_for((folder / "here").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)  # a signal within half a second would count as the first
    os.killpg(process.pid, signal.SIGINT)
    assert last_error(process, signal.SIGINT) == "error: Stopped by SIGINT."


@pytest.mark.slow
def test_a_command_that_is_typed_again_continues(start):
    """As a job script does it that Slurm starts anew."""
    often = ("checkpoint.resume=auto", "checkpoint.every_steps=5")
    typed = (*ENDLESS, "tracking=none", *often)
    process, folder = start("again", *typed)
    wait_for(lambda: newest_step(folder) > 0, process)
    os.killpg(process.pid, signal.SIGUSR1)
    assert last_error(process, signal.SIGUSR1).endswith("SIGUSR1.")
    step = newest_step(folder)
    process, _ = start("again", *typed)
    wait_for(lambda: newest_step(folder) > step, process)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=SECONDS)
    assert f"resumed at step {step} of" in out
    assert newest_step(folder) > step
