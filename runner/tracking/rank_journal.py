"""The record of the processes of a distributed run other than the main one.

Each of them writes its metrics to a file in its own folder; only the main process uploads a record.
"""

import json
from collections.abc import Iterable
from contextlib import suppress

from runner.tracking.tracker import MetricRecord, NoTracker, RunInfo
from runner.utils.layout import RANK_RECORD


class ProcessJournal(NoTracker):
    """A tracker that writes one JSON line per metric record to the process's folder.

    Nothing is uploaded. A disk that cannot be written loses records and stops nobody: the main
    process has the record that counts.
    """

    def open(self, info: RunInfo) -> None:
        with suppress(OSError):
            self._file = (info.folder / RANK_RECORD).open("a", buffering=1)

    def log_metrics(self, records: Iterable[MetricRecord]) -> None:
        lines = [
            json.dumps({"step": step, "time_ms": time_ms, **values})
            for step, time_ms, values in records
        ]
        # One write per block. The file is line-buffered, so that a kill loses no complete line.
        if self._file is not None and lines:
            with suppress(OSError):
                self._file.write("\n".join(lines) + "\n")
