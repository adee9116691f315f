"""How far a journal has come on its way to the store; kept beside the journal."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

_SIZE = 512


class Progress:
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
        self._path = journal.with_suffix(".state")
        self._file = -1

    def claim(self) -> bool:
        """Takes the lock and reads what an earlier writer left; False while another holds it."""
        if self._file >= 0:
            return True
        file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        self._load(os.pread(file, _SIZE, 0))
        return True

    def save(self, **changes: Any) -> None:
        """Changes fields and writes them. The size is fixed: no rest of a longer text remains."""
        for name, value in changes.items():
            setattr(self, name, value)
        fields = {
            "run_id": self.run_id,
            "experiment_id": self.experiment_id,
            "offset": self.offset,
            "tried": self.tried,
            "done": self.done,
        }
        os.pwrite(self._file, json.dumps(fields).ljust(_SIZE - 1).encode() + b"\n", 0)

    def release(self) -> None:
        """Lets another writer take over."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _load(self, data: bytes) -> None:
        try:
            fields = json.loads(data)
        except ValueError:  # new, or torn by a power cut: start over, points are not doubled
            self.tried = bool(data.strip())
            return
        for name, value in fields.items():
            setattr(self, name, value)
