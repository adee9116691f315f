"""The parts that every function of a run needs, what identifies a run, and its folders.

What a training produces (weights, model, tables, chart) is saved by modes/training_outputs.py.
"""

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from runner.core.base.accelerators import Accelerator
from runner.core.base.errors import RunnerError
from runner.core.base.files import write_json, write_text
from runner.core.base.layout import CONFIG, GIT_KEYS, SIGNATURE
from runner.core.base.stop_signals import StopSignals
from runner.core.base.torchrun import ProcessRank
from runner.core.config import signature
from runner.core.config.invocation import Invocation
from runner.core.config.room import Mode, Room
from runner.core.config.schema import RunSpec
from runner.core.loop.batch_layout import Batch
from runner.core.loop.callback import RunCallback
from runner.core.loop.strategy import Single, Strategy
from runner.core.loop.task import Task
from runner.core.loop.train_state import TrainState
from runner.core.policy.conversion_report import ConversionReport
from runner.core.policy.precision import Precision
from runner.core.record.checkpoint_file import LoadedCheckpoint
from runner.core.record.tracker import RunOutput
from runner.core.run.run_result import RunResult


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of a run that exist before its model does.

    Attributes:
        spec: the run's config; its optimizer, scheduler and train sections are read.
        precision: converts the model and makes the loss scale.
        task: loss and metrics.
        device: where the model computes.
        strategy: how the processes of the run share the model.
    """

    spec: RunSpec
    precision: Precision
    task: Task
    device: torch.device
    strategy: Strategy = field(default_factory=Single)


class RunWatch(Protocol):
    """The contract of `Room.watch`: it learns a run's state, and explains its error."""

    def begin_steps(self, state: TrainState, batch: Callable[[], Batch] | None = None) -> None:
        """Take note of the state that is about to run its first step.

        Args:
            state: of the training or the evaluation.
            batch: loads a batch of the training; None for an evaluation.
        """

    def explain(self, error: Exception) -> RunnerError | None:
        """Return an error that says what to change; None for one that is not known here."""


@dataclass(frozen=True)
class RunContext(RunOutput):
    """The parts of a run that are known before its data and its model are built.

    Made once, and never assigned to: what a run finds out later (its model, its state, the layers
    that ran, files that could not be written) is returned by the function that finds it.

    Attributes:
        spec: what to run.
        invocation: what was typed, and how the run is labelled.
        accelerator: the device and its peak memory.
        precision: how the model is converted and computes.
        task: loss and metrics.
        signals: signals that ask the run to stop.
        strategy: how several processes share the work.
        user_callbacks: the user's callbacks, by their names; empty in other processes than the
            main one.
        watches: of the rooms, while the mode runs; the one part that is filled later.
    """

    spec: RunSpec
    invocation: Invocation
    accelerator: Accelerator
    precision: Precision
    task: Task
    signals: StopSignals
    strategy: Strategy
    user_callbacks: Mapping[str, RunCallback] = field(default_factory=dict)
    watches: list[RunWatch] = field(default_factory=list, init=False, repr=False)

    def begin_steps(self, state: TrainState, batch: Callable[[], Batch] | None = None) -> None:
        """Tell the watches of the state that is about to run its first step."""
        for watch in self.watches:
            watch.begin_steps(state, batch)

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Return a context in which the first watch that knows an error replaces it by its
        explanation."""
        # They are made before anything can fail: what they import may not be readable then.
        self.watches.extend(room.watch(self) for room in Room.installed if room.watch)
        try:
            yield
        except Exception as error:
            for watch in self.watches:
                explained = watch.explain(error)
                if explained is not None:
                    raise explained from error
            raise
        finally:
            self.watches.clear()

    @property
    def mode(self) -> Mode:
        """Return the mode of the run."""
        return Mode.named(self.spec.mode)

    @property
    def device(self) -> torch.device:
        """Return the device that this process computes on."""
        return self.accelerator.device

    @property
    def setup(self) -> TrainingSetup:
        """Return what the run's model and its state are built from."""
        return TrainingSetup(self.spec, self.precision, self.task, self.device, self.strategy)

    @property
    def device_name(self) -> str:
        """Name of the device, with the number of processes that each have one."""
        world_size = self.strategy.rank.world_size
        name = self.accelerator.name
        return f"{world_size} x {name}" if world_size > 1 else name

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of the run's checkpoints, which all processes share."""
        # The folder of another process is ranks/<rank> below the run's.
        folder = self.out if self.strategy.rank.is_main else self.out.parents[1]
        return folder / "checkpoints"

    @property
    def label(self) -> str:
        """Name of the run in tables and in the store."""
        return self.invocation.label(self.spec)

    def stop_requested(self) -> bool:
        """Return whether any process got a signal to stop.

        With several processes, all return the same answer, which is that of the call before: the
        exchange is not waited for.
        """
        if self.strategy.rank.world_size == 1:
            return self.signals.is_stop_requested()
        # The highest number: a process that received no signal itself takes it over.
        number = self.strategy.all_reduce_max_async(self.signals.number or 0)
        self.signals.record_remote_signal(number)
        return number > 0


class PlannedRun(NamedTuple):
    """What runs now, and where.

    Attributes:
        folder: of the run.
        saved: the checkpoint that a training continues or an evaluation evaluates; None without
            one.
        spec: with the checkpoint's settings where none was typed.
        invocation: what was typed, and the names of the options.
        changes: settings of a training that differ from its checkpoint's, as `old -> new`.
    """

    folder: Path
    saved: LoadedCheckpoint | None
    spec: RunSpec
    invocation: Invocation
    changes: Mapping[str, str] = MappingProxyType({})


class RunOutcome(NamedTuple):
    """The outcome of training or an evaluation: its numbers, and the conversion as proven."""

    result: RunResult
    report: ConversionReport


def process_folder(out: Path, rank: ProcessRank) -> Path:
    """Return the folder of a process: the run's own for the first one, else one below it."""
    return out if rank.is_main else out / "ranks" / str(rank.index)


PACKAGES = (
    "precision-runner",
    "torch",
    "torchvision",
    "mlflow",
    "hydra-core",
    "omegaconf",
    "numpy",
)
"""Packages whose versions can change a run's numbers or its record."""


def write_config(folder: Path, spec: RunSpec, sign: bool = True) -> Path:
    """Write the complete resolved config, and its signature into a file of its own.

    Args:
        folder: of the run.
        spec: of the run.
        sign: whether this user's commands composed all of the config; one that a stranger's
            checkpoint brought is not signed.

    Returns:
        The path of the config.
    """
    text = spec.to_yaml()
    signed = signature.sign(CONFIG, text) if sign else ""
    write_json(folder / SIGNATURE, {"config": signed})
    return write_text(folder / CONFIG, text)


def environment_facts(invocation: Invocation) -> dict[str, Any]:
    """Return the command, the versions of packages, and the machine."""
    return {
        "command": [invocation.command_text()] if invocation.given else invocation.command,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {package: installed_version(package) for package in PACKAGES},
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def git_tags(folder: Path) -> dict[str, str]:
    """Return the commit and whether the work tree has changes; empty outside a repository."""

    def git(*args: str) -> str:
        # A git that hangs, for example on a network drive, counts as no repository after 10 s.
        answer = subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(GIT_KEYS, (commit, str(bool(changes)).lower()), strict=True))


@cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
