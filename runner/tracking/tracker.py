"""The tracking contract: what a run tells its store, independent of which store that is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]
Role = Literal["run", "sweep"]
Stopped = Callable[[], bool]
"""Whether the run was told to stop."""
Record = tuple[int, int, Mapping[str, float]]
"""(step, Unix time in milliseconds, values by metric name)."""


@dataclass(frozen=True)
class RunInfo:
    """What a run is called and where it belongs.

    Attributes:
        folder: the run's output folder; the journal and the writer's log lie here.
        params: the resolved config, flattened with dots.
        tags: searchable facts about the run.
        name: shown in the store; None lets the store choose.
        sweep: the sweep's id; the run is nested under that sweep's parent run.
        role: "sweep" for the parent run itself.
        continues: the journal of a run that goes on here, step: where it does, changes: keys that
            are no longer what they were, as `old -> new`.
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


class Tracker(ABC):
    """Carries one run to a store. No method waits for the store, except close and url."""

    @abstractmethod
    def open(self, info: RunInfo) -> None:
        """Begins the run and returns at once; see check for a store that refuses it."""

    @abstractmethod
    def metrics(self, step: int, time_ms: int, values: Mapping[str, float]) -> None:
        """Records values at an optimizer step and a Unix time in milliseconds."""

    @abstractmethod
    def metrics_many(self, records: Iterable[Record]) -> None:
        """Records a block at the price of one write."""

    @abstractmethod
    def tags(self, values: Mapping[str, str]) -> None:
        """Sets or replaces tags."""

    @abstractmethod
    def artifact(self, path: Path, folder: str = "") -> None:
        """Stores a file or folder of the run's folder, which must stay in place until close
        returns."""

    @abstractmethod
    def note(self, markdown: str) -> None:
        """Sets or replaces the text that the store shows with the run."""

    @abstractmethod
    def inputs(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        """Records what the run reads; see runner.data.fingerprint."""

    @abstractmethod
    def model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Store a trained model, see runner.checkpoint.export; the folder stays in place until
        close returns."""

    def check_sweep(self) -> None:
        """Raises ConfigError if the run is to join a sweep that the store does not know. Asks the
        store, before anything is trained."""

    @property
    @abstractmethod
    def takes_runs(self) -> bool:
        """Whether runs are stored at all."""

    @property
    @abstractmethod
    def takes_models(self) -> bool:
        """Whether `model` does anything, so that an export is worth its time."""

    @abstractmethod
    def check(self) -> None:
        """Raises TrackingError if the store has refused the run, while that is news soon enough to
        stop it for, and again after close; costs next to nothing. An outage is no refusal."""

    @abstractmethod
    def close(
        self, status: Status, error: str | None = None, stopped: Stopped = lambda: False
    ) -> None:
        """Ends the run and waits until everything is stored, no longer than the config allows and
        a few seconds only where `stopped` says so. A second call does nothing."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the closed run is stored with all that was recorded."""

    @property
    @abstractmethod
    def run_id(self) -> str | None:
        """The store's id of the run; None until the store has opened it."""

    @property
    @abstractmethod
    def experiment_id(self) -> str | None:
        """The store's id of the experiment; None until the store has opened the run."""

    @property
    @abstractmethod
    def dashboard(self) -> str | None:
        """The part after the server's address of the page that shows this run beside others (a
        sweep's parent: its jobs); None until the store has opened the run."""

    @abstractmethod
    def url(self, timeout: float = 10.0) -> str | None:
        """The run's page, or None if the store has no server. Waits up to timeout seconds."""


NOTE_TAG = "mlflow.note.content"
