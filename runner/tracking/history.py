"""A run's metrics as arrays: read from its journal, kept as `history.npz`."""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runner.tracking import journal as journals

FILE = "history.npz"
Curve = NDArray[np.float64]
"""Shape [3, points]: optimizer steps, Unix times in milliseconds, values as they were (NaN and
infinity, too), in order of time."""


def from_journals(paths: Iterable[Path]) -> dict[str, Curve]:
    """Every metric of a run, by name."""
    columns: dict[str, tuple[list[float], list[float], list[float]]] = {}
    for path in paths:
        for record, _ in journals.read(path):
            if record["kind"] != "metrics":
                continue
            for name, value in record["values"].items():
                steps, times, values = columns.setdefault(name, ([], [], []))
                steps.append(record["step"])
                times.append(record["time"])
                values.append(value)
    return {name: np.array(rows, dtype=np.float64) for name, rows in columns.items()}


def of_folder(folder: Path) -> dict[str, Curve]:
    """The metrics of the run in a folder; none where nothing was recorded."""
    if (folder / FILE).exists():
        return read(folder / FILE)
    return from_journals(sorted(folder.glob("journal*.jsonl")))


def write(path: Path, curves: Mapping[str, Curve]) -> Path:
    """A compressed archive of plain arrays; returns the path."""
    with path.open("wb") as file:
        np.savez_compressed(file, **curves)  # type: ignore[arg-type]
    return path


def read(data: Path | bytes) -> dict[str, Curve]:
    """The arrays of a `history.npz`; nothing in it is executed."""
    source = io.BytesIO(data) if isinstance(data, bytes) else data
    with np.load(source, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
