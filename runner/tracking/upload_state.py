"""The upload state of a journal: which run of the store it is, and up to where it is stored.

Fourth stage of the way that runner/tracking/__init__.py describes, and the only way back: the
writer saves the state after each answer of the store; the trainer, sweeps, `runner sync`, resume
and reports read it.

Nothing is sent to the trainer, and no thread listens, so a warning appears when the trainer next
asks: MlflowTracker.check is called with every block.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

from runner.core import files, journals, signature, terminal
from runner.tracking.uri import is_configured_store

log = logging.getLogger(__name__)

STORE_SIGNATURE_PURPOSE = "store"
"""Purpose of the signature of a store's URI, in a journal and in its state."""
_TEXT_BYTES = 500
"""Upper bound on each text for the user, so that all fields fit into the file."""
_TEXTS = ("outage", "refusal", "failure", "first_error")
_MAX_NOTICES = 3

OUTAGE_SECONDS = 30.0
"""Seconds without an answer of the store after which the user is warned."""
_FILE_PATIENCE_FACTOR = 30
"""How much longer a wait may last while a file is being uploaded: a file reports no progress."""
_STOPPED_SECONDS = 4.0
"""Upper bound on waiting for the store after a stop signal: batch systems kill after about 10 s."""
_RETRY_SECONDS = 5.0
"""Upper bound on waiting once an earlier wait has failed: time for one more attempt."""
_SILENT_SECONDS = 5.0
"""Seconds after which a wait is announced."""
_POLL_SECONDS = 0.05

_last_wait_failed = False
"""Whether the last run of this process to wait for its store gave up."""


# The fields are the keys of the file.
# No repr: the store's address may hold a password.
@dataclass(eq=False, repr=False)
class UploadState:
    """The file `<journal>.state`: the run's ids and the offset up to which the journal is stored.

    The offset moves only after the store has answered, so a writer that starts again sends a batch
    twice at most, which changes nothing. The file is locked: one writer per journal.

    Attributes:
        run_id: the store's id of the run.
        experiment_id: the store's id of the experiment.
        offset: bytes of the journal that are stored.
        tried: a run may exist in the store although its id is not known here.
        done: everything is stored, and the run has its status.
        refused: the store did not take the run when it was last asked.
        uri: the store that the journal was moved to; None for the one that its start names.
        experiment: the name of the experiment that it was moved to; None as for `uri`.
        signature: of `uri`, see runner.core.config.signature.
        dashboard: path, after the server's address, of the page that compares the run.
        sending_file: a file is being uploaded, which may take long.
        outage: why the store does not answer at the moment; None while it does.
        outage_since: Unix seconds of the first failed call of this outage.
        refusal: why the store did not take the run; None while it may.
        failure: why the writer gave the journal up without an answer of the store.
        first_error: why a part of the record was skipped, the first that was; None without one.
        notices: what the user should know about where the run is stored.
    """

    journal: InitVar[Path]
    run_id: str | None = None
    experiment_id: str | None = None
    offset: int = 0
    tried: bool = False
    done: bool = False
    refused: bool = False
    uri: str | None = None
    experiment: str | None = None
    signature: str | None = None
    dashboard: str | None = None
    sending_file: bool = False
    outage: str | None = None
    outage_since: float | None = None
    refusal: str | None = None
    failure: str | None = None
    first_error: str | None = None
    notices: list[str] = field(default_factory=list)

    def __post_init__(self, journal: Path) -> None:
        self._path = journal.with_suffix(".state")
        self._file = -1

    @property
    def has_lock(self) -> bool:
        """Return whether this object holds the lock, so that no other writer may upload."""
        return self._file >= 0

    def acquire_lock(self) -> bool:
        """Take the lock and read the state; return False while another process holds the lock."""
        if self.has_lock:
            return True
        # The journal and its state may name a store by a URI with a password: 0o600.
        file = files.open_output(self._path, os.O_RDWR, 0o600)
        # The lock ends with the process, so that a writer that was killed leaves none.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError:
            # A file system without locks. Two writers send the same twice, which changes nothing.
            pass
        self._file = file
        self._load(os.pread(file, journals.STATE_FILE_BYTES, 0))
        return True

    def read(self) -> bool:
        """Read the state without the lock; return False where no whole state is in the file."""
        with suppress(OSError), self._open_to_read() as file:
            return self._load(os.pread(file.fileno(), journals.STATE_FILE_BYTES, 0))
        return False

    def is_locked(self) -> bool:
        """Return whether another process holds the lock."""
        # An error of another kind: there is no file, or its file system has no locks.
        with suppress(OSError), self._open_to_read() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _open_to_read(self) -> IO[bytes]:
        # A stranger's folder may hold a pipe of this name, at which the reader must not wait, or a
        # link.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        return os.fdopen(os.open(self._path, flags), "rb")

    def save(self, **changes: Any) -> None:
        """Change fields and write the file."""
        for name, value in changes.items():
            setattr(self, name, _shorten(value) if name in _TEXTS else value)
        # Padded to the fixed size: nothing of a longer text remains, and a full disk has the room.
        text = json.dumps(self.as_dict()).ljust(journals.STATE_FILE_BYTES - 1) + "\n"
        os.pwrite(self._file, text.encode(), 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that the file holds."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def change_store(self, uri: str, experiment: str | None) -> None:
        """Have the journal uploaded to another store or experiment, from its beginning."""
        # The ids belong to the store before, and a run is not split between two stores.
        self.save(
            uri=uri,
            experiment=experiment,
            run_id=None,
            experiment_id=None,
            offset=0,
            tried=False,
            done=False,
            signature=signature.sign(STORE_SIGNATURE_PURPOSE, uri),
        )

    def forget_troubles(self) -> None:
        """Clear what an earlier writer said about its attempts, before a new attempt."""
        self.save(
            refused=False,
            refusal=None,
            failure=None,
            first_error=None,
            outage=None,
            outage_since=None,
            sending_file=False,
        )

    def save_outage(self, cause: str) -> None:
        """Save why the store does not answer, unless another writer has the journal."""
        if not self.has_lock:
            return
        since = self.outage_since or time.time()
        with suppress(OSError):  # the disk of this file may be what fails
            self.save(outage=cause, outage_since=since, sending_file=False)

    def clear_outage(self) -> None:
        """Save that the store answers again."""
        if self.has_lock and self.outage is not None:
            with suppress(OSError):
                self.save(outage=None, outage_since=None)

    def save_error(self, text: str) -> None:
        """Save why a part of the record was skipped; later parts have the same reason as a rule."""
        if self.first_error is None:
            self.save(first_error=text)

    def add_notice(self, text: str) -> None:
        """Add a text that the trainer shows once; beyond a few, further ones are left out."""
        if len(self.notices) < _MAX_NOTICES:
            self.save(notices=[*self.notices, _shorten(text)])

    def release_lock(self) -> None:
        """Release the lock, so that another writer may upload the journal."""
        if self.has_lock:
            os.close(self._file)
            self._file = -1

    def _load(self, data: bytes) -> bool:
        """Take the fields that a file holds; return False where it holds no whole state."""
        try:
            content = json.loads(data)
        except ValueError:
            # New, or damaged by a power cut. Starting again doubles no point; a run that may exist
            # is looked up by its tag.
            self.tried = bool(data.strip(b"\0 \n"))
            return False
        for each in fields(self):
            if isinstance(content, dict) and each.name in content:
                setattr(self, each.name, content[each.name])
        return True


def _shorten(text: str | None) -> str | None:
    """Return a text cut to the bytes that the file has for it, as JSON with ASCII alone."""
    if text is None:
        return None
    while len(json.dumps(text)) > _TEXT_BYTES:
        text = text[: 9 * len(text) // 10 - 1] + "…"
    return text


def read_state(journal: Path) -> UploadState:
    """Return the state in a journal's state file; an empty one where no whole state is there."""
    state = UploadState(journal)
    state.read()
    return state


def journal_state(journal: Path) -> str:
    """Return the state of a journal's upload.

    Returns:
        "stored": nothing is missing in the store. "training": the process that writes it runs.
        "sending": a writer is uploading it. "refused": its store has refused the run. "pending":
        none of these, so it waits to be uploaded.
    """
    state = read_state(journal)
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
    progress = read_state(path)
    if isinstance(progress.uri, str):
        # The journal was moved: the state names its store, and its start the one before.
        uri = progress.uri
        signed = progress.signature
    else:
        uri = start.get("uri")
        signed = start.get("signature")
    if not isinstance(uri, str) or not uri:
        return None
    experiment = progress.experiment or start.get("experiment")
    return JournalStore(
        path,
        uri,
        progress.run_id if isinstance(progress.run_id, str) else None,
        experiment if isinstance(experiment, str) else None,
        signature.is_signed(STORE_SIGNATURE_PURPOSE, uri, signed),
        progress.done,
    )


class JournalStatus:
    """One journal's upload, as last read from its state file.

    Args:
        journal: its path.

    Attributes:
        state: the writer's state as last read.
        progress_at: time.monotonic() of the last sign of progress.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.state = UploadState(journal)
        self.progress_at = time.monotonic()
        self._outage_shown = False
        self._error_shown = False
        self._notices_shown = 0

    @property
    def is_closed(self) -> bool:
        """Return whether the writer has finished with the journal: stored it, or given it up."""
        return self.state.done or bool(self.state.refusal or self.state.failure)

    def refresh(self) -> None:
        """Read the state file again."""
        before = self.state
        state = UploadState(self.journal)
        if not state.read():
            return
        self.state = state
        if (state.offset, state.run_id) != (before.offset, before.run_id) or self.is_closed:
            self.progress_at = time.monotonic()

    def warn(self) -> None:
        """Show the user what is new in the state; a refusal is the tracker's to report."""
        state = self.state
        for notice in state.notices[self._notices_shown :]:
            log.warning(notice)
        self._notices_shown = len(state.notices)
        if state.first_error and not self._error_shown:
            self._error_shown = True
            log.warning("%s The records are kept in %s.", state.first_error, self.journal)
        if state.outage is None:
            if self._outage_shown:
                self._outage_shown = False
                log.warning("The tracking store answers again; the records kept meanwhile follow.")
            return
        seconds = time.time() - (state.outage_since or time.time())
        if seconds > OUTAGE_SECONDS and not self._outage_shown:
            self._outage_shown = True
            log.warning(
                "No answer from the tracking store for %d s: %s. Training continues; the records "
                "are kept in %s and are uploaded when the store answers. What is missing when the "
                "run has ended, `python -m runner sync` uploads.",
                seconds,
                state.outage,
                self.journal,
            )

    def wait(
        self,
        patience: float,
        stopped: Callable[[], bool],
        store: str,
        keep_writer_alive: Callable[[], str | None],
    ) -> bool:
        """Wait until the journal is stored; announce it if that takes long.

        Gives up after `patience` seconds without progress, or thirty times as many while a file is
        being uploaded; after a few seconds once the run is asked to stop.

        Args:
            patience: seconds; 0 does not wait.
            stopped: returns whether the run was asked to stop; called repeatedly.
            store: the store's name in the announcement.
            keep_writer_alive: restarts a dead writer, and returns why no writer runs any more;
                called repeatedly.

        Returns:
            Whether everything is stored.
        """
        global _last_wait_failed
        # The runs of one process must not all wait for a server that is gone.
        patience = min(patience, _RETRY_SECONDS) if _last_wait_failed else patience
        started_at = self.progress_at = time.monotonic()
        stop_deadline = float("inf")
        is_announced = False
        while True:
            failure = keep_writer_alive()
            self.refresh()
            if self.is_closed or failure:
                break
            now = time.monotonic()
            if stopped():
                stop_deadline = min(stop_deadline, now + min(patience, _STOPPED_SECONDS))
            longest = patience * (_FILE_PATIENCE_FACTOR if self.state.sending_file else 1)
            if now >= min(stop_deadline, self.progress_at + longest):
                break
            if not is_announced and now - started_at > _SILENT_SECONDS:
                is_announced = True
                # A notebook shows stderr as an error.
                say = print if terminal.in_notebook() else log.warning
                say(self.waiting_message(store, patience))
            time.sleep(_POLL_SECONDS)
        self.warn()
        # With patience=0 nothing was waited for, so nothing failed.
        _last_wait_failed = patience > 0 and not self.is_closed
        return self.state.done

    def waiting_message(self, store: str, patience: float) -> str:
        """Return the message shown while the end of a run waits for its upload."""
        if self.state.outage:
            return (
                f"Uploading the last records to {store}: no answer yet ({self.state.outage}). "
                f"Gives up after {patience:.0f} s without one; `python -m runner sync` then "
                "uploads the rest."
            )
        percent = 100 * self.state.offset // max(1, self.journal.stat().st_size)
        progress = f" ({percent} % done)" if percent else ""
        return f"Uploading the last records to {store}{progress} ..."
