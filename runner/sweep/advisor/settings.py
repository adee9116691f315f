"""Read and write advise.json: what a command with mode=advise asked for and learned.

The report is made from this file and the trials' results. Its field names are keys of the file.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.config.targets import dataclass_fields_from_json
from runner.utils.files import write_text
from runner.utils.layout import ADVICE
from runner.utils.secrets import redact_values


@dataclass(frozen=True)
class AdviseSettings:
    """Settings of a command with mode=advise, and what it measured besides its trials.

    The names of its fields are the keys of advise.json, which older reports hold as well.

    Attributes:
        objective: time, memory or quality.
        tolerance: accepted loss above 32-true's, in standard deviations of that one between seeds.
        steps: of each trial.
        seconds: time limit of a trial.
        seeds: number of trials of each precision.
        budget: as it was typed.
        command: words of the command, without precision and mode, that trains the config.
        emulated: precisions that this machine emulates, whose speed is unknown.
        own: further overrides of a precision, as `float8-rowwise precision.emulate=true`.
        absent: precisions that this machine lacks, as `tf32: <reason>`.
        found: what float32's numbers say of a precision that fails, as `16-mixed: text`.
        memory: forecast for a precision, as `16-mixed: <MiB at the peak> <largest batch>`.
        busy: share of the processors that other programs kept busy when the command began, 0 to 1.
    """

    objective: str
    tolerance: float
    steps: int
    seconds: int
    seeds: int
    budget: str
    command: Sequence[str]
    emulated: Sequence[str] = ()
    own: Sequence[str] = ()
    absent: Sequence[str] = ()
    found: Sequence[str] = ()
    memory: Sequence[str] = ()
    busy: float = 0.0

    def float32_finding(self, precision: str) -> str:
        """Return what float32's numbers say of a precision, empty if it was not diagnosed."""
        return _text_after(precision, self.found)

    def memory_forecast(self, precision: str) -> tuple[float, int] | None:
        """Return a precision's forecast memory, None without a forecast.

        Returns:
            MiB at the peak, and the largest batch size that fits (0: unknown).
        """
        # A precision without a forecast has an empty text, which splits into no two words.
        with suppress(ValueError):
            peak, batch = _text_after(precision, self.memory).split()
            return float(peak), int(batch)
        return None

    @classmethod
    def from_json(cls, values: object) -> "AdviseSettings | None":
        """Return the settings that parsed JSON holds, None if it does not hold settings.

        Args:
            values: content of advise.json.
        """
        try:
            fields: dict[str, Any] = dataclass_fields_from_json(cls, values)
        except ValueError:
            return None
        # JSON has lists only; tuples keep settings equal to those that were written.
        tuples = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **tuples})

    @classmethod
    def read(cls, folder: Path) -> "AdviseSettings | None":
        """Return the settings in a sweep's folder, None for a sweep of another mode."""
        # A report of a sweep is made even where its advise.json is damaged.
        with suppress(OSError, ValueError):
            return cls.from_json(json.loads((folder / ADVICE).read_text()))
        return None

    def write(self, folder: Path) -> None:
        """Write the settings to a sweep's folder, atomically and without secrets.

        Raises:
            OSError: the file cannot be written.
        """
        # The words of the command may hold a password, as a tracking URI does.
        content = redact_values(asdict(self))
        write_text(folder / ADVICE, json.dumps(content, indent=2) + "\n")


def _text_after(precision: str, texts: Sequence[str]) -> str:
    """Return what follows `<precision>: ` in the first text that begins so, else an empty text."""
    start = f"{precision}: "
    for text in texts:
        if text.startswith(start):
            return text.removeprefix(start)
    return ""
