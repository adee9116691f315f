"""`runner sync`: sends what runs recorded and their store does not have."""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.tracking import journal as journals
from runner.tracking import pending
from runner.tracking.journal_status import JournalStatus
from runner.tracking.upload_state import UploadState
from runner.tracking.uri import resolve_uri
from runner.tracking.writer_process import WriterProcess
from runner.utils.errors import ConfigError
from runner.utils.secrets import redact
from runner.utils.terminal import print_error

PATIENCE = 30.0
"""Seconds without progress after which the rest is given up."""
BUSY_PATIENCE = 1_800.0
"""The same while a file is under way, or another writer is at work."""


def sync(argv: Sequence[str]) -> int:
    """Send every journal that is not stored completely and whose trainer is gone.

    Args:
        argv: folders of runs, else outputs/; `tracking.uri=...` and `tracking.experiment=...` send
            what is left there.

    Returns:
        0 when everything is stored, 1 when something could not be sent, 2 for what was typed.
    """
    try:
        folders, uri, experiment = _arguments(argv)
    except ConfigError as error:
        print_error(str(error))
        return 2
    found = {
        path: pending.journal_state(path)
        for folder in folders
        for path in pending.find_journals(folder)
    }
    counts = Counter(found.values())
    todo = [path for path, state in found.items() if state not in ("stored", "training")]
    sent = 0
    for first in range(0, len(todo), pending.JOURNALS):
        sent += _send(sorted(todo[first : first + pending.JOURNALS]), uri, experiment)
    print(
        f"{sent} sent, {len(todo) - sent} not sent, {counts['stored']} stored before, "
        f"{counts['training']} still training."
    )
    return 0 if sent == len(todo) else 1


def _send(paths: Sequence[Path], uri: str | None, experiment: str | None) -> int:
    """Sends journals, tells of each, and returns how many are stored now."""
    sent, writer = 0, WriterProcess()
    try:
        followed = []
        for path in paths:
            if trouble := _move(path, uri, experiment):
                print(f"{path.parent}: not sent: {trouble}.", flush=True)
            else:
                followed.append(writer.add_journal(path))
        writer.finish()
        for one in _ended(followed):
            sent += one.complete
            print(f"{one.journal.parent}: {_outcome(one)}", flush=True)
    finally:
        writer.kill()
    return sent


def _move(path: Path, uri: str | None, experiment: str | None) -> str | None:
    """Has a journal go where the command says; what keeps it from that. A run that is begun stays
    in its experiment, as long as it stays in its store."""
    if uri is None and experiment is None:
        return None
    progress = UploadState(path)
    deadline = time.monotonic() + PATIENCE
    while not progress.claim():
        if time.monotonic() > deadline:
            return "another process is sending it"
        time.sleep(0.1)
    try:
        here = progress.uri or _start(path).get("uri", "")
        if not progress.done and ((uri or here) != here or (experiment and not progress.run_id)):
            progress.move(uri or here, experiment)
    finally:
        progress.release()
    return None


def _ended(followed: Sequence[JournalStatus]) -> Iterator[JournalStatus]:
    """Each journal when it is closed; those that are left once nothing has moved for long."""
    todo = list(followed)
    while todo:
        for one in [one for one in todo if one.closed.is_set()]:
            todo.remove(one)
            yield one
        silent = time.monotonic() - max(one.progress_at for one in followed)
        if silent > BUSY_PATIENCE or (silent > PATIENCE and not any(map(_busy, todo))):
            yield from todo
            return
        time.sleep(0.05)


def _busy(one: JournalStatus) -> bool:
    """Whether a call is under way. A writer that fails lets go of the journal until it tries again,
    so this ends with an outage, too."""
    return one.sending_file or pending.journal_state(one.journal) == "sending"


def _outcome(one: JournalStatus) -> str:
    if not one.complete:
        return f"not sent: {one.outage or one.last_error or 'no answer'}."
    points, status = 0, "KILLED"
    for record, _ in journals.read_records(one.journal):
        if record["kind"] == "metrics":
            points += len(record["values"])
        elif record["kind"] == "end":
            status = record["status"]
    progress = UploadState(one.journal)
    progress.peek()
    if progress.run_id is None:
        return "nothing was recorded"
    store = redact(progress.uri or _start(one.journal)["uri"])
    without = f"; left out: {one.last_error}" if one.last_error else ""
    return f"sent to {store} as run {progress.run_id}, {status}, {points:,} points{without}"


def _start(journal: Path) -> dict[str, Any]:
    """The first record; empty where not even that was written in full."""
    return next((record for record, _ in journals.read_records(journal)), {})


def _arguments(argv: Sequence[str]) -> tuple[list[Path], str | None, str | None]:
    """(folders, store, experiment)."""
    folders, given = [], {}
    for text in argv:
        key, mark, value = text.partition("=")
        if mark and key in ("tracking.uri", "tracking.experiment"):
            given[key] = value
        elif Path(text).is_dir():
            folders.append(Path(text).absolute())
        else:
            raise ConfigError(
                f"sync does not take {text}: there is no such folder. Allowed: folders of runs or "
                "sweeps, tracking.uri=..., tracking.experiment=..."
            )
    uri = given.get("tracking.uri")
    if uri is not None:
        uri = resolve_uri(uri, os.environ, Path.cwd())
    return folders or [Path("outputs").absolute()], uri, given.get("tracking.experiment")
