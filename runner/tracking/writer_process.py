"""Start writer processes, name journals to them, and restart one that dies.

Second stage of the way that runner/tracking/__init__.py describes. The writer (writer_main.py in
runner/tracking/writer) reads journal paths from its stdin, its only message. It answers through the
state files of the journals only, so nothing here waits for the store.

A journal is pending after a power cut, after a SIGKILL of both the trainer and its writer, or after
a long outage of the store. The next command that finds the journal uploads it without waiting for
it; `runner sync` uploads it and waits.
"""

import atexit
import fcntl
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from runner.core import files, journals, stop_signals
from runner.tracking.upload_state import JournalStatus, journal_state, journal_store

log = logging.getLogger(__name__)

MAX_SEARCHED_FOLDERS = 2_000
"""Upper bound on the folders that a search in the background reads, the newest first.

A search by `runner sync` has no bound.
"""
MAX_JOURNALS_PER_WRITER = 100
"""Upper bound on the journals that one writer uploads: their names must fit into a pipe."""
_NAME = re.compile(r"journal.*\.jsonl")
# Folders with many files and no journals.
_FOLDERS_WITHOUT_RUNS = {"mlartifacts", "mlruns", "checkpoints", "model", ".hydra"}
_MAX_STARTS = 3
_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); "
_COMMAND += "from runner.tracking.writer.writer_main import run_writer; "
_COMMAND += "run_writer(int(sys.argv[2]))"


def start_writer(folder: Path, keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a writer process.

    Args:
        folder: of its log.
        keep: file descriptors that it inherits.
    """
    root = str(Path(__file__).resolve().parents[2])
    with _open_log(folder / "tracking.log") as log_file, stop_signals.signals_blocked():
        return subprocess.Popen(
            # -P keeps the working directory off its path, where a user's file may have the name
            # of a module of the standard library.
            [sys.executable, "-P", "-c", _COMMAND, root, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            bufsize=0,
            # A session of its own keeps Ctrl-C in the terminal from reaching it.
            start_new_session=True,
            pass_fds=keep,
        )


def _open_log(path: Path) -> IO[bytes]:
    try:
        return os.fdopen(files.open_output(path, os.O_WRONLY | os.O_APPEND), "ab")
    except OSError:  # a full disk must not keep the writer from starting
        return Path(os.devnull).open("ab")


def start_detached_writer(paths: Sequence[Path], lock: int) -> None:
    """Start a writer that uploads finished journals; return at once.

    Args:
        paths: of journals of runs that have ended; a hundred at most, for their names to fit into a
            pipe.
        lock: a file descriptor that the writer keeps open while it works.
    """
    process = start_writer(paths[0].parent, [lock])
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(b"".join(map(journal_message, paths)))
    process.stdin.close()
    process.returncode = 0  # nobody waits for it; Popen would warn that it still runs


def journal_message(journal: Path) -> bytes:
    """Return the line that asks a writer to upload a journal."""
    return json.dumps({"journal": str(journal)}).encode() + b"\n"


class WriterProcess:
    """One writer process, shared by all runs of this process.

    A writer that dies is restarted, up to three starts in all. The journals make that harmless.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self._journals: list[JournalStatus] = []
        self._starts = 0
        self._finishing = False
        self._stop_requested = False

    def add_journal(self, journal: Path) -> None:
        """Have the writer upload a journal; start the writer if none runs."""
        self._journals.append(JournalStatus(journal))
        if self.process is None or self.process.poll() is not None:
            self._starts = 0
            self._start(journal.parent)
        else:
            self._send(journal)

    def keep_alive(self) -> str | None:
        """Restart a writer that died with journals unfinished.

        Returns:
            Why no writer runs any more although journals are unfinished; None otherwise.
        """
        if self.process is None or self.process.poll() is None:
            return None
        unfinished = self._unfinished()
        if not unfinished:
            return None
        status = self.process.returncode
        folder = unfinished[0].journal.parent
        if self._finishing or self._starts >= _MAX_STARTS:
            return f"the writer process ended with status {status}, see {folder / 'tracking.log'}"
        log.warning(
            "The tracking writer ended with status %d and was started again; no record is lost. "
            "Its log: %s",
            status,
            folder / "tracking.log",
        )
        self._start(folder)
        return None

    def request_stop(self) -> None:
        """Have the writer outlive this process, which was asked to stop."""
        self._stop_requested = True

    def finish(self) -> None:
        """Tell the writer that no more journals follow: it uploads what it has and ends."""
        if os.getpid() != self.owner:
            return
        self._finishing = True
        if self.process and self.process.stdin:
            self.process.stdin.close()

    def wait_at_exit(self) -> None:
        """Finish, and wait for a writer that has nothing left to upload.

        A writer that is still uploading, and any writer of a run that was asked to stop, outlives
        this process.
        """
        self.finish()
        if self._stop_requested or self.process is None or os.getpid() != self.owner:
            return
        if not self._unfinished():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)

    def kill(self) -> None:
        """Kill the writer; another one can continue from the saved offsets."""
        self.finish()
        if self.process and os.getpid() == self.owner:
            self.process.kill()
            self.process.wait()

    def _unfinished(self) -> list[JournalStatus]:
        for journal in self._journals:
            journal.refresh()
        self._journals = [journal for journal in self._journals if not journal.is_closed]
        return self._journals

    def _start(self, folder: Path) -> None:
        """Start a writer and name every unfinished journal to it."""
        self._starts += 1
        if self.process and self.process.stdin:
            self.process.stdin.close()
        self.process = start_writer(folder)
        for journal in self._unfinished():
            self._send(journal.journal)

    def _send(self, journal: Path) -> None:
        # A writer that has died is restarted by keep_alive, and gets all unfinished journals.
        with suppress(BrokenPipeError):
            assert self.process is not None
            assert self.process.stdin is not None
            self.process.stdin.write(journal_message(journal))


class SweepWriter(WriterProcess):
    """The writer of the sweep's process, as a job of the sweep sees it.

    MLflow is imported once for all jobs, and the sweep can end the MLflow run of a job that died.
    The sweep looks for the job's journal in the job's folder; a run that goes elsewhere (a resumed
    one stays in its old folder) gets a writer of its own.

    Args:
        folder: the job's.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder.resolve()

    def add_journal(self, journal: Path) -> None:
        """Have a journal outside the job's folder uploaded; the sweep finds those inside."""
        if journal.parent != self._folder:
            super().add_journal(journal)


_shared: WriterProcess | None = None


def shared_writer() -> WriterProcess:
    """Return the writer that all runs of this process share.

    A forked child gets one of its own: the pipe to its parent's writer is the parent's.
    """
    global _shared
    if _shared is None or _shared.owner != os.getpid():
        use_writer(WriterProcess())
    assert _shared is not None
    return _shared


def use_writer(writer: WriterProcess) -> None:
    """Make the runs of this process share a given writer."""
    global _shared
    _shared = writer
    atexit.register(writer.wait_at_exit)


class JobJournal:
    """The journal that one job of a sweep is about to write, as the sweep's process finds it.

    The job only writes the journal into its folder. The sweep's process names it to its writer, so
    that MLflow is imported once for all jobs, and ends it for a job that died.

    Args:
        folder: the job's; journals that it holds already are those of earlier runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._earlier = journals.latest_journal(self._folder)
        self._path: Path | None = None

    def find(self) -> None:
        """Name the journal to this process's writer, once the job has created it."""
        if self._path is not None:
            return
        newest = journals.latest_journal(self._folder)
        if newest != self._earlier and newest is not None:
            self._path = newest
            shared_writer().add_journal(newest)

    def end(self, status: journals.Status, error: str, note: str) -> JournalStatus | None:
        """End the journal of a job that died without ending it, so that its run gets a status.

        Returns:
            The journal, for the caller to wait until it is stored; None where nothing is to do.
        """
        self.find()
        if self._path is None:
            return None
        journal = JournalStatus(self._path)
        journal.refresh()
        if journal.is_closed:
            return None
        journals.append_end_for_owner(self._path, note, status, error)
        return journal


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


def outputs_folder(journal: Path) -> Path:
    """Return the folder of all runs that a journal's run belongs to.

    That is the nearest one called "outputs", else the parent of the run's folder.
    """
    parents = (folder for folder in journal.parents if folder.name == "outputs")
    return next(parents, journal.parent.parent)


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
