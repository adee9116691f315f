"""One command at a time in a folder: two would write the same files."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.utils.errors import ConfigError

_held: set[int] = set()


def _forget() -> None:
    """In a forked process, which would hold on to the folder after its parent's death."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Context in which no other command works in a folder, by a lock that ends with the process.

    Raises:
        ConfigError: one is at work there.
    """
    file = os.open(folder, os.O_RDONLY)
    _held.add(file)
    try:
        if not _lock(file):
            raise ConfigError(
                f"{folder}: another command is at work in this folder. Wait for it, stop it, or "
                "leave the folder out for one of its own."
            )
        yield
    finally:
        _held.discard(file)
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Whether a command works in a folder."""
    file = os.open(folder, os.O_RDONLY)
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
