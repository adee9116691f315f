"""Read and write sweep.json, the file that says what a sweep was asked for and how far it got."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runner.core import ConfigError, files, layout, secrets, signature

_WORD_LIST_KEYS = ("command", "overrides", "left_out")


@dataclass(frozen=True)
class Manifest:
    """The command of a sweep, and how far the sweep got.

    Attributes:
        id: tag under which the store finds the sweep's jobs.
        command: words of the command line.
        overrides: words of the command that Hydra composes the jobs from.
        cwd: the working directory of the command.
        began_ms: Unix time in milliseconds.
        jobs: number of jobs; 0 where the launcher does not say.
        jobs_at_once: how many of them run at the same time; 0 where that is not known.
        max_trials: largest number of trials of mode=advise and mode=gate; 0 where it is not known.
        budget_end_ms: when the budget of these modes ends, Unix time in milliseconds.
        finished: no job needs to run again.
        busy: share of the processors that other programs kept busy meanwhile, 0 to 1; 0 where other
            machines run the jobs.
        left_out: `<precision> <key>` for each key under precision that the command sets and that
            one of its precisions does not take; jobs of that precision run without it.
        tolerance: advise.tolerance, see Tolerance.
        max_gap: advise.max_gap.
        signature: of the command and its working directory, with the key of the user who typed it.
    """

    id: str
    command: Sequence[str]
    overrides: Sequence[str] = ()
    cwd: str = "."
    began_ms: int = 0
    jobs: int = 0
    jobs_at_once: int = 0
    max_trials: int = 0
    budget_end_ms: int = 0
    finished: bool = False
    busy: float = 0.0
    left_out: Sequence[str] = ()
    tolerance: float = 1.0
    max_gap: float | None = None
    signature: str = ""

    def signed(self) -> "Manifest":
        """Return the manifest of a command that this user has typed, with its signature."""
        return replace(self, signature=signature.sign(layout.MANIFEST, self._signed_text))

    @property
    def is_signed_by_user(self) -> bool:
        """Return whether this user has typed the command, in the manifest's working directory."""
        return signature.is_signed(layout.MANIFEST, self._signed_text, self.signature)

    @property
    def _signed_text(self) -> str:
        # As the file holds it, without secrets. Relative paths of the command, as that of
        # --config-dir, are read from the directory.
        return json.dumps(secrets.redact_values([self.cwd, *self.command]))

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a sweep's folder.

        Raises:
            ConfigError: the folder holds none, or a damaged one.
        """
        path = folder / layout.MANIFEST
        if not path.is_file():
            raise ConfigError(f"{folder} is not a sweep: it holds no {layout.MANIFEST}.")
        try:
            values = files.dataclass_fields_from_json(cls, files.read_json(path))
            for key in _WORD_LIST_KEYS:
                values[key] = [str(word) for word in values.get(key, ())]
            return cls(**values)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error

    def write(self, folder: Path) -> None:
        """Write the manifest to a sweep's folder, atomically and without secrets.

        Raises:
            OSError: the file cannot be written.
        """
        files.write_json(folder / layout.MANIFEST, asdict(self))
