"""tracking=none: records go nowhere."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.tracking.tracker import Record, RunInfo, Status, Stopped, Tracker


class NoTracker(Tracker):
    """Accepts everything and stores nothing, so that callers need no branch."""

    def open(self, info: RunInfo) -> None: ...

    def metrics(self, step: int, time_ms: int, values: Mapping[str, float]) -> None: ...

    def metrics_many(self, records: Iterable[Record]) -> None: ...

    def tags(self, values: Mapping[str, str]) -> None: ...

    def artifact(self, path: Path, folder: str = "") -> None: ...

    def note(self, markdown: str) -> None: ...

    def inputs(self, datasets: Sequence[Mapping[str, Any]]) -> None: ...

    def model(self, folder: Path, facts: Mapping[str, Any]) -> None: ...

    @property
    def takes_runs(self) -> bool:
        return False

    @property
    def takes_models(self) -> bool:
        return False

    def check(self) -> None: ...

    def close(
        self, status: Status, error: str | None = None, stopped: Stopped = lambda: False
    ) -> None: ...

    @property
    def complete(self) -> bool:
        return True

    @property
    def run_id(self) -> str | None:
        return None

    @property
    def experiment_id(self) -> str | None:
        return None

    @property
    def dashboard(self) -> str | None:
        return None

    def url(self, timeout: float = 10.0) -> str | None:
        return None
