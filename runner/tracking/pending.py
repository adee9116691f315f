"""What earlier runs left: journals that are not stored completely, and their sending.

A run that a power cut or SIGKILL ended together with its writer, or whose store was away too long,
is settled by the next command that meets it, which does not wait for that, or by `runner sync`.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from runner.tracking.journal import owner_lives
from runner.tracking.upload_state import UploadState
from runner.tracking.writer_start import start_detached_writer

FOLDERS = 2_000
"""How many folders a search in the background looks into, the newest first."""
JOURNALS = 100
"""How many journals one process sends."""
_NAME = re.compile(r"journal.*\.jsonl")
_NO_RUNS = {"mlartifacts", "mlruns", "checkpoints", "model", ".hydra"}


def find_journals(folder: Path, most: float = float("inf")) -> Iterator[Path]:
    """The journals in a folder and below, of the newest run first, from `most` folders at most."""
    todo = [folder]
    while todo and most > 0:
        most -= 1
        with suppress(OSError):  # a folder that is gone meanwhile, or another person's
            for entry in sorted(os.scandir(todo.pop()), key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    todo += [Path(entry.path)] if entry.name not in _NO_RUNS else []
                elif entry.is_file(follow_symlinks=False) and _NAME.fullmatch(entry.name):
                    yield Path(entry.path)  # no pipe, which would never end


State = Literal["stored", "training", "sending", "refused", "left"]


def journal_state(journal: Path) -> State:
    """What has become of a journal: everything is stored; its trainer is at work, or a writer; its
    store has refused it; or it was left behind. An empty one has nothing to store, and its
    trainer may be about to lock it."""
    progress = UploadState(journal)
    held = progress.peek()
    if progress.done or journal.stat().st_size == 0:
        return "stored"
    if owner_lives(journal):
        return "training"
    return "sending" if held else "refused" if progress.refused else "left"


def outputs_folder(journal: Path) -> Path:
    """The folder of all runs that a journal's run belongs to: the nearest one called "outputs",
    else the one around the run's."""
    around = [folder for folder in journal.parents if folder.name == "outputs"]
    return around[0] if around else journal.parent.parent


def upload_in_background(folder: Path) -> int:
    """Has what is left under a folder sent by a process that nobody waits for.

    A run without an end becomes KILLED. One that its store has refused is left to `runner sync`.

    Returns:
        How many journals it was given: none while another such process is at work there.
    """
    found = []
    for journal in find_journals(folder, FOLDERS):
        with suppress(OSError):
            found += [journal] if journal_state(journal) == "left" else []
        if len(found) == JOURNALS:
            break
    if not found:
        return 0
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        start_detached_writer(found, lock)  # which holds the lock from here on
    except OSError:
        return 0
    finally:
        os.close(lock)
    return len(found)
