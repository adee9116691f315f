"""How far a journal has come on its way to the store; kept beside the journal."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from runner.config.signature import sign

SIZE = 4096
SIGNED = "store"
"""Purpose of the signature of a store's URI, in a journal and in its state."""
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
    """The run's ids and the offset up to which the journal is stored, in `<journal>.state`.

    The offset moves only after the store has answered, so a writer that starts over sends a batch
    twice at most, which changes nothing. The file is locked: one writer per journal.
    """

    def __init__(self, journal: Path) -> None:
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self.offset = 0
        self.tried = False
        """A run may exist in the store although its id is not known here."""
        self.done = False
        self.refused = False
        """The store did not take the run when it was last asked."""
        self.uri: str | None = None
        """Store and experiment that the journal was moved to; None: what its start says."""
        self.experiment: str | None = None
        self.signature: str | None = None
        """Of uri; see runner.config.signature."""
        self._path = journal.with_suffix(".state")
        self._file = -1

    @property
    def held(self) -> bool:
        """Whether no one else may work on the journal."""
        return self._file >= 0

    def claim(self) -> bool:
        """Takes the lock and reads what an earlier writer left; False while another holds it."""
        if self.held:
            return True
        file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError:  # a file system without locks
            pass
        self._file = file
        self._load(os.pread(file, SIZE, 0))
        return True

    def peek(self) -> bool:
        """Reads what there is without the lock; whether another process holds it."""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            self._load(os.pread(file, SIZE, 0))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
        finally:
            os.close(file)
        return False

    def save(self, **changes: Any) -> None:
        """Changes fields and writes them. The size is fixed: no rest of a longer text remains, and
        a disk that is full has the room already."""
        for name, value in changes.items():
            setattr(self, name, value)
        os.pwrite(self._file, json.dumps(self.fields()).ljust(SIZE - 1).encode() + b"\n", 0)

    def fields(self) -> dict[str, Any]:
        """What is kept."""
        return {name: getattr(self, name) for name in _FIELDS}

    def move(self, uri: str, experiment: str | None) -> None:
        """From now on the journal goes to another store, from its beginning."""
        self.save(
            uri=uri,
            experiment=experiment,
            run_id=None,
            experiment_id=None,
            offset=0,
            tried=False,
            signature=sign(SIGNED, uri),
        )

    def release(self) -> None:
        """Lets another writer take over."""
        if self.held:
            os.close(self._file)
            self._file = -1

    def _load(self, data: bytes) -> None:
        try:
            fields = json.loads(data)
        except ValueError:  # new, or torn by a power cut: start over, points are not doubled
            self.tried = bool(data.strip(b"\0 \n"))
            return
        for name in _FIELDS:
            if isinstance(fields, dict) and name in fields:
                setattr(self, name, fields[name])


def stored_run_id(journal: Path) -> str | None:
    """The store's id of a journal's run; None where it never became one."""
    progress = UploadState(journal)
    progress.peek()
    return progress.run_id
