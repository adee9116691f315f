"""Read and write advise.json: what a command with mode=advise asked for and learned.

The report is made from this file and the trials' results. Its field names are keys of the file.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from runner.core import files, layout, metric_names
from runner.sweeps.verdict.compare import BASELINE
from runner.sweeps.verdict.statistics import Tolerance

TIMEOUT_TIME_RATIO = 4
"""Time limit of a trial over the time that the baseline takes."""
TIMEOUT_WORDS = "more than four times"
"""TIMEOUT_TIME_RATIO in a sentence."""
EMULATED_STEP_TIME_RATIO = 5.0
"""Expected step time of an emulated precision over the baseline's."""


@dataclass(frozen=True)
class AdviseRequest:
    """Settings of a command with mode=advise or mode=gate, and what it measured besides its trials.

    The names of its fields are the keys of advise.json.

    Attributes:
        objective: time, memory or quality.
        tolerance: accepted loss above the baseline's, in standard deviations of that one between
            seeds.
        steps: of each trial.
        seconds: time limit of a trial.
        seeds: number of trials of each precision.
        budget: as it was typed.
        command: words of the command, without precision and mode, that trains the config.
        emulated: precisions that this machine emulates, whose speed is unknown.
        overrides: further overrides of each precision that has some.
        unavailable: precisions that this machine lacks, with the reason.
        diagnoses: what float32's numbers say of each precision that fails.
        memory: forecast for each precision that trains as well: peak_mib, at the peak of a step,
            and largest_batch, the largest batch size that fits, 0 if it is unknown.
        busy: share of the processors that other programs kept busy while the baseline was timed,
            0 to 1.
        metric: that precisions are judged by: val/loss, or the one that task.quality names.
        direction: max where more of it is better, else min.
        mode: advise or gate.
        baseline: the precision that others are compared with.
        max_gap: accepted loss above the baseline's, in its unit; None accepts what tolerance says.
        recorded: results of the run or sweep that advise.baseline names, as their files hold them.
        recorded_in: what advise.baseline names; empty for a precision.
    """

    objective: str
    tolerance: float
    steps: int
    seconds: int
    seeds: int
    budget: str
    command: Sequence[str]
    emulated: Sequence[str] = field(default_factory=list)
    overrides: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)
    diagnoses: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    busy: float = 0.0
    metric: str = metric_names.VAL_LOSS
    direction: Literal["max", "min"] = "min"
    mode: Literal["advise", "gate"] = "advise"
    baseline: str = BASELINE
    max_gap: float | None = None
    recorded: Sequence[Mapping[str, Any]] = field(default_factory=list)
    recorded_in: str = ""

    @property
    def sign(self) -> int:
        """Return -1 where more of the metric is better, else 1: a loss is the metric times it."""
        return 1 if self.direction == "min" else -1

    @property
    def noun(self) -> str:
        """Return what precisions are judged by, in words."""
        return "loss" if self.metric == metric_names.VAL_LOSS else self.metric

    @property
    def accepted(self) -> Tolerance:
        """Return the accepted loss above the baseline's."""
        return Tolerance(self.tolerance, self.max_gap)

    def judged_loss(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric of a trial, negated where more of it is better; None without it."""
        value = metrics.get(self.metric)
        return None if value is None else self.sign * value

    def length_overrides(self, precision: str) -> list[str]:
        """Return the overrides that set the length of a precision's trial."""
        seconds = self.seconds
        if precision in self.emulated:
            # Emulation is slow by itself, which is no reason to call the precision too slow.
            seconds = math.ceil(EMULATED_STEP_TIME_RATIO * seconds)
        return [
            f"train.max_steps={self.steps}",
            # One evaluation, at the end: precisions are judged by its loss.
            f"train.eval_every={self.steps}",
            f"train.max_seconds={seconds}",
            # Losses after unequal numbers of steps could not be compared.
            "train.early_stop=null",
        ]

    @classmethod
    def from_json(cls, values: object) -> "AdviseRequest | None":
        """Return the settings that parsed JSON holds, None if it does not hold settings.

        Args:
            values: content of advise.json.
        """
        with suppress(ValueError):
            return cls(**files.dataclass_fields_from_json(cls, values))
        return None

    @classmethod
    def read(cls, folder: Path) -> "AdviseRequest | None":
        """Return the settings in a sweep's folder, None for a sweep of another mode."""
        # A report of a sweep is made even where its advise.json is damaged.
        with suppress(OSError, ValueError):
            return cls.from_json(files.read_json(folder / layout.ADVICE))
        return None

    def write(self, folder: Path) -> None:
        """Write the settings to a sweep's folder, atomically and without secrets.

        Raises:
            OSError: the file cannot be written.
        """
        files.write_json(folder / layout.ADVICE, asdict(self))
