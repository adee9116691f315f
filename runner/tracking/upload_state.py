"""The upload state of a journal: which run of the store it is, and up to where it is stored.

Fourth stage of the way that runner/tracking/__init__.py describes, and the only way back: the
writer saves the state after each answer of the store; the trainer, sweeps, `runner sync`, resume
and reports read it.
"""

import fcntl
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from runner.core import files, journals, signature

STORE_SIGNATURE_PURPOSE = "store"
"""Purpose of the signature of a store's URI, in a journal and in its state."""
_TEXT_BYTES = 500
"""Upper bound on each text for the user, so that all fields fit into the file."""
_TEXTS = ("outage", "refusal", "failure", "first_error")
_MAX_NOTICES = 3
_MAX_CAUSE_CHARACTERS = 400


class RefusedError(Exception):
    """The store refuses a call; a retry would get the same answer.

    Args:
        message: for the log and the user.
        of_store: the store, or a gateway before it, would refuse any call: a password is wrong.
    """

    def __init__(self, message: str, of_store: bool = False) -> None:
        super().__init__(message)
        self.of_store = of_store


class UnreachableError(Exception):
    """The store cannot answer now.

    Args:
        message: for the log and the user.
        doubtful: the answer may also be a refusal. A server whose connection pool is used up
            answers BAD_REQUEST.
    """

    def __init__(self, message: str, doubtful: bool = False) -> None:
        super().__init__(message)
        self.doubtful = doubtful


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


def stored_run_id(journal: Path) -> str | None:
    """Return the store's id of a journal's run; None if the store never opened it."""
    state = UploadState(journal)
    state.read()
    return state.run_id


def short_cause(message: str) -> str:
    """Return the operating system's error in a message, else its first line, without the SQL.

    A store's error is often a long chain of connection errors.
    """
    error = re.search(r"\[Errno -?\d+\] [\w ]+", message)
    if error:
        return error.group()
    certificate = re.search(r"certificate verify failed[^('\"]*", message)
    if certificate:
        remedy = "type MLFLOW_TRACKING_SERVER_CERT_PATH=<file of the server's certificate>"
        return f"{certificate.group().strip()}; {remedy}"
    # SQLAlchemy puts the statement and its values on the lines after the first.
    return message.partition("\n")[0][:_MAX_CAUSE_CHARACTERS]
