"""A run's metrics as arrays: read from its journal, kept as `history.npz`."""

import io
from array import array
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from runner.tracking import journal as journals
from runner.utils.layout import HISTORY

MOST = 2**30
"""Bytes that an archive may unfold to."""
Curve = NDArray[np.float64]
"""Shape [3, points]: optimizer steps, Unix times in milliseconds, values as they were (NaN and
infinity, too), in order of time."""


def from_journal(path: Path) -> dict[str, Curve]:
    """Every metric of a run, by name, also of what was recorded before it was resumed."""
    columns: dict[str, array[float]] = {}
    earlier: list[Path] = []
    for part in journals.run_journals(path):
        known = journals.last_steps(earlier)
        for record, _ in journals.read_records(part):
            if record["kind"] == "metrics":
                step, time_ms = record["step"], record["time"]
                for name, value in journals.new_values(record, known).items():
                    columns.setdefault(name, array("d")).extend((step, time_ms, value))
        earlier.append(part)
    return {name: np.asarray(points).reshape(-1, 3).T for name, points in columns.items()}


def from_folder(folder: Path) -> dict[str, Curve]:
    """The metrics of the last run in a folder; none where nothing was recorded."""
    newest, kept = journals.latest_journal(folder), folder / HISTORY
    if kept.is_file() and not (newest and newest.stat().st_mtime > kept.stat().st_mtime):
        with suppress(ValueError):
            return read_history(kept)
    return from_journal(newest) if newest else {}


def write_history(path: Path, curves: Mapping[str, Curve]) -> Path:
    """A compressed archive of plain arrays, whole or not at all; returns its path, which is in a
    temporary folder where the disk of the run takes nothing.

    Raises:
        RefusedError: it cannot be written, which waiting does not change.
    """
    try:
        return _archive(path, curves)
    except OSError:
        with suppress(OSError):
            return _archive(Path(mkdtemp(dir=_elsewhere().name)) / path.name, curves)
        from runner.tracking.writer.store_errors import RefusedError  # imports mlflow

        raise RefusedError(f"{path} was not written: the disk is full") from None


def _archive(path: Path, curves: Mapping[str, Curve]) -> Path:
    aside = path.with_suffix(".partial")
    try:
        with aside.open("wb") as file:
            np.savez_compressed(file, **curves)  # type: ignore[arg-type]
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside.replace(path)


@cache
def _elsewhere() -> TemporaryDirectory[str]:
    """Removed when the process ends."""
    return TemporaryDirectory(prefix="runner-")


def read_history(data: Path | bytes) -> dict[str, Curve]:
    """The arrays of a `history.npz`; nothing in it is executed.

    Raises:
        ValueError: it is damaged.
    """
    source = io.BytesIO(data if isinstance(data, bytes) else data.read_bytes())
    try:
        with ZipFile(source) as packed:
            if sum(member.file_size for member in packed.infolist()) > MOST:
                raise ValueError("it unfolds to more than a run records")
        with np.load(source, allow_pickle=False) as archive:
            curves = {name: np.asarray(archive[name], dtype=np.float64) for name in archive.files}
            if any(curve.ndim != 2 or len(curve) != 3 for curve in curves.values()):
                raise ValueError("it holds no curves")
            return curves
    except Exception as error:  # whatever zipfile and NumPy make of it
        raise ValueError(f"{HISTORY} is damaged: {error}") from error
