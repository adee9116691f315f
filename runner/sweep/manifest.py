"""What a sweep leaves of itself in its folder: the file sweep.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.config.targets import dataclass_fields_from_json
from runner.utils.errors import ConfigError
from runner.utils.files import write_text
from runner.utils.layout import MANIFEST
from runner.utils.secrets import redact_values

_WORDS = ("command", "overrides", "left_out")


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
        left_out: `<precision> <key>` for each key under precision that the command sets and that
            one of its precisions does not take; jobs of that precision run without it.
    """

    id: str
    command: Sequence[str]
    overrides: Sequence[str] = ()
    cwd: str = "."
    began_ms: int = 0
    jobs: int = 0
    finished: bool = False
    left_out: Sequence[str] = ()

    def keys_left_out(self, precision: str) -> list[str]:
        """Return the keys that jobs of one precision run without."""
        pairs = (text.partition(" ") for text in self.left_out)
        return [key for name, _, key in pairs if name == precision]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises ConfigError where there is none, or a damaged one."""
        path = folder / MANIFEST
        if not path.is_file():
            raise ConfigError(f"{folder} is not a sweep: it holds no {MANIFEST}.")
        try:
            values = dataclass_fields_from_json(cls, json.loads(path.read_text()))
            values |= {key: [str(word) for word in values.get(key, ())] for key in _WORDS}
            return cls(**values)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error

    def write(self, folder: Path) -> None:
        """Whole or not at all, without secrets. Raises OSError."""
        write_text(folder / MANIFEST, json.dumps(redact_values(asdict(self)), indent=2) + "\n")
