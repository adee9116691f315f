"""What the parts of a run share."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from runner.checkpoint import checkpoint_file
from runner.config.invocation import Invocation
from runner.config.schema import RunSpec
from runner.data.loader import Loader
from runner.distributed.strategy import Single, Strategy
from runner.distributed.torchrun import ProcessRank
from runner.modes import notes, resume
from runner.modes.result import RunResult
from runner.precision.precision import ConversionReport, Precision
from runner.tracking.tracker import Tracker
from runner.training.state import TrainState
from runner.training.tasks.task import Task
from runner.utils.accelerator import Accelerator
from runner.utils.files import os_error_reason, write_text
from runner.utils.formatting import relative_path
from runner.utils.reproducibility import make_deterministic, seed_all
from runner.utils.secrets import redact
from runner.utils.stop_signals import StopSignals


@dataclass
class RunContext:
    """What the parts of a run share."""

    spec: RunSpec
    origin: Invocation
    out: Path
    console: Console
    accelerator: Accelerator
    precision: Precision
    task: Task
    tracker: Tracker
    signals: StopSignals
    strategy: Strategy = field(default_factory=Single)
    report: ConversionReport = field(default_factory=ConversionReport)
    resumed: checkpoint_file.LoadedCheckpoint | None = None
    trouble: str = ""  # what a guard stopped it for
    lost: list[str] = field(default_factory=list)  # weights that could not be written
    state: TrainState | None = None
    loader: Loader | None = None
    other: float = 0.0  # bytes taken before the first step, beside the weights

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def device_name(self) -> str:
        """The device's, and of how many processes each has one."""
        world, name = self.strategy.place.world_size, self.accelerator.name
        return f"{world} x {name}" if world > 1 else name

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints; `out` is one of this process's own."""
        return run_folder(self.out, self.strategy.place) / "checkpoints"

    def stopping(self) -> bool:
        """Whether any process got a signal; all give the same answer, of the call before."""
        if self.strategy.place.world_size == 1:
            return self.signals.requested()
        number = self.strategy.all_reduce_max_async(self.signals.number or 0)
        self.signals.adopt(number)
        return number > 0

    @property
    def label(self) -> str:
        return self.origin.label(self.spec)

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, soft_wrap=True)

    def note(self, markdown: str) -> None:
        """What the run's page in the store says in words."""
        if saved := self.resumed:
            step, changes = saved.content["step"], resume.changed_settings(self.spec, saved)
            markdown += notes.resumed_note(step, changes)
        self.tracker.note(markdown)

    def write(self, path: Path, write: Callable[[Path], object]) -> bool:
        """Have a file written; one that cannot be is told, and costs the run nothing else."""
        try:
            write(path)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self.say(f"warning: {relative_path(path)} was not written: {os_error_reason(error)}.")
            return False
        return True

    def leave(self, path: Path, write: Callable[[Path], object], folder: str = "") -> bool:
        """The same of one that becomes an artifact, in a folder of the store's."""
        if written := self.write(path, write):
            self.tracker.artifact(path, folder)
        return written

    def traceback(self) -> str:
        """Keeps that of the error that is being handled; a sentence that says where."""
        text = redact(traceback.format_exc())
        path = self.out / "error.txt"
        kept = self.write(path, lambda path: write_text(path, text))
        return f"The traceback is in {relative_path(path)}." if kept else ""


def process_folder(out: Path, place: ProcessRank) -> Path:
    """A process's own folder in a run's, which is that of the first one."""
    return out if place.is_main else out / "ranks" / str(place.rank)


def run_folder(folder: Path, place: ProcessRank) -> Path:
    """The run's folder of a process's own."""
    return folder if place.is_main else folder.parents[1]


def prepare_process(this: RunContext) -> None:
    """Seeds and switches, before anything is built."""
    this.accelerator.reset_peak_memory()
    seed_all(this.spec.seed)
    if this.spec.deterministic:
        make_deterministic()
    torch.set_anomaly_enabled(this.spec.debug.anomaly)


def build_result(this: RunContext, summary: dict[str, Any], seconds: float) -> RunResult:
    """What the run came to. The speed of emulated arithmetic is that of nothing."""
    spec, origin, emulated = this.spec, this.origin, this.precision.emulated
    if emulated:
        summary = summary | {"examples_per_second": None, "step_ms": None}
    return RunResult(
        precision=this.precision.name,
        label=this.label,
        folder=str(this.out),
        group=origin.group_label(spec),
        seed=spec.seed,
        overrides=origin.overrides,
        left_out=[*origin.keys_left_out],
        model=origin.option_name("model", spec.model),
        data=origin.option_name("data", spec.data),
        device=this.device_name,
        quality=this.task.quality,
        direction=this.task.direction,
        kernels="emulated" if emulated else this.precision.kernels(),
        seconds=seconds,
        tracking_uri=redact(getattr(this.tracker, "uri", "")) or None,
        experiment=getattr(this.tracker, "experiment", ""),
        **summary,
    )
