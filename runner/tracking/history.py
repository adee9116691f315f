"""Read a run's metrics as arrays from its journal, and write them to `history.npz`.

The archive holds every value as it was recorded. A store does not: it has the greatest float in
place of infinity.
"""

import io
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from runner.core import files, journals, layout
from runner.data.unpacked_size import MAX_UNPACKED_BYTES
from runner.tracking.uri import RefusedError

if TYPE_CHECKING:
    import pandas

_LOSS_SCALE_CHANGES = "loss_scale/changes"

Curve = NDArray[np.float64]
"""Shape [3, points], float64: optimizer steps, Unix times in milliseconds, and values as they were
recorded (NaN and infinity, too), in order of time."""
Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps and values, both of shape [points]."""


def from_journal(path: Path) -> dict[str, Curve]:
    """Return every metric of a run by name, including what was recorded before a resume."""
    return _curves(journals.run_journals(path))


def _curves(paths: Iterable[Path]) -> dict[str, Curve]:
    """Return every metric in the files of a run, journals or the METRICS of NoTracker."""
    # array("d") takes 8 bytes per number; a list of floats would take 32.
    columns: dict[str, array[float]] = {}
    last_steps: dict[str, int] = {}
    for path in paths:
        known = dict(last_steps)
        for record, _ in journals.read_records(path):
            if record["kind"] == "start":
                # METRICS holds several starts: a run that resumes none replaces those before.
                if not record.get("continues"):
                    columns, last_steps = {}, {}
                known = dict(last_steps)
            elif record["kind"] == "metrics":
                step = record["step"]
                for name, value in journals.new_values(record, known).items():
                    columns.setdefault(name, array("d")).extend((step, record["time"], value))
                    last_steps[name] = max(step, last_steps.get(name, step))
    return {name: np.asarray(points).reshape(-1, 3).T for name, points in columns.items()}


def from_folder(folder: Path) -> dict[str, Curve]:
    """Return the metrics of the last run in a folder; empty if nothing was recorded."""
    newest = journals.latest_journal(folder)
    archive = folder / layout.HISTORY
    metrics = folder / layout.METRICS
    # A run may have been resumed with another tracking: the file that was written last counts.
    if metrics.is_file() and _is_newer(metrics, newest) and _is_newer(metrics, archive):
        return _curves([metrics])
    # An archive older than the journal is of an earlier part of the run.
    if archive.is_file() and _is_newer(archive, newest):
        with suppress(ValueError):
            return read_history(archive)
    return from_journal(newest) if newest else {}


def _is_newer(path: Path, other: Path | None) -> bool:
    """Return whether a file was not written before another one, which may be missing."""
    if other is None or not other.is_file():
        return True
    return path.stat().st_mtime >= other.stat().st_mtime


def curve_points(curve: Curve) -> Points:
    """Return steps and values in order of steps.

    A step that was repeated after a resume has its last value.
    """
    # np.unique() returns the first index of each step: reversed, the last value recorded for it.
    steps, first = np.unique(curve[0][::-1], return_index=True)
    return steps, curve[2][::-1][first]


def to_frame(curves: Mapping[str, Curve]) -> "pandas.DataFrame":
    """Return curves as a table: a row for each step, a column for each metric.

    Returns:
        The index is `step`; the column `seconds` is the time since the first record. A metric that
        was not recorded at a step is NaN there; of several values at one step the last is shown.
        loss_scale/changes, which has two values at a step, is left out: loss_scale/value holds it.
    """
    import pandas

    columns = {}
    times = [pandas.Series(dtype=float)]
    for name, (steps, times_ms, values) in sorted(curves.items()):
        index = steps.astype(int)
        times.append(pandas.Series(times_ms, index=index))
        if name != _LOSS_SCALE_CHANGES:
            column = pandas.Series(values, index=index)
            columns[name] = column[~column.index.duplicated(keep="last")]
    begin = min((curve[1].min() for curve in curves.values()), default=0.0)
    frame = pandas.DataFrame({"seconds": pandas.concat(times).groupby(level=0).max(), **columns})
    frame["seconds"] = (frame["seconds"] - begin) / 1000
    return frame.rename_axis("step").sort_index()


def write_history(path: Path, curves: Mapping[str, Curve]) -> Path:
    """Write a compressed archive of plain arrays, all of it or nothing.

    Returns:
        Its path; in a temporary folder if the run's disk cannot be written.

    Raises:
        RefusedError: it cannot be written there either; a retry would not help.
    """
    with suppress(OSError):
        return _write_archive(path, curves)
    with suppress(OSError):
        return _write_archive(Path(mkdtemp(dir=_temporary_folder().name)) / path.name, curves)
    raise RefusedError(f"{path} was not written: the disk is full")


def _write_archive(path: Path, curves: Mapping[str, Curve]) -> Path:
    with files.replaced_file(path) as file:
        np.savez_compressed(file, **curves)  # pyright: ignore[reportArgumentType]
    return path


@cache
def _temporary_folder() -> TemporaryDirectory[str]:
    """Return a folder that is removed when the process ends."""
    return TemporaryDirectory(prefix="runner-")


def read_history(data: Path | bytes) -> dict[str, Curve]:
    """Return the arrays of a `history.npz`; nothing in it is executed.

    Raises:
        ValueError: it is damaged, or is no archive of curves.
    """
    source = io.BytesIO(data if isinstance(data, bytes) else data.read_bytes())
    try:
        # The archive may be a stranger's. NumPy would unpack it into memory whatever its size.
        with ZipFile(source) as packed:
            if sum(member.file_size for member in packed.infolist()) > MAX_UNPACKED_BYTES:
                raise ValueError("it unfolds to more than a run records")
        with np.load(source, allow_pickle=False) as archive:
            curves = {name: np.asarray(archive[name], dtype=np.float64) for name in archive.files}
            if any(curve.ndim != 2 or len(curve) != 3 for curve in curves.values()):
                raise ValueError("it holds no curves")
            return curves
    except Exception as error:  # zipfile and NumPy raise many kinds
        raise ValueError(f"{layout.HISTORY} is damaged: {error}") from error
