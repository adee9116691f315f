"""Refuse files whose content would take all memory when it is unpacked."""

from pathlib import Path

MAX_UNPACKED_BYTES = 2**30
"""Largest content of a file that is read where it takes a hundred times the file's size."""


def unpacked_limit(path: Path) -> int:
    """Return the bytes of memory that the content of a file, perhaps a stranger's, may take.

    A file of a few MB may unpack to all memory; numbers compress to a hundredth at most.
    """
    import psutil

    largest = max(MAX_UNPACKED_BYTES, 100 * path.stat().st_size)
    return min(largest, psutil.virtual_memory().available)


def check_unpacked(path: Path, size: int) -> None:
    """Refuse a file whose content takes more bytes than `unpacked_limit`.

    Raises:
        ValueError: it takes more.
    """
    if size > unpacked_limit(path):
        raise ValueError(
            f"{path} unpacks to {size / 2**30:.1f} GiB or more, which is more than the memory that "
            "is free or a hundred times the file. Write less or compress less (docs/own-code.md)"
        )
