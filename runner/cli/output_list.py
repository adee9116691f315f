"""Run `runner list`: a row for each run and sweep below a folder, the newest first.

The rows are read from the files that runs and sweeps leave, without torch and without MLflow. Any
of them may be a stranger's: no link is followed, and nothing of them is run.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from runner.core import ConfigError, RunResult, files, fmt, journals, layout
from runner.output.console import plain_console
from runner.output.markup import Cell, Table, terminal_table
from runner.sweeps.manifest import Manifest
from runner.tracking.result_table import read_results
from runner.tracking.upload_state import read_state

OUTPUTS = Path("outputs")
"""Where commands make the folders of runs and sweeps."""
MAX_DEPTH = 2
"""How many folders deep a listed folder is searched, as for outputs/runs/<time>."""


@dataclass(frozen=True)
class OutputRow:
    """A run or a sweep, as its folder shows it.

    Attributes:
        folder: of the run or the sweep.
        began: date and time.
        name: of the sweep; of a run its model and data.
        model, data, precision: of the run, or of the sweep's jobs.
        answer: of the sweep; of a run its quality, or how it ended.
        note: of the user, tracking.note.
        size: bytes that the folder takes on the disk.
        ids: of the run in its store; of a sweep also the one under which it finds the jobs.
    """

    folder: str
    began: str = ""
    name: str = ""
    model: Sequence[str] = ()
    data: Sequence[str] = ()
    precision: Sequence[str] = ()
    answer: str = ""
    note: str = ""
    size: int = 0
    ids: Sequence[str] = ()


def list_outputs(words: Sequence[str], values: Mapping[str, str]) -> int:
    """Print the runs and sweeps of folders that pass all filters; return the exit status.

    Args:
        words: folders, and words that a row contains.
        values: of the options: what a row has under a name, and `--json`.
    """
    folders = [word for word in words if files.path_exists(word) and Path(word).is_dir()]
    sought = [word.lower() for word in words if word not in folders]
    filters = {key: value for key, value in values.items() if key != "--json"}
    rows = []
    for row in find_rows(*map(Path, folders or [OUTPUTS])):
        text = str([*vars(row).values()]).lower()
        has_values = all(value in getattr(row, key) for key, value in filters.items())
        if has_values and all(word in text for word in sought):
            rows.append(row)
    if "--json" in values:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    if not rows:
        print(f"No such run or sweep is below {', '.join(folders) or OUTPUTS}.")
        return 0
    cells = []
    for row in rows:
        folder = Cell(row.folder, note=f"{row.began}, {size_text(row.size)}")
        name = Cell(row.name, note=", ".join(row.precision))
        cells.append([folder, name, Cell(row.answer, note=row.note)])
    console = plain_console()
    table = Table(["folder", "what", "answer"], cells, words=frozenset(range(3)))
    console.print(f"runs and sweeps: {len(rows)}, {size_text(sum(row.size for row in rows))}")
    console.print(terminal_table(table, console.width))
    return 0


def find_rows(*folders: Path) -> list[OutputRow]:
    """Return the runs and sweeps in and below folders, the newest first, without jobs of sweeps."""
    rows = {row.folder: row for folder in folders for row in _rows_below(folder, MAX_DEPTH)}
    return sorted(rows.values(), key=lambda row: row.began, reverse=True)


def _rows_below(folder: Path, depth: int) -> Iterator[OutputRow]:
    with suppress(OSError):  # of another user, or deleted meanwhile
        try:
            row = read_row(folder)
        except ConfigError as error:
            row = OutputRow(str(folder), answer=f"not read: {error}")
        if row:
            yield row
            return
        for entry in os.scandir(folder) if depth else ():
            # Links may form a loop, and MLflow has copies of the files of runs.
            if entry.is_dir(follow_symlinks=False) and entry.name != "mlartifacts":
                yield from _rows_below(Path(entry.path), depth - 1)


def read_row(folder: Path) -> OutputRow | None:
    """Return the row of a folder; None where it holds no run and no sweep.

    Raises:
        ConfigError: it holds a damaged one, or a link out of it.
        OSError: it belongs to another user.
    """
    names = (layout.MANIFEST, layout.RESULT, layout.SIGNATURE, "journal.jsonl")
    kind = next((name for name in names if (folder / name).is_file()), None)
    if kind is None:
        return None
    if files.link_out_of(folder, folder):
        raise ConfigError("it holds a link out of it.")
    try:
        return _read_row(folder, kind)
    except ConfigError:
        raise
    except Exception as error:  # a stranger's file may be damaged in any way
        raise ConfigError(f"its {kind} is damaged.") from error


def _read_row(folder: Path, kind: str) -> OutputRow:
    journal = journals.latest_journal(folder)
    start = next(journals.read_records(journal))[0] if journal else {}
    began_ms = start.get("time") or 1000 * (folder / kind).stat().st_mtime
    ids = [journal and read_state(journal).run_id]
    answer = ""
    if kind == layout.MANIFEST:
        manifest = Manifest.read(folder)
        began_ms = manifest.began_ms
        ids.append(manifest.id)
        results = read_results(folder)
        answer = manifest.answer or f"not recorded; type report {folder}"
    elif kind == layout.RESULT:
        results = [RunResult.read(folder)]
    else:
        known = start.get("tags") or {}
        tags = {key: known.get(key, "") for key in ("precision", "model", "data")}
        results = [RunResult(label="", folder="", status="stopped", **tags)]
    values = {}
    for key in ("model", "data", "precision"):
        values[key] = [*dict.fromkeys(filter(None, (getattr(each, key) for each in results)))]
    name = " on ".join(", ".join(values[key]) for key in ("model", "data") if values[key])
    if kind == layout.MANIFEST:
        name = str(start.get("name") or name)
    else:
        (result,) = results
        answer = result.outcome
        if result.quality_value is not None:
            answer = f"{result.quality} {fmt.format_number(result.quality_value)}"
    return OutputRow(
        str(folder),
        f"{datetime.fromtimestamp(began_ms / 1000):%Y-%m-%d %H:%M:%S}",
        name,
        answer="running" if files.is_locked(folder) else answer,
        note=next((result.note for result in results if result.note), ""),
        size=disk_bytes(folder),
        ids=[str(each) for each in ids if each],
        **values,
    )


def size_text(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{fmt.format_number(size / 2**20)} MiB"


def disk_bytes(*folders: Path) -> int:
    """Return the bytes that folders take on the disk together; a file with two names is one."""
    sizes = {}
    for path in (path for folder in folders for path in folder.rglob("*")):
        with suppress(OSError):  # deleted meanwhile
            found = path.lstat()
            sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())
