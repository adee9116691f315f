"""A run that is stopped from outside: checkpoint, KILLED in the store, the shell's exit status."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from run_folders import write_lab
from waiting import SECONDS, wait_for

SHORT = "train.max_steps=8 train.eval_every=4 train.log_every=1 train.batch_size=4".split()
ENDLESS = ("train.max_steps=10000000", "train.log_every=1", "train.eval_every=100000")


@pytest.fixture
def start(tmp_path, start_command):
    """Start a run in a folder and a process group of its own; return its process and the folder."""

    def run(name, *typed, where="nowhere", fresh=False):
        folder = write_lab(tmp_path / name)
        model = ("model=net", "model._target_=lab.phases.Slow", f"+model.where={where}")
        own = ("--config-dir", "lab/conf", "data=mine", "hydra.run.dir=outputs/runs/it")
        process = start_command(*own, *model, *typed, cwd=folder, fresh=fresh)
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
        assert last_error(process, number) == f"Stopped by {number.name}."
        step = checkpoint_step(folder)
        wait_for(is_killed(run_named, number.name))
        run = run_named(number.name)
        assert run.data.tags["error"] == f"Stopped by {number.name}."
        last = max(p.step for p in reader().get_metric_history(run.info.run_id, "train/loss"))
        assert step == last > 5


PHASES = {
    "imports": ("tracking=none", [None]),
    "evaluation": ("{store} +data.val=400", [4]),
    "loading": (
        "tracking=none data._target_=lab.phases.hung train.num_workers=2 data.shuffle=false",
        range(1, 8),
    ),
    "store": ("tracking.uri=http://127.0.0.1:1 tracking.log_model=false", [8]),
}
MORE_PHASES = {
    "reading": ("tracking=none data._target_=lab.phases.slow_to_read", [None]),
    "constructor": ("{store}", [None]),
    "export": ("{store}", [8]),
}
"""By phase: what is typed, and the steps that the checkpoint may have that a signal leaves."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    "phases", [PHASES, pytest.param(MORE_PHASES, marks=pytest.mark.extended)], ids=["some", "more"]
)
def test_a_signal_in_every_phase(start, store, run_named, phases):
    """Each is waited for by what the process itself shows, never by the clock."""
    started = {}
    for name, (typed, _) in phases.items():
        words = typed.format(store=f"tracking.uri={store} tracking.run_name={name}")
        started[name] = start(name, *SHORT, *words.split(), where=name, fresh=name == "imports")
    for number, (name, (process, folder)) in enumerate(started.items()):
        wait_for(reached(name, process, folder), process)
        sent = (signal.SIGINT, signal.SIGTERM)[number % 2]
        os.killpg(process.pid, sent)
        assert last_error(process, sent) == f"Stopped by {sent.name}.", name
    for name, (typed, steps) in phases.items():
        assert checkpoint_step(started[name][1]) in steps, name
        if "{store}" in typed:
            wait_for(is_killed(run_named, name))


def reached(name, process, folder):
    """Return a function that tells whether a process has reached a phase."""
    if name == "imports":
        return lambda: "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text()
    if name == "store":
        return (folder / "outputs/runs/it/checkpoints/step-00000008.pt").exists
    return (folder / "here").exists


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_step_that_does_not(start):
    process, folder = start("step", *ENDLESS, "tracking=none", where="step")
    wait_for((folder / "here").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)  # a signal within half a second would count as the first
    os.killpg(process.pid, signal.SIGINT)
    assert last_error(process, signal.SIGINT) == "Stopped by SIGINT."


@pytest.mark.slow
def test_a_command_that_is_typed_again_continues(start):
    """As a job script does it that Slurm starts anew: its warning, then the end of the terminal."""
    typed = (*ENDLESS, "tracking=none", "checkpoint.resume=auto", "checkpoint.every_steps=5")
    process, folder = start("again", *typed)
    wait_for(lambda: newest_step(folder) > 0, process)
    os.killpg(process.pid, signal.SIGUSR2)
    assert last_error(process, signal.SIGUSR2).endswith("SIGUSR2.")
    assert process.returncode == 140
    step = newest_step(folder)
    process, _ = start("again", *typed)
    wait_for(lambda: newest_step(folder) > step, process)
    os.killpg(process.pid, signal.SIGHUP)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err.splitlines()[-1]) == (129, "Stopped by SIGHUP.")
    assert f"resumed at step {step} of" in out
    assert newest_step(folder) > step
