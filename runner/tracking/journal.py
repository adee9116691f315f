"""The journal: one JSON line per record, handed to the operating system at once.

What is in the file survives the death of the process that wrote it. JSON is read and written
with Python's NaN and Infinity, so that non-finite values keep their true value here.
"""

import fcntl
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.tracking.tracker import MetricRecord
from runner.tracking.upload_state import SIZE

log = logging.getLogger(__name__)

MEMORY_MIB = 64
"""What is kept in memory of records that a full disk does not take."""
SPARE = 16 * 1024
"""Bytes of disk that are held back for the record of the run's end; the writer's progress, of a
fixed size, has its room beside the journal from the beginning, too."""
_RETRY_SECONDS = 0.25

# default=float takes what is not a plain number but converts to one (numpy.float32).
_encode = json.JSONEncoder(separators=(",", ":"), default=float).encode


class Journal:
    """Appends to a new file in `folder`. A disk that takes nothing (full, or away) stops nobody:
    records wait in memory, and each later one tries them again.

    The file stays locked while its owner lives: that is how a later command tells a run that is
    still training from one that was left behind.

    Args:
        folder: made if need be.
        memory: bytes that may wait; what comes beyond them is lost.

    Attributes:
        lost: records that are not in the file and never will be.
        ended: the end is in the file.
    """

    def __init__(self, folder: Path, memory: int = MEMORY_MIB * 2**20) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._file = _create(folder.resolve())
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self.lost, self.ended = 0, False
        self._memory, self._waiting = memory, deque[bytes]()
        self._torn = self._told = False
        self._spare = self.path.with_suffix(".spare")
        with suppress(OSError):
            self._spare.write_bytes(bytes(SPARE))
            self.path.with_suffix(".state").write_bytes(b" " * SIZE)

    def append(self, kind: str, **content: Any) -> None:
        """Writes one record of any kind."""
        self._write(_encode({"kind": kind, **content}) + "\n")

    def metrics(self, records: Iterable[MetricRecord]) -> None:
        """Writes a block of metric records at once."""
        lines = [_line(step, time_ms, values) for step, time_ms, values in records]
        self._write("".join(lines))

    def end(self, patience: float = 0.0, **content: Any) -> None:
        """Writes the run's end, for which a full disk has room kept back. Records that still wait
        after `patience` seconds are lost; the end says how many."""
        deadline = time.monotonic() + patience
        while not self._flush() and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
        if self._waiting:
            self.lost += _lines(self._waiting)
            self._waiting = deque([b"\n"] if self._torn else [])
        with suppress(OSError):
            self._spare.unlink(missing_ok=True)
        self._write(_encode({"kind": "end", **content, "lost": self.lost}) + "\n")
        self.ended = not self._waiting

    def close(self) -> None:
        """Waits until the file is on the disk; releases the lock, which a forked child of this
        process (a data loader's) would hold on to."""
        if self._file < 0:
            return
        for last in (os.fsync, lambda file: fcntl.flock(file, fcntl.LOCK_UN), os.close):
            with suppress(OSError):
                last(self._file)
        self._file = -1

    def _write(self, text: str) -> None:
        self._waiting.append(text.encode())
        if not self._flush() and sum(map(len, self._waiting)) > self._memory:
            self.lost += _lines([self._waiting.pop()])

    def _flush(self) -> bool:
        """Whether the file has taken all. A line that it took in part is gone on with."""
        try:
            while self._waiting:
                written = os.write(self._file, self._waiting[0])
                rest = self._waiting.popleft()[written:]
                self._torn = bool(rest)
                if rest:
                    self._waiting.appendleft(rest)
        except OSError as error:
            self._tell(error)
            return False
        if self._told:
            self._told = False
            log.warning("%s takes records again.", self.path)
        return True

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "%s cannot be written: %s. Training goes on; up to %d MiB of records wait in "
                "memory until there is room.",
                self.path,
                error.strerror,
                self._memory // 2**20,
            )


def _lines(texts: Iterable[bytes]) -> int:
    return sum(text.count(b"\n") for text in texts)


def _line(step: int, time_ms: int, values: Mapping[str, float]) -> str:
    return f'{{"kind":"metrics","step":{step},"time":{time_ms},"values":{_encode(values)}}}\n'


def _create(folder: Path) -> tuple[Path, int]:
    """A file name that no earlier run has taken in this folder."""
    number = 1
    while True:
        path = folder / ("journal.jsonl" if number == 1 else f"journal-{number}.jsonl")
        try:
            return path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        except FileExistsError:
            number += 1


def owner_lives(path: Path) -> bool:
    """Whether the process that writes this journal still runs."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks: then rather leave the run alone
            return True
    return False


def read_records(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields each record from a byte offset, with the offset after it.

    An unfinished last line is left for later. A line that is no record (the disk was full in the
    middle of it) comes as kind "damaged".
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield _decode(line), offset


def latest_journal(folder: Path) -> Path | None:
    """The journal of the last run in a folder."""
    found = (p for p in folder.glob("journal*.jsonl") if p.is_file() and not p.is_symlink())
    return max(found, key=lambda path: (len(path.name), path.name), default=None)


def run_journals(path: Path) -> list[Path]:
    """The journals of one run, the first one first: it may have been cut and resumed."""
    found = [path]
    while (
        before := previous_journal(found[0], next(read_records(found[0]), ({}, 0))[0])
    ) and before not in found:
        found.insert(0, before)
    return found


def previous_journal(path: Path, start: Mapping[str, Any]) -> Path | None:
    """The journal beside it that a start record goes on with: a run stays in its folder."""
    name = start.get("continues")
    before = path.with_name(Path(name).name) if isinstance(name, str) and name else path
    return before if before != path and before.is_file() and not before.is_symlink() else None


def last_steps(paths: Iterable[Path]) -> dict[str, int]:
    """The greatest step of each metric."""
    last: dict[str, int] = {}
    for path in paths:
        for record, _ in read_records(path):
            if record["kind"] == "metrics":
                step = record["step"]
                last |= {name: max(step, last.get(name, step)) for name in record["values"]}
    return last


def new_values(record: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, float]:
    """The values of a metric record that an earlier journal of the run does not hold: a run that
    goes on from a checkpoint computes some steps a second time, with the same result."""
    step = record["step"]
    return {k: v for k, v in record["values"].items() if step > known.get(k, step - 1)}


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    return record if isinstance(record, dict) and _is_whole(record) else {"kind": "damaged"}


def _is_whole(record: Mapping[str, Any]) -> bool:
    if record.get("kind") != "metrics":
        return isinstance(record.get("kind"), str)
    values = record.get("values")
    times = isinstance(record.get("step"), int) and isinstance(record.get("time"), int | float)
    return (
        times
        and isinstance(values, dict)
        and all(isinstance(v, int | float) for v in values.values())
    )
