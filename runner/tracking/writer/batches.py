"""What of a journal goes to the store in one call. Imports mlflow, for the size of a call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.tracking import journal as journals
from runner.tracking.writer.store import MAX_POINTS, Point
from runner.tracking.writer.store_errors import RefusedError


@dataclass
class Batch:
    """Records of one kind that go to the store together.

    Attributes:
        end: the offset after them in the journal.
        complete: there is no reason to wait for more.
    """

    kind: str
    record: dict[str, Any]
    end: int
    points: list[Point] = field(default_factory=list)
    complete: bool = True


def next_batch(path: Path, offset: int, known: Mapping[str, int] = {}) -> Batch | None:
    """The next record, or as many metric records as make one call, without the steps that an
    earlier journal of the run holds."""
    batch: Batch | None = None
    for record, end in journals.read_records(path, offset):
        kind = record["kind"]
        if batch is None:
            batch = Batch(kind, record, end)
            if kind != "metrics":
                return batch
            batch.complete = False
        elif kind != "metrics" or len(batch.points) + len(record["values"]) > MAX_POINTS:
            batch.complete = True
            return batch
        step, time_ms = record["step"], record["time"]
        values = journals.new_values(record, known)
        batch.points += [(name, value, time_ms, step) for name, value in values.items()]
        batch.end = end
    return batch


def artifact_file(journal: Path, name: str) -> Path:
    """A file or folder that a journal names: of its run's folder, whatever else it says.

    Raises:
        RefusedError: it lies elsewhere, or leads there.
    """
    path, own = Path(name), journal.parent.resolve()
    if not all(one.resolve().is_relative_to(own) for one in (path, *path.rglob("*"))):
        raise RefusedError(f"{path} is not in the run's folder, {own}")
    return path
