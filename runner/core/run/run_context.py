"""The parts that every function of a run needs, and the folders of its processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from runner.core.base.accelerators import Accelerator
from runner.core.base.stop_signals import StopSignals
from runner.core.base.torchrun import ProcessRank
from runner.core.config.invocation import Invocation
from runner.core.config.room import Mode
from runner.core.config.schema import RunSpec
from runner.core.loop.callback import RunCallback
from runner.core.loop.strategy import Single, Strategy
from runner.core.loop.task import Task
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
    """

    spec: RunSpec
    invocation: Invocation
    accelerator: Accelerator
    precision: Precision
    task: Task
    signals: StopSignals
    strategy: Strategy
    user_callbacks: Mapping[str, RunCallback] = field(default_factory=dict)

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
