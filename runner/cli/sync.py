"""Run `runner sync`: upload what runs recorded and their store does not have.

The writer process uploads each journal, as it does while a run trains.
"""

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
"""Seconds without progress after which the uploads that remain are given up."""
BUSY_PATIENCE = 1_800.0
"""Seconds without progress while a file uploads or another process holds a journal."""


def sync(argv: Sequence[str]) -> int:
    """Upload every journal that is not stored completely and whose run is not training.

    Args:
        argv: folders of runs, by default outputs/; `tracking.uri=...` and
            `tracking.experiment=...` change where the remaining records go.

    Returns:
        0 if everything is stored, 1 if something could not be uploaded, 2 for wrong arguments.
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
    """Upload journals, print the outcome of each, and return how many are stored completely."""
    sent = 0
    writer = WriterProcess()
    try:
        followed = []
        for path in paths:
            _forget_troubles(path)
            if trouble := _move(path, uri, experiment):
                print(f"{path.parent}: not sent: {trouble}.", flush=True)
            else:
                writer.add_journal(path)
                followed.append(JournalStatus(path))
        writer.finish()
        for one in _ended(writer, followed):
            sent += one.state.done
            print(f"{one.journal.parent}: {_outcome(one)}", flush=True)
    finally:
        writer.kill()
    return sent


def _forget_troubles(path: Path) -> None:
    """Clear what earlier writers reported, unless a writer has the journal at the moment."""
    state = UploadState(path)
    if state.claim():
        if not state.done:
            state.forget_troubles()
        state.release()


def _move(path: Path, uri: str | None, experiment: str | None) -> str | None:
    """Redirect a journal to the command's store and experiment; return why that failed, if it did.

    A run that its store has already keeps its experiment while it stays in that store.
    """
    if uri is None and experiment is None:
        return None
    progress = UploadState(path)
    deadline = time.monotonic() + PATIENCE
    while not progress.claim():
        if time.monotonic() > deadline:
            return "another process is sending it"
        time.sleep(0.1)
    try:
        old_uri = progress.uri or _first_record(path).get("uri", "")
        new_uri = uri or old_uri
        sets_experiment = experiment and not progress.run_id
        if not progress.done and (new_uri != old_uri or sets_experiment):
            progress.move(new_uri, experiment)
    finally:
        progress.release()
    return None


def _ended(writer: WriterProcess, followed: Sequence[JournalStatus]) -> Iterator[JournalStatus]:
    """Yield each journal when it is closed, and the rest after too long a time without progress."""
    todo = list(followed)
    while todo:
        for one in todo:
            one.refresh()
        for one in [one for one in todo if one.is_closed]:
            todo.remove(one)
            yield one
        if todo and writer.keep_alive():
            yield from todo
            return
        silent = time.monotonic() - max(one.progress_at for one in followed)
        if silent > BUSY_PATIENCE or (silent > PATIENCE and not any(map(_busy, todo))):
            yield from todo
            return
        time.sleep(0.05)


def _busy(one: JournalStatus) -> bool:
    """Return whether a call to the store is running, ours or another process's.

    A writer whose call fails unlocks the journal until its next try, so an outage ends this state.
    """
    return one.state.sending_file or pending.journal_state(one.journal) == "sending"


def _outcome(one: JournalStatus) -> str:
    state = one.state
    if not state.done:
        reason = state.refusal or state.failure or state.outage or state.last_error
        return f"not sent: {reason or 'no answer'}."
    points, status = 0, "KILLED"
    for record, _ in journals.read_records(one.journal):
        if record["kind"] == "metrics":
            points += len(record["values"])
        elif record["kind"] == "end":
            status = record["status"]
    if state.run_id is None:
        return "nothing was recorded"
    store = redact(state.uri or _first_record(one.journal)["uri"])
    without = f"; left out: {state.last_error}" if state.last_error else ""
    return f"sent to {store} as run {state.run_id}, {status}, {points:,} points{without}"


def _first_record(journal: Path) -> dict[str, Any]:
    """Return a journal's first record; empty if even that was not written completely."""
    return next((record for record, _ in journals.read_records(journal)), {})


def _arguments(argv: Sequence[str]) -> tuple[list[Path], str | None, str | None]:
    """Return the folders, the store and the experiment that were typed."""
    folders = []
    given = {}
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
