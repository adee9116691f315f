"""What a command with mode=advise asked, and what it learned beside its trials."""

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
    """What was asked.

    Attributes:
        objective: time, memory or quality.
        tolerance: in standard deviations of 32-true's loss between seeds.
        steps: of each trial.
        seconds: after which a trial is cut.
        seeds: that were asked for.
        budget: as it was typed.
        command: words of the command, without precision and mode, that trains the config.
        emulated: precisions whose arithmetic is imitated here, which tells nothing of speed.
        own: further words of a precision, as `float8-rowwise precision.emulate=true`.
        absent: precisions that this machine lacks, as `tf32: why`.
        found: what float32's numbers say of a precision that fails, as `16-mixed: what`.
        memory: predicted of a precision, as `16-mixed: <MiB at the peak> <largest batch>`.
        busy: share of the processors that other programs kept busy when it began.
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

    def told(self, precision: str) -> str:
        """What was found of a precision."""
        return _of(precision, self.found)

    def predicted(self, precision: str) -> tuple[float, int] | None:
        """MiB at the peak, and the largest batch that fits (0: unknown)."""
        with suppress(ValueError):
            peak, batch = _of(precision, self.memory).split()
            return float(peak), int(batch)
        return None

    @classmethod
    def of(cls, values: object) -> "AdviseSettings | None":
        """From what was written; None where nothing that fits was."""
        try:
            found: dict[str, Any] = dataclass_fields_from_json(cls, values)
            lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
            return cls(**{**found, **lists})
        except ValueError:
            return None

    @classmethod
    def read(cls, folder: Path) -> "AdviseSettings | None":
        """That of a sweep's folder; None where it asked nothing."""
        with suppress(OSError, ValueError):
            return cls.of(json.loads((folder / ADVICE).read_text()))
        return None

    def write(self, folder: Path) -> None:
        """Whole or not at all, without secrets. Raises OSError."""
        write_text(folder / ADVICE, json.dumps(redact_values(asdict(self)), indent=2) + "\n")


def _of(precision: str, texts: Sequence[str]) -> str:
    start = f"{precision}: "
    return next((text[len(start) :] for text in texts if text.startswith(start)), "")
