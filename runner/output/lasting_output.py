"""Standard streams that never fail: a run is worth more than its output.

A reader that ends (`| head`), a closed stream (`>&-`), a full disk and a closed terminal make the
writes of a plain stream raise, in the middle of a training.
"""

import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner.core import files


class _LastingFile(io.FileIO):
    """A file descriptor that drops what it cannot write."""

    def write(self, data: Any) -> int:
        """Write bytes; return how many are written or dropped."""
        try:
            count = super().write(data)
        except OSError:
            return len(data)
        if count is None:  # full, and made non-blocking by another process that has it, too
            select.select([], [self], [])
        return count or 0


def _lasting_stream(number: int, stream: Any) -> io.TextIOWrapper:
    """Return a stream on the descriptor `number` in place of a stream, None for a closed one."""
    with suppress(OSError, AttributeError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(number, "w", closefd=False)),
        encoding=getattr(stream, "encoding", None),
        # Some encodings lack the lines of a table.
        errors="backslashreplace",
        line_buffering=stream is None or stream.line_buffering or stream.write_through,
    )


def lasting_file(path: Path) -> io.TextIOWrapper:
    """Return a text file to append to, in which no write raises."""
    file = _LastingFile(files.open_output(path, os.O_WRONLY | os.O_APPEND), "a")
    buffer = io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, encoding="utf-8", line_buffering=True)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Return a context in which no write to stdout and stderr raises.

    Streams that the program has replaced (a notebook, a test) stay as they are. A standard
    descriptor that is closed becomes /dev/null: the next file that is opened would have its number,
    and be written to in its place.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    before = (sys.stdout, sys.stderr)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lasting_stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lasting_stream(2, sys.stderr)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
