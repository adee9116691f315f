"""The upload state of a journal: which run of the store it is, and up to where it is stored.

Fourth stage of the way that runner/tracking/__init__.py describes. The writer saves the state
after each answer of the store; `runner sync`, resume and reports read it.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from runner.config.signature import sign

STATE_FILE_BYTES = 4096
"""Bytes of the file; fixed, so that the journal can reserve them before the disk is full."""
STORE_SIGNATURE_PURPOSE = "store"
"""Purpose of the signature of a store's URI, in a journal and in its state."""
# The keys of the file. Attributes have the same names.
_FIELDS = (
    "run_id",
    "experiment_id",
    "offset",
    "tried",
    "done",
    "refused",
    "uri",
    "experiment",
    "signature",
)


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
        signature: of `uri`, see runner.config.signature.
    """

    def __init__(self, journal: Path) -> None:
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self.offset = 0
        self.tried = False
        self.done = False
        self.refused = False
        self.uri: str | None = None
        self.experiment: str | None = None
        self.signature: str | None = None
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
        file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
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
        self._load(os.pread(file, STATE_FILE_BYTES, 0))
        return True

    def read_without_lock(self) -> bool:
        """Read the state without the lock; return whether another process holds the lock."""
        # O_NONBLOCK: a pipe of this name, in a stranger's folder, must not stop the reader.
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            self._load(os.pread(file, STATE_FILE_BYTES, 0))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
        finally:
            os.close(file)
        return False

    def save(self, **changes: Any) -> None:
        """Change fields and write the file."""
        for name, value in changes.items():
            setattr(self, name, value)
        # Padded to the fixed size: nothing of a longer text remains, and a full disk has the room.
        text = json.dumps(self.as_dict()).ljust(STATE_FILE_BYTES - 1) + "\n"
        os.pwrite(self._file, text.encode(), 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that the file holds."""
        return {name: getattr(self, name) for name in _FIELDS}

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
            signature=sign(STORE_SIGNATURE_PURPOSE, uri),
        )

    def release_lock(self) -> None:
        """Release the lock, so that another writer may upload the journal."""
        if self.has_lock:
            os.close(self._file)
            self._file = -1

    def _load(self, data: bytes) -> None:
        try:
            fields = json.loads(data)
        except ValueError:
            # New, or damaged by a power cut. Starting again doubles no point; a run that may exist
            # is looked up by its tag.
            self.tried = bool(data.strip(b"\0 \n"))
            return
        for name in _FIELDS:
            if isinstance(fields, dict) and name in fields:
                setattr(self, name, fields[name])


def stored_run_id(journal: Path) -> str | None:
    """Return the store's id of a journal's run; None if the store never opened it."""
    state = UploadState(journal)
    state.read_without_lock()
    return state.run_id
