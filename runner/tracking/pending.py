"""Find journals that were not fully uploaded and upload them in the background.

A journal is pending after a power cut, after a SIGKILL of both the trainer and its writer, or after
a long outage of the store. The next command that finds the journal uploads it without waiting for
it; `runner sync` uploads it and waits. The last case of runner/tracking/__init__.py.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from runner.core import journals
from runner.core.config.signature import is_signed
from runner.tracking.upload_state import STORE_SIGNATURE_PURPOSE, UploadState
from runner.tracking.uri import is_configured_store
from runner.tracking.writer_process import start_detached_writer

MAX_SEARCHED_FOLDERS = 2_000
"""Upper bound on the folders that a search in the background reads, the newest first.

A search by `runner sync` has no bound.
"""
MAX_JOURNALS_PER_WRITER = 100
"""Upper bound on the journals that one writer uploads: their names must fit into a pipe."""
_NAME = re.compile(r"journal.*\.jsonl")
# Folders with many files and no journals.
_FOLDERS_WITHOUT_RUNS = {"mlartifacts", "mlruns", "checkpoints", "model", ".hydra"}


def find_journals(folder: Path, max_folders: float = float("inf")) -> Iterator[Path]:
    """Yield the journals in a folder and below it, those of the newest run first.

    Args:
        folder: where to begin.
        max_folders: upper bound on the folders to read.
    """
    # A stack: folders are named by their time, so the last one of a folder is read first.
    todo = [folder]
    while todo and max_folders > 0:
        max_folders -= 1
        with suppress(OSError):  # a folder that was deleted meanwhile, or without permission
            for entry in sorted(os.scandir(todo.pop()), key=lambda entry: entry.name):
                # Links are not followed: they may form a loop.
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _FOLDERS_WITHOUT_RUNS:
                        todo.append(Path(entry.path))
                # A regular file only: reading a pipe would never end.
                elif entry.is_file(follow_symlinks=False) and _NAME.fullmatch(entry.name):
                    yield Path(entry.path)


JournalState = Literal["stored", "training", "sending", "refused", "pending"]


def journal_state(journal: Path) -> JournalState:
    """Return the state of a journal's upload.

    Returns:
        "stored": nothing is missing in the store. "training": the process that writes it runs.
        "sending": a writer is uploading it. "refused": its store has refused the run. "pending":
        none of these, so it waits to be uploaded.
    """
    state = UploadState(journal)
    state.read()
    # The trainer of an empty journal may be about to lock it; there is nothing to upload anyway.
    if state.done or journal.stat().st_size == 0:
        return "stored"
    if journals.has_live_owner(journal):
        return "training"
    if state.is_locked():
        return "sending"
    return "refused" if state.refused else "pending"


class JournalStore(NamedTuple):
    """The store that a journal is uploaded to.

    Attributes:
        path: of the journal.
        uri: of its store, absolute, with the credentials that it was given.
        run_id: of its run there; None where the store has never opened it.
        experiment: name of the run's experiment.
        signed_by_user: the URI is signed by this user.
        fully_uploaded: all of it is stored.
    """

    path: Path
    uri: str
    run_id: str | None
    experiment: str | None
    signed_by_user: bool
    fully_uploaded: bool

    @property
    def is_users(self) -> bool:
        """Return whether this user has named the store, which may then get the user's credentials.

        It is signed with the user's key, or it is the store of this command's environment.
        """
        return self.signed_by_user or is_configured_store(self.uri)


def journal_store(path: Path) -> JournalStore | None:
    """Return the store of one journal; None where it names none, as a damaged one does."""
    start = next((record for record, _ in journals.read_records(path)), {})
    progress = UploadState(path)
    progress.read()
    if isinstance(progress.uri, str):
        # The journal was moved: the state names its store, and its start the one before.
        uri = progress.uri
        signature = progress.signature
    else:
        uri = start.get("uri")
        signature = start.get("signature")
    if not isinstance(uri, str) or not uri:
        return None
    run_id = progress.run_id
    experiment = progress.experiment or start.get("experiment")
    return JournalStore(
        path,
        uri,
        run_id if isinstance(run_id, str) else None,
        experiment if isinstance(experiment, str) else None,
        is_signed(STORE_SIGNATURE_PURPOSE, uri, signature),
        bool(progress.done),
    )


def outputs_folder(journal: Path) -> Path:
    """Return the folder of all runs that a journal's run belongs to.

    That is the nearest one called "outputs", else the parent of the run's folder.
    """
    parents = [folder for folder in journal.parents if folder.name == "outputs"]
    return parents[0] if parents else journal.parent.parent


def upload_in_background(folder: Path) -> int:
    """Start a detached writer for the pending journals under a folder; return at once.

    A run without an end becomes KILLED. A journal that its store has refused is not
    uploaded; `runner sync` does that. A journal whose store this user has not named, as in a
    stranger's folder, is left alone.

    Returns:
        The number of journals given to the writer: 0 while another such writer works there.
    """
    paths: list[Path] = []
    for journal in find_journals(folder, MAX_SEARCHED_FOLDERS):
        with suppress(OSError):
            store = journal_store(journal)
            if store and store.is_users and journal_state(journal) == "pending":
                paths.append(journal)
        if len(paths) == MAX_JOURNALS_PER_WRITER:
            break
    if not paths:
        return 0
    # One such writer per folder: the commands of a batch system start together and find the same.
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        start_detached_writer(paths, lock)  # the writer inherits the lock
    except OSError:
        return 0
    finally:
        os.close(lock)
    return len(paths)
