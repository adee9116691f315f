"""Split a journal into batches, one call to the store each. Imports mlflow for the largest call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.tracking import journal as journals
from runner.tracking.writer.store import MAX_POINTS, Point
from runner.tracking.writer.store_errors import RefusedError


@dataclass
class Batch:
    """Records of one kind that are sent together.

    Attributes:
        kind: of the records.
        record: the first of them.
        end: the offset in bytes after them in the journal.
        points: of metric records.
        is_complete: no later record would be added to it.
    """

    kind: str
    record: dict[str, Any]
    end: int
    points: list[Point] = field(default_factory=list)
    is_complete: bool = True


def next_batch(path: Path, offset: int, earlier_steps: Mapping[str, int] = {}) -> Batch | None:
    """Return the batch at an offset: one record, or as many metric records as fit into one call.

    Args:
        path: of the journal.
        offset: in bytes.
        earlier_steps: last step of each metric in the run's earlier journals; points up to it are
            left out.

    Returns:
        None at the end of the journal.
    """
    batch: Batch | None = None
    for record, end in journals.read_records(path, offset):
        kind = record["kind"]
        if batch is None:
            batch = Batch(kind, record, end)
            # Points alone are so many that calls must be saved.
            if kind != "metrics":
                return batch
            batch.is_complete = False
        elif kind != "metrics" or len(batch.points) + len(record["values"]) > MAX_POINTS:
            batch.is_complete = True
            return batch
        step = record["step"]
        time_ms = record["time"]
        values = journals.new_values(record, earlier_steps)
        batch.points += [(name, value, time_ms, step) for name, value in values.items()]
        batch.end = end
    return batch


def artifact_file(journal: Path, name: str) -> Path:
    """Return the path of a file or folder that a journal names.

    Raises:
        RefusedError: the file is not in the run's folder, or is a link that leads out of it.
    """
    path = Path(name)
    run_folder = journal.parent.resolve()
    # A journal may come from anybody, and must not have other files of the user's uploaded. Each
    # file of a folder is checked, because any of them may be a link.
    for part in (path, *path.rglob("*")):
        if not part.resolve().is_relative_to(run_folder):
            raise RefusedError(f"{path} is not in the run's folder, {run_folder}")
    return path
