"""What the processes of a run beside the first one record, each in a file of its own."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TextIO

from runner.tracking.none import NoTracker
from runner.tracking.tracker import Record, RunInfo, Status, Stopped
from runner.utils.layout import RANK_RECORD


class ProcessJournal(NoTracker):
    """One JSON line per record in the process's folder; nothing goes to the store. A disk that
    takes nothing costs records, and stops nobody."""

    _file: TextIO | None = None

    def open(self, info: RunInfo) -> None:
        with suppress(OSError):
            self._file = (info.folder / RANK_RECORD).open("a", buffering=1)

    def metrics(self, step: int, time_ms: int, values: Mapping[str, float]) -> None:
        self.metrics_many([(step, time_ms, values)])

    def metrics_many(self, records: Iterable[Record]) -> None:
        lines = [
            json.dumps({"step": step, "time_ms": time_ms, **values})
            for step, time_ms, values in records
        ]
        if self._file is not None and lines:
            with suppress(OSError):
                self._file.write("\n".join(lines) + "\n")

    def close(
        self, status: Status, error: str | None = None, stopped: Stopped = lambda: False
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
