"""The journal: one JSON line per record, written to the operating system without a buffer.

A line in the file survives a kill of the process that wrote it. This is the first stage of the way
that runner/tracking/__init__.py describes: the trainer appends, the writer process reads. JSON is
read and written with Python's NaN and Infinity, so that non-finite values keep their true value.
"""

import fcntl
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

from runner.core.base.files import open_output
from runner.core.base.fmt import now_ms

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""How a store shows that a run ended."""


StopRequested = Callable[[], bool]
"""Returns whether the run was asked to stop."""


MetricRecord = tuple[int, int, Mapping[str, float]]
"""(step, Unix time in milliseconds, values by metric name)."""


NOTE_TAG = "mlflow.note.content"
"""The tag whose text MLflow shows as a run's or an experiment's description."""


# Made once: json.dumps makes an encoder for each call. default=float takes what is not a plain
# number but converts to one (numpy.float32).
encode_json = json.JSONEncoder(separators=(",", ":"), default=float).encode


def metrics_line(step: int, time_ms: int, values: Mapping[str, float]) -> str:
    """Return the line of a metric record in a journal and in METRICS."""
    # Formatted by hand, because a training step waits for it: only the values need an encoder.
    return f'{{"kind":"metrics","step":{step},"time":{time_ms},"values":{encode_json(values)}}}\n'


STATE_FILE_BYTES = 4096
"""Bytes of the file; fixed, so that the journal can reserve them before the disk is full."""

log = logging.getLogger(__name__)

# The prefix of MLflow's own tags keeps it out of those that its pages show.
JOURNAL_TAG = "mlflow.runner.journal"
MAX_WAITING_MIB = 64
"""Upper bound on the records that wait in memory while the disk is full."""
END_RESERVE_BYTES = 16 * 1024
"""Bytes of disk reserved for the record of the run's end."""
_RETRY_SECONDS = 0.25
_END_BYTES = 65_536
"""Bytes at the end of a journal in which the last line is looked for."""


class Journal:
    """A new journal file in `folder`, to which one process appends.

    A disk that cannot be written (full, or gone) stops nobody: records wait in memory, and each
    later record tries to write them again. The file stays locked while its owner lives: by that a
    later command distinguishes a run that is training from one that was killed.

    Args:
        folder: created if it does not exist.
        max_waiting_bytes: of records that may wait; records beyond them are lost.

    Attributes:
        path: the file.
        lost: number of records that are not in the file and never will be.
        has_end: the end of the run is in the file.
    """

    def __init__(self, folder: Path, max_waiting_bytes: int = MAX_WAITING_MIB * 2**20) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # A resumed run stays in its folder, and gets a journal of its own there.
        self.path = folder.resolve() / "journal.jsonl"
        self._file = -1
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
        for number in count(2):
            with suppress(FileExistsError):
                self._file = os.open(self.path, flags, 0o600)
                break
            self.path = self.path.with_name(f"journal-{number}.jsonl")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self.lost = 0
        self.has_end = False
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting = deque[bytes]()
        self._has_partial_line = False
        self._has_warned = False
        self._spare = self.path.with_suffix(".spare")
        # Reserve room now: a full disk must neither keep the end out of the journal, nor keep the
        # writer from saving how far it has uploaded.
        with suppress(OSError):
            _reserve(self._spare, bytes(END_RESERVE_BYTES))
            _reserve(self.path.with_suffix(".state"), b" " * STATE_FILE_BYTES)

    def append(self, kind: str, **content: Any) -> None:
        """Append one record of any kind."""
        self._write(encode_json({"kind": kind, **content}) + "\n")

    def append_metrics(self, records: Iterable[MetricRecord]) -> None:
        """Append a block of metric records with one write."""
        self._write("".join(metrics_line(*record) for record in records))

    def append_end(self, patience: float = 0.0, **content: Any) -> None:
        """Append the run's end, for which disk space is reserved.

        Args:
            patience: seconds to wait for room on a full disk. Records that still wait then are
                lost, and the end says how many.
            content: of the record.
        """
        deadline = time.monotonic() + patience
        while not self._flush() and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
        if self._waiting:
            self.lost += sum(text.count(b"\n") for text in self._waiting)
            # A partially written line must end, or the end would be part of it.
            self._waiting = deque([b"\n"] if self._has_partial_line else [])
        with suppress(OSError):
            self._spare.unlink(missing_ok=True)
        self.append("end", **content, lost=self.lost)
        self.has_end = not self._waiting

    def close(self) -> None:
        """Wait until the file is on the disk, release the lock and close the file."""
        if self._file < 0:
            return
        # Closing alone would not release the lock while a forked child (a data loader's worker)
        # has the file open, too.
        for step in (os.fsync, lambda file: fcntl.flock(file, fcntl.LOCK_UN), os.close):
            with suppress(OSError):
                step(self._file)
        self._file = -1

    def _write(self, text: str) -> None:
        # Appended before it is written, so that records stay in order after a failed write. The
        # newest is the one that is lost: older ones may be partly in the file.
        self._waiting.append(text.encode())
        if not self._flush() and sum(map(len, self._waiting)) > self._max_waiting_bytes:
            self.lost += self._waiting.pop().count(b"\n")

    def _flush(self) -> bool:
        """Return True if everything was written. A partially written line is continued later."""
        try:
            while self._waiting:
                written = os.write(self._file, self._waiting[0])
                rest = self._waiting.popleft()[written:]
                self._has_partial_line = bool(rest)
                if rest:
                    self._waiting.appendleft(rest)
        except OSError as error:
            # Once until it can be written again.
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s cannot be written: %s. Training continues; up to %d MiB of records wait "
                    "in memory until there is room.",
                    self.path,
                    error.strerror,
                    self._max_waiting_bytes // 2**20,
                )
            return False
        if self._has_warned:
            self._has_warned = False
            log.warning("%s can be written again.", self.path)
        return True


def _reserve(path: Path, content: bytes) -> None:
    """Write a file that reserves room on the disk."""
    # Readable by its owner alone, like the journal: it may name a store by a URI with a password.
    with os.fdopen(open_output(path, os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)


def has_live_owner(path: Path) -> bool:
    """Return whether the process that writes this journal still runs."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            # Locked; or a file system without locks, where it is safer to leave the run alone.
            return True
    return False


def has_end(path: Path) -> bool:
    """Return whether the last complete line of a journal is the end of its run."""
    *_, last, _ = (b"\n" + _last_bytes(path, _END_BYTES)).rsplit(b"\n", 2)
    return last.startswith(b'{"kind":"end"')


def _last_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - count))
        return file.read()


def append_end_for_owner(path: Path, note: str, status: Status, error: str) -> None:
    """Append the end to the journal of a process that died, if it has none.

    Args:
        path: the journal.
        note: text that the store shows with the run.
        status: of the run.
        error: why it ended.
    """
    if has_end(path):
        return
    tags = encode_json({"kind": "tags", "values": {NOTE_TAG: note}})
    end = encode_json({"kind": "end", "status": status, "error": error, "time": now_ms()})
    # The process may have died in the middle of a line: an empty line is skipped by readers, and
    # a partial one becomes a damaged record of its own.
    begin = "" if _last_bytes(path, 1) in (b"\n", b"") else "\n"
    with os.fdopen(open_output(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
        file.write(f"{begin}{tags}\n{end}\n".encode())


def read_records(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each record from a byte offset on, with the offset after it.

    An unfinished last line is not read. A line that is no record (the disk was full in the middle
    of it) is yielded as kind "damaged".
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            record: Any = None
            with suppress(ValueError):
                record = json.loads(line)
            yield record if _is_record(record) else {"kind": "damaged"}, offset


def _is_record(content: Any) -> bool:
    """Return whether a line's content has the fields that its readers rely on."""
    if not isinstance(content, dict) or not isinstance(content.get("kind"), str):
        return False
    if content["kind"] != "metrics":
        return True
    values = content.get("values")
    return (
        isinstance(content.get("step"), int)
        and isinstance(content.get("time"), int | float)
        and isinstance(values, dict)
        and all(isinstance(value, int | float) for value in values.values())
    )


def latest_journal(folder: Path) -> Path | None:
    """Return the journal of the last run in a folder; None without a journal."""
    # No links: a stranger's folder must not name a file elsewhere.
    journals = (p for p in folder.glob("journal*.jsonl") if p.is_file() and not p.is_symlink())
    # The length counts first: journal-10 is newer than journal-9.
    return max(journals, key=lambda path: (len(path.name), path.name), default=None)


def run_journals(path: Path) -> list[Path]:
    """Return the journals of one run up to `path`, the first one first.

    A run that was interrupted and resumed has several.
    """
    journals = [path]
    while True:
        start = next((record for record, _ in read_records(journals[0])), {})
        before = previous_journal(journals[0], start)
        if before is None or before in journals:  # a journal can be edited to name itself
            return journals
        journals.insert(0, before)


def previous_journal(path: Path, start: Mapping[str, Any]) -> Path | None:
    """Return the journal of the run that a start record resumes; None for a new run.

    Only a file in the folder of `path` counts, because a run stays in its folder.
    """
    name = start.get("continues")
    if not isinstance(name, str) or not name:
        return None
    before = path.with_name(Path(name).name)
    is_other_file = before != path and before.is_file() and not before.is_symlink()
    return before if is_other_file else None


def new_values(record: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, float]:
    """Return the values of a metric record that no earlier journal of the run holds.

    A run that is resumed from a checkpoint computes some steps again, with the same results.

    Args:
        record: of kind "metrics".
        known: last step of each metric in the earlier journals.
    """
    step = record["step"]
    values = record["values"].items()
    # A metric that no earlier journal has is new at any step.
    return {name: value for name, value in values if name not in known or step > known[name]}
