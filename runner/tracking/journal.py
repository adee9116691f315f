"""The journal: one JSON line per record, handed to the operating system at once.

What is in the file survives the death of the process that wrote it. JSON is read and written
with Python's NaN and Infinity, so that non-finite values keep their true value here.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.errors import TrackingError
from runner.tracking.base import Record

# default=float takes what is not a plain number but converts to one (numpy.float32).
_encode = json.JSONEncoder(separators=(",", ":"), default=float).encode


class Journal:
    """Appends to a new file in `folder`.

    The file stays locked while its owner lives: that is how a later command tells a run that is
    still training from one that was left behind.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._file = _create(folder.resolve())
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def append(self, kind: str, **content: Any) -> None:
        """Writes one record of any kind."""
        self._write(_encode({"kind": kind, **content}) + "\n")

    def metrics(self, records: Iterable[Record]) -> None:
        """Writes a block of metric records at once."""
        lines = [_line(step, time_ms, values) for step, time_ms, values in records]
        self._write("".join(lines))

    def close(self) -> None:
        """Waits until the file is on the disk; releases the lock."""
        if self._file < 0:
            return
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise TrackingError(f"{self.path} cannot be written: {error.strerror}.") from error


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


def read(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
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


def newest(folder: Path) -> Path | None:
    """The journal of the last run in a folder."""
    found = folder.glob("journal*.jsonl")
    return max(found, key=lambda path: (len(path.name), path.name), default=None)


def chain(path: Path) -> list[Path]:
    """The journals of one run, the first one first: it may have been cut and resumed."""
    found = [path]
    while earlier := next(read(found[0]), ({}, 0))[0].get("continues"):
        if not Path(earlier).exists():
            break
        found.insert(0, Path(earlier))
    return found


def last_steps(paths: Iterable[Path]) -> dict[str, int]:
    """The greatest step of each metric."""
    last: dict[str, int] = {}
    for path in paths:
        for record, _ in read(path):
            if record["kind"] == "metrics":
                step = record["step"]
                last |= {name: max(step, last.get(name, step)) for name in record["values"]}
    return last


def fresh(record: Mapping[str, Any], known: Mapping[str, int]) -> dict[str, float]:
    """The values of a metric record that an earlier journal of the run does not hold: a run that
    goes on from a checkpoint computes some steps a second time, with the same result."""
    step = record["step"]
    return {k: v for k, v in record["values"].items() if step > known.get(k, step - 1)}


def _decode(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
        return record if "kind" in record else {"kind": "damaged"}
    except (ValueError, TypeError):
        return {"kind": "damaged"}
