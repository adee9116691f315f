"""Run `runner remove`: delete runs and sweeps, in their stores and in their folders.

The store comes first, and the files that show whose a folder is come last, so that a removal that
was interrupted can be repeated.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING

from runner.cli.output_list import OUTPUTS, OutputRow, disk_bytes, find_rows, read_row, size_text
from runner.core import ConfigError, RunResult, files, fmt, journals, layout, secrets, terminal
from runner.tracking.upload_state import journal_state, journal_store
from runner.tracking.writer_process import find_journals

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun

_OWN_NAMES = re.compile(
    r"\d+|checkpoints|model|ranks|guard|pretrained|adapter|samples|callbacks|\.hydra|\.submitit"
    r"|report\.(html|md|csv|png)|(numerics|diff)\.(html|png)|(data|error|log|profile)\.txt"
    r"|loss_scale\.png|.+\.(json|jsonl|state|spare|partial|yaml|npz|log|safetensors)"
)
"""Names of the files and folders that commands write into the folders of runs and sweeps."""
_LAST_FILES = ("journal.jsonl", layout.SIGNATURE, layout.RESULT, layout.MANIFEST)
"""Files by which a folder is known as a run's or a sweep's."""


def remove(words: Sequence[str], values: Mapping[str, str]) -> int:
    """Remove runs and sweeps once the user agrees; return the exit status.

    Args:
        words: their folders, or ids of runs or sweeps below outputs/.
        values: `--yes` removes without a question.

    Raises:
        ConfigError: a word names none, or one that cannot be removed; nothing is removed.
        TrackingError: a store does not answer.
    """
    if not words:
        raise ConfigError("remove needs a folder or an id. Type runner list to see them.")
    known = find_rows(OUTPUTS)
    rows = {Path(row.folder).resolve(): row for row in (_find(word, known) for word in words)}
    runs = {folder: [*_stored_runs(folder)] for folder in rows}
    places = [*rows]
    for folder, row in rows.items():
        facts = filter(None, [row.name, ", ".join(row.precision), row.answer, row.note])
        lines = [f"{row.folder}: {'; '.join(facts)}", *_dependents(folder, row, known)]
        for reader, run in runs[folder]:
            stored = reader.artifact_folders(run).values()
            places += stored
            if not stored:
                lines.append(f"  artifacts stay in {secrets.redact(reader.uri)} until mlflow gc")
        print(terminal.sanitize("\n".join(dict.fromkeys(lines))))
    count = sum(map(len, runs.values()))
    what = f"{size_text(disk_bytes(*places))} (folders: {len(rows)}, runs of MLflow: {count})"
    if "--yes" not in values:
        if not sys.stdin.isatty():
            raise ConfigError(f"remove deletes {what} only if you type --yes, too.")
        answer = ""
        with suppress(EOFError):  # Ctrl-D
            answer = input(f"Delete {what}? [y/N] ").strip().lower()
        if answer not in ("y", "yes"):
            return 1
    for folder in rows:
        with files.folder_lock(folder):
            for reader, run in runs[folder]:
                reader.delete_run(run)
            for path in sorted(folder.iterdir(), key=lambda path: path.name in _LAST_FILES):
                if path.is_dir() and not path.is_symlink():
                    rmtree(path)
                else:
                    path.unlink()
            folder.rmdir()
    print(f"Deleted {what}.")
    return 0


def _find(word: str, known: Sequence[OutputRow]) -> OutputRow:
    """Return the run or sweep of a folder or an id.

    Raises:
        ConfigError: there is none, or it cannot be removed.
    """
    found = [row.folder for row in known if word in row.ids]
    folder = Path(*found[:1] or [word])
    is_folder = files.path_exists(str(folder)) and not folder.is_symlink()
    try:
        row = read_row(folder) if is_folder else None
    except ConfigError as error:
        raise ConfigError(f"remove {word}: {error}") from error
    if row is None:
        raise ConfigError(
            f"remove {word}: this is no folder of a run or a sweep (nor is a link to one), and no "
            "id. Type runner list to see them."
        )
    names = [path.name for path in folder.iterdir()]
    foreign = [name for name in names if not _OWN_NAMES.fullmatch(name)]
    uploads = {journal_state(path) for path in find_journals(folder)}
    if Path.cwd().is_relative_to(folder.resolve()):
        problem = "it is the working directory"
    elif (folder.parent / layout.MANIFEST).is_file():
        problem = f"it is a job of a sweep. Type {folder.parent} for the whole sweep"
    elif foreign:
        problem = f"it also holds {fmt.first_names(foreign)}, which no run writes"
    elif files.is_locked(folder) or not uploads.isdisjoint(("training", "sending")):
        problem = "it runs. Stop it, or wait for its end"
    else:
        return row
    raise ConfigError(f"remove {word}: {problem}.")


def _dependents(folder: Path, row: OutputRow, known: Sequence[OutputRow]) -> Iterator[str]:
    """Yield a line for each other run whose command names the folder of this one."""
    others = [Path(other.folder) for other in known if other.folder != row.folder]
    for path in (path for other in others for path in other.rglob(layout.RESULT)):
        with suppress(OSError, ValueError):
            for override in RunResult.read(path.parent).overrides:
                value = override.partition("=")[2].strip("'\"")
                if value in row.ids or Path(value).resolve().is_relative_to(folder):
                    yield f"  {path.parent} was run with {override}"


def _stored_runs(folder: Path) -> Iterator[tuple["Reader", "StoredRun"]]:
    """Yield the runs that the journals of a folder have made, each with its store.

    Runs in a store that is not the user's are left out.

    Raises:
        TrackingError: a store does not answer.
    """
    paths = [*find_journals(folder)]
    # A stranger's folder may name any run of this user's: the run itself names its journal, too.
    starts = (next(journals.read_records(path), ({}, 0))[0] for path in paths)
    ids = [start.get("id") for start in starts]
    stores = filter(None, map(journal_store, paths))
    run_ids = fmt.grouped((each.uri, each.run_id or "") for each in stores if each.is_users)
    for uri, of_store in run_ids.items():
        from runner.tracking.reader import Reader  # imports mlflow

        with suppress(ConfigError):  # the store's file is gone, and the runs with it
            reader = Reader(uri)
            for run in map(reader.run, filter(None, dict.fromkeys(of_store))):
                tag = run and run.tags.get(journals.JOURNAL_TAG)
                if run and tag and tag in ids:
                    yield reader, run
