"""What a sweep leaves of itself in its folder: the file sweep.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.config import known
from runner.errors import ConfigError
from runner.files import write_text
from runner.secrets import masked

FILE = "sweep.json"
_WORDS = ("command", "overrides")


@dataclass(frozen=True)
class Manifest:
    """A sweep as it was asked for.

    Attributes:
        id: under which its jobs are found in the store.
        command: its words.
        overrides: those of its words that Hydra composes the jobs from.
        cwd: the folder that the command was typed in.
        began_ms: Unix time in milliseconds.
        jobs: how many it asks for; 0 where the launcher does not say.
        finished: every job came to an end that need not be tried again.
    """

    id: str
    command: Sequence[str]
    overrides: Sequence[str] = ()
    cwd: str = "."
    began_ms: int = 0
    jobs: int = 0
    finished: bool = False

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises ConfigError where there is none, or a damaged one."""
        path = folder / FILE
        if not path.is_file():
            raise ConfigError(f"{folder} is not a sweep: it holds no {FILE}.")
        try:
            values = known(cls, json.loads(path.read_text()))
            values |= {key: [str(word) for word in values.get(key, ())] for key in _WORDS}
            return cls(**values)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error

    def write(self, folder: Path) -> None:
        """Whole or not at all, without secrets. Raises OSError."""
        write_text(folder / FILE, json.dumps(masked(asdict(self)), indent=2) + "\n")
