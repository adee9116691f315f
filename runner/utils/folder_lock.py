"""Lock a folder for one command, because two commands would write the same files.

The lock is the kernel's (flock), so it ends with the process that holds it, however that ends.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runner.utils.errors import ConfigError

_open_descriptors: set[int] = set()


def _close_in_child() -> None:
    """Close the descriptors that a forked process inherits."""
    # flock belongs to the open file: a child with the descriptor would hold its parent's lock.
    while _open_descriptors:
        os.close(_open_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder within a context.

    Raises:
        ConfigError: another command holds it.
    """
    file = os.open(folder, os.O_RDONLY)
    _open_descriptors.add(file)
    try:
        if not _lock(file):
            raise ConfigError(
                f"{folder}: another command is running in this folder. Wait for it, stop it, or "
                "leave out the folder, so that a new one is made."
            )
        yield
    finally:
        _open_descriptors.discard(file)
        os.close(file)


@contextmanager
def waiting_folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder within a context, after waiting for whoever holds it."""
    file = os.open(folder, os.O_RDONLY)
    _open_descriptors.add(file)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        _open_descriptors.discard(file)
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Return whether a command, of this process or another, holds the lock of a folder."""
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
    except OSError:
        # A file system without locks: work without one.
        return True
    return True
