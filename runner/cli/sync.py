"""Run `runner sync`: upload the records of runs that are missing in their store.

The writer process uploads each journal, as it does while a run trains.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.core import journals, secrets, signature
from runner.tracking.upload_state import JournalStatus, UploadState, journal_state, journal_store
from runner.tracking.uri import check_store, resolve_uri
from runner.tracking.writer_process import MAX_JOURNALS_PER_WRITER, WriterProcess, find_journals

IDLE_TIMEOUT_SECONDS = 30.0
"""Seconds without progress after which the remaining uploads count as failed."""
BUSY_TIMEOUT_SECONDS = 1_800.0
"""Seconds without progress while a file uploads or another process holds a journal."""


def sync(folders: Sequence[str], uri: str | None = None, experiment: str | None = None) -> int:
    """Upload every journal that is not stored completely and whose run is not training.

    Args:
        folders: of runs; without any outputs/.
        uri: store that the remaining records go to; None for their own.
        experiment: in which their runs are opened; None for their own.

    Returns:
        0 if everything is stored, 1 if something could not be uploaded.

    Raises:
        ConfigError: a store that can never be opened.
    """
    if uri is not None:
        uri = resolve_uri(uri)
        check_store(uri)
    # A run may be in several of the typed folders: a dict holds its journal once.
    states = {}
    for folder in folders or ["outputs"]:
        for path in find_journals(Path(folder).absolute()):
            state = journal_state(path)
            store_uri = _store_uri(path)
            moves = state == "stored" and uri and store_uri not in ("", uri)
            states[path] = "pending" if moves else state
    counts = Counter(states.values())
    # The process of a run that is training uploads its journal itself.
    remaining = [path for path, state in states.items() if state not in ("stored", "training")]
    uploaded = 0
    for first in range(0, len(remaining), MAX_JOURNALS_PER_WRITER):
        chunk = remaining[first : first + MAX_JOURNALS_PER_WRITER]
        uploaded += _upload(sorted(chunk), uri, experiment)
    failed = len(remaining) - uploaded
    print(
        f"{uploaded} uploaded, {failed} failed, {counts['stored']} already uploaded, "
        f"{counts['training']} still training."
    )
    return 1 if failed else 0


def _store_uri(path: Path) -> str:
    """Return the URI of a journal's store; empty where it names none."""
    store = journal_store(path)
    return store.uri if store else ""


def _upload(paths: Sequence[Path], uri: str | None, experiment: str | None) -> int:
    """Upload journals, print the outcome of each, and return how many are stored completely."""
    uploaded = 0
    writer = WriterProcess()
    try:
        journals_of_writer = []
        for path in paths:
            try:
                problem = _prepare(path, uri, experiment)
            except OSError as error:
                problem = str(error)
            if problem:
                print(f"{path.parent}: failed: {problem}.", flush=True)
            else:
                writer.add_journal(path)
                journals_of_writer.append(JournalStatus(path))
        writer.finish()
        for status in _wait_until_closed(writer, journals_of_writer):
            uploaded += status.state.done
            print(f"{status.journal.parent}: {_outcome(status)}", flush=True)
    finally:
        writer.kill()
    return uploaded


def _prepare(path: Path, uri: str | None, experiment: str | None) -> str | None:
    """Redirect a journal to the command's store and experiment, and clear what earlier writers
    reported; return why it cannot be uploaded, if so.

    A run that its store has already keeps its experiment while it stays in that store.
    """
    store = journal_store(path)
    old_uri = store.uri if store else ""
    if uri is None and store and not store.is_users:
        # Whoever wrote the journal would get this user's token.
        return (
            f"its journal names the store {secrets.redact(old_uri)}, which is neither signed with "
            f"your key ({signature.describe_key_location()}) nor the store here. Type "
            "tracking.uri=<store that you trust>"
        )
    progress = UploadState(path)
    deadline = time.monotonic() + IDLE_TIMEOUT_SECONDS
    while not progress.acquire_lock():
        if uri is None and experiment is None:  # the writer that has the journal uploads it
            return None
        if time.monotonic() > deadline:
            return "another process is uploading it"
        time.sleep(0.1)
    try:
        if not progress.done:
            progress.forget_troubles()
        new_uri = uri or old_uri
        is_unopened = not progress.run_id and not progress.done
        if new_uri != old_uri or (experiment and is_unopened):
            progress.change_store(new_uri, experiment)
    finally:
        progress.release_lock()
    return None


def _wait_until_closed(
    writer: WriterProcess, statuses: Sequence[JournalStatus]
) -> Iterator[JournalStatus]:
    """Yield each journal when it is closed, and the rest after too long a time without progress."""
    open_journals = list(statuses)
    while open_journals:
        for status in open_journals:
            status.refresh()
        closed = [status for status in open_journals if status.is_closed]
        for status in closed:
            open_journals.remove(status)
            yield status
        # One process uploads all of them: the progress of any counts for those that wait.
        idle_seconds = time.monotonic() - max(status.progress_at for status in statuses)
        is_idle = idle_seconds > IDLE_TIMEOUT_SECONDS and not any(map(_is_busy, open_journals))
        is_dead = bool(open_journals) and writer.keep_alive() is not None
        if is_dead or is_idle or idle_seconds > BUSY_TIMEOUT_SECONDS:
            yield from open_journals
            return
        time.sleep(0.05)


def _is_busy(status: JournalStatus) -> bool:
    """Return whether a call to the store is running, ours or another process's.

    A writer whose call fails unlocks the journal until its next try, so an outage ends this state.
    """
    return status.state.sending_file or journal_state(status.journal) == "sending"


def _outcome(one: JournalStatus) -> str:
    """Return a line about a journal: where it was uploaded to, or why that failed."""
    state = one.state
    if not state.done:
        reason = state.refusal or state.failure or state.outage or state.first_error
        return f"failed: {reason or 'no answer'}."
    points = 0
    # Only a run that was killed writes no end.
    status = "KILLED"
    for record, _ in journals.read_records(one.journal):
        if record["kind"] == "metrics":
            points += len(record["values"])
        elif record["kind"] == "end":
            status = record["status"]
    if state.run_id is None:
        return "nothing was recorded"
    without = f"; left out: {state.first_error}" if state.first_error else ""
    place = f"{secrets.redact(_store_uri(one.journal))} as run {state.run_id}"
    return f"uploaded to {place}, {status}, {points:,} points{without}"
