"""Lock a folder for one command, because two commands would write the same files.

The lock is the kernel's (flock), so it ends with the process that holds it, however that ends.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
def folder_lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder within a context.

    Args:
        folder: to lock.
        wait: wait for whoever holds the lock.

    Raises:
        ConfigError: another command holds it, and `wait` is false.
    """
    file = os.open(folder, os.O_RDONLY)
    _open_descriptors.add(file)
    try:
        if not _lock(file, wait):
            raise ConfigError(
                f"{folder}: another command is running in this folder. Wait for it, stop it, or "
                "leave out the folder, so that a new one is made."
            )
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


def _lock(file: int, wait: bool = False) -> bool:
    """Return whether the lock of an open folder was taken."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: work without one
    return True
