"""The tracking contract: what a run records, independent of the store that it records in.

The trainer calls a Tracker and never waits for the store, except at the end of the run. With
tracking=none the tracker is NoTracker, so that callers need no branch.
RunOutput adds the run's folder and its console: what it writes there is uploaded by the tracker.
"""

import json
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from runner.core.base.files import (
    open_output,
    os_error_reason,
    prepare_output,
    write_json,
    write_text,
)
from runner.core.base.fmt import relative_path
from runner.core.base.layout import METRICS, RANK_RECORD
from runner.core.base.secrets import redact
from runner.core.record.journals import (
    MetricRecord,
    Status,
    StopRequested,
    encode_json,
    metrics_line,
)

if TYPE_CHECKING:
    from runner.core.run.run_result import RunPage

Role = Literal["run", "sweep"]


@dataclass(frozen=True)
class RunInfo:
    """A run's name, parameters and tags, and the sweep or earlier run that it belongs to.

    Attributes:
        folder: the run's output folder; the journal and the writer's log are written here.
        params: the resolved config, flattened with dots.
        tags: searchable facts about the run.
        name: shown in the store; None lets the store choose.
        sweep: the sweep's id; the run is nested under that sweep's parent run.
        role: "sweep" for the parent run itself.
        continues: the journal of the run that is resumed; None for a new run.
        step: the step from which it is resumed.
        changes: config keys whose values differ from the resumed run's, as `old -> new`.
    """

    folder: Path
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    sweep: str | None = None
    role: Role = "run"
    continues: Path | None = None
    step: int = 0
    changes: Mapping[str, str] = field(default_factory=dict)


class Console(Protocol):
    """Where lines and tables are printed. A rich.console.Console is one."""

    @property
    def is_terminal(self) -> bool:
        """Return whether a person sees the lines, not a file or a pipe."""
        ...

    @property
    def width(self) -> int:
        """Return the characters of a line."""
        ...

    def print(self, *objects: Any, **options: Any) -> None:
        """Print texts and tables, with the options of rich."""
        ...


class SilentConsole:
    """A console whose output nobody sees: the main process prints for all."""

    is_terminal = False
    width = 80

    def print(self, *objects: Any, **options: Any) -> None:
        """Print nothing."""


class Tracker(ABC):
    """The record of one run. No method waits for the store, except close and check_store.

    What a tracker does not override is not recorded.

    Attributes:
        takes_runs: runs are stored at all.
        takes_models: `model` does something, so that an export is worth its time.
        complete: the run is closed, and everything that was recorded is stored.
    """

    takes_runs: bool = False
    takes_models: bool = False
    complete: bool = True

    @abstractmethod
    def open(self, info: RunInfo) -> None:
        """Begin the run and return at once; check reports a store that refuses it."""

    @abstractmethod
    def log_metrics(self, records: Iterable[MetricRecord]) -> None:
        """Record a block of metrics at the price of one write."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Set or replace tags."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Upload a file or folder of the run's folder.

        It must stay in place until close returns.
        """

    def note(self, markdown: str) -> None:
        """Set or replace the text that the store shows with the run."""

    def describe(self, page: "RunPage") -> None:
        """Set or replace that text by the facts that it tells."""

    def stored_id(self, journal: Path) -> str | None:
        """Return the store's id of an earlier journal's run; None if the store never opened it."""
        return None

    def inputs(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        """Record the data sets of the run, see runner.data.fingerprint."""

    def model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Upload a trained model, see runner.training.formats.export.

        The folder must stay in place until close returns.
        """

    def check_store(self) -> None:
        """Raise ConfigError if the store can never take the run; called before anything is trained.

        It cannot be opened, however often that is tried, or does not know the sweep that the run is
        to join. A server that does not answer is an outage, unless there is a sweep to join.
        """

    def check(self) -> None:
        """Raise TrackingError if the store has refused the run.

        Raises early in the run, when stopping it loses little, and after close. An outage is no
        refusal. Costs next to nothing.
        """

    @abstractmethod
    def close(
        self, status: Status, error: str | None = None, stopped: StopRequested = lambda: False
    ) -> None:
        """End the run and wait until everything is stored; a second call does nothing.

        Waits no longer than the config allows, and a few seconds only once `stopped` returns True.
        """

    @property
    def run_id(self) -> str | None:
        """Return the store's id of the run; None until the store has opened it."""
        return None

    @property
    def experiment_id(self) -> str | None:
        """Return the store's id of the experiment; None until the store has opened the run."""
        return None

    @property
    def dashboard(self) -> str | None:
        """Return the path, after the server's address, of the page that compares this run.

        A sweep's parent run has the page of its jobs. None until the store has opened the run.
        """
        return None


class NoTracker(Tracker):
    """The tracker of tracking=none: keeps the metrics in the run's folder, and nothing else.

    They are lines of METRICS, which runner.tracking.history reads. A disk that cannot be written
    any more loses records and stops nobody.
    """

    _file: TextIO | None = None

    def open(self, info: RunInfo) -> None:
        # A sweep's parent run has no metrics.
        if info.role != "run":
            return
        self._open_file(info.folder / METRICS)
        # A resumed run computes some steps again, and a new one replaces an earlier one.
        self._write(encode_json({"kind": "start", "continues": info.step > 0}) + "\n")

    def _open_file(self, path: Path) -> None:
        # Line-buffered, so that a kill loses no complete line.
        file = open_output(path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(file, "a", buffering=1)

    def _write(self, text: str) -> None:
        if self._file is not None and text:
            with suppress(OSError):
                self._file.write(text)

    def log_metrics(self, records: Iterable[MetricRecord]) -> None:
        self._write("".join(metrics_line(*record) for record in records))

    def close(
        self, status: Status, error: str | None = None, stopped: StopRequested = lambda: False
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


class ProcessJournal(NoTracker):
    """The record of a process of a distributed run other than the main one, in its own folder.

    A metric record is a JSON line. Nothing is uploaded: the main process has the record that
    counts.
    """

    def open(self, info: RunInfo) -> None:
        self._open_file(info.folder / RANK_RECORD)

    def log_metrics(self, records: Iterable[MetricRecord]) -> None:
        lines = [
            json.dumps({"step": step, "time_ms": time_ms, **values}) + "\n"
            for step, time_ms, values in records
        ]
        self._write("".join(lines))


@dataclass(frozen=True)
class RunOutput:
    """Folder, console and tracker that a run writes to.

    Attributes:
        out: the folder of this process; that of the first process is the run's.
        console: where progress and the summary are printed.
        tracker: records metrics, tags and artifacts.
    """

    out: Path
    console: Console
    tracker: Tracker

    def say(self, message: str) -> None:
        """Print a line to the run's console."""
        self.console.print(message, markup=False, soft_wrap=True)

    def write_file(self, path: Path, write: Callable[[Path], object]) -> bool:
        """Write a file of the run's folder; return whether it was written.

        A file that cannot be written is reported on the console and does not end the run.
        """
        try:
            write(prepare_output(path))
        except OSError as error:
            # The part that was written would be taken for the whole file.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self.say(f"warning: {relative_path(path)} was not written: {os_error_reason(error)}.")
            return False
        return True

    def save_artifact(self, path: Path, write: Callable[[Path], object], folder: str = "") -> bool:
        """Write a file and upload it as an artifact; return whether it was written.

        Args:
            path: of the file, in the run's folder.
            write: writes the file at a path.
            folder: of the artifact in the store.
        """
        written = self.write_file(path, write)
        if written:
            self.tracker.artifact(path, folder)
        return written

    def save_json(self, name: str, content: object) -> None:
        """Write a JSON file into the run's folder and upload it as an artifact."""
        self.save_artifact(self.out / name, lambda path: write_json(path, content))

    def save_traceback(self) -> str:
        """Write the traceback of the error being handled to error.txt.

        Returns:
            A sentence that names the file; empty where it could not be written.
        """
        # An error's message may hold a URI with its credentials.
        text = redact(traceback.format_exc())
        path = self.out / "error.txt"
        if not self.write_file(path, lambda path: write_text(path, text)):
            return ""
        return f"The traceback is in {relative_path(path)}."
