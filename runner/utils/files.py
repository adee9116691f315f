"""Writing files where the disk may be full."""

import io
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from runner.utils.secrets import redact_values


def write_text(path: Path, text: str) -> Path:
    """Writes aside and renames, so that what was there stays whole, in a folder that is made if
    need be; returns the path.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    aside = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        aside.write_text(text)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return aside.replace(path)


def read_text(path: Path, most: int = 2**24) -> str:
    """Return what a file holds that anybody may have made.

    Raises:
        OSError: it cannot be read, or is no plain file (a pipe would never end).
        ValueError: it is larger than `most` bytes, or is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no plain file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is larger than {most} bytes")
    return data.decode()


class _Taking(io.RawIOBase):
    """Takes everything and keeps the first error of the file behind it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            if self.error is None:
                self.file.write(data)
        except OSError as error:
            self.error = error
        return memoryview(data).nbytes

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset  # torch.export rewinds what it has written


@contextmanager
def write_with_torch(path: Path) -> Iterator[IO[bytes]]:
    """A new file, synced at the end. An error that is raised under torch's zip writer can abort
    the process, when the writer is freed; here it is raised once torch is done.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("wb") as file:
        taking = _Taking(file)
        yield cast("IO[bytes]", taking)
        if taking.error is not None:
            raise taking.error
        file.flush()
        os.fsync(file.fileno())


def os_error_reason(error: BaseException) -> str:
    """In one line, of the operating system in its own words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__


def write_json(path: Path, content: Any) -> Path:
    """Indented, for people too; returns the path."""
    return write_text(path, json.dumps(redact_values(content), indent=2) + "\n")


def write_table(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    """Rows with the same keys, in the form that MLflow shows as a table (see tables_tag)."""
    columns = list(rows[0]) if rows else []
    data = [[row[column] for column in columns] for row in rows]
    return write_json(path, {"columns": columns, "data": data})
