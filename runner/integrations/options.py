"""Keyword arguments that the callbacks of all trainers take, and their checks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from runner.precision.registry import precision_names
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.errors import ConfigError

_GROUP_NAME = re.compile(r"\w[\w .-]*")


class RecordOptions(TypedDict, total=False):
    """Keyword arguments of a callback; RecordSettings says what each means."""

    folder: str | Path | None
    group: str | None
    name: str | None
    expected: str | None
    quality: str
    direction: Literal["max", "min"]
    log_every: int
    numerics_every: int | None
    tracking_uri: str | None
    experiment: str | None
    patience: float


@dataclass(frozen=True)
class RecordSettings:
    """Where and how a training of another trainer is recorded.

    Attributes:
        folder: of the run; None makes outputs/runs/<time>, or a number in the group's folder. One
            that holds a run is continued by a resumed training.
        group: name of a comparison: its runs are the jobs of outputs/groups/<group>.
        name: stands after the precision in tables; None takes the trainer's name. Runs of one
            precision and name count as repetitions.
        expected: the precision that was asked for, where the trainer does not tell; a run in
            another one warns.
        quality: name of the evaluations' metric that runs are compared by.
        direction: "max" where a greater quality is better, "min" where a smaller one is.
        log_every: optimizer steps whose values are copied from the device together.
        numerics_every: optimizer steps between two measurements of all tensors; None measures
            none.
        tracking_uri: MLflow's store; None takes MLFLOW_TRACKING_URI, then
            sqlite:///outputs/mlflow.db.
        experiment: in the store; None takes MLFLOW_EXPERIMENT_NAME, then "precision-runner".
        patience: seconds that the end of a run waits for a store that does not answer.
    """

    folder: str | Path | None = None
    group: str | None = None
    name: str | None = None
    expected: str | None = None
    quality: str = VAL_LOSS
    direction: Literal["max", "min"] = "min"
    log_every: int = 20
    numerics_every: int | None = None
    tracking_uri: str | None = None
    experiment: str | None = None
    patience: float = 60.0

    @classmethod
    def checked(cls, owner: str, options: Mapping[str, Any]) -> "RecordSettings":
        """Return the settings of a callback's keyword arguments.

        Args:
            owner: name of the callback's class, for messages.
            options: the keyword arguments.

        Raises:
            ConfigError: with every problem found.
        """
        allowed = [field.name for field in fields(cls)]
        unknown = [key for key in options if key not in allowed]
        if unknown:
            raise ConfigError(
                f"{owner}({unknown[0]}=...) is not known. Allowed: {', '.join(allowed)}."
            )
        settings = cls(**options)
        problems = []
        for key in ("log_every", "numerics_every"):
            value = getattr(settings, key)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            is_absent = key == "numerics_every" and value is None
            if not (is_count or is_absent):
                problems.append(f"{key}={value!r}): it is a number of steps, 1 or more.")
        if settings.expected is not None and settings.expected not in precision_names():
            names = ", ".join(precision_names())
            problems.append(f"expected={settings.expected!r}): allowed are {names}.")
        if not settings.quality.startswith("val/"):
            problems.append(
                f"quality={settings.quality!r}): evaluations are recorded under val/. Type "
                f"quality='val/{settings.quality}'."
            )
        if settings.direction not in ("max", "min"):
            problems.append(f"direction={settings.direction!r}): allowed are 'max' and 'min'.")
        if settings.group is not None and not _GROUP_NAME.fullmatch(settings.group):
            problems.append(
                f"group={settings.group!r}): it becomes a folder in outputs/groups. Type letters, "
                "digits, '-', '_', '.' and spaces, for example group='digits'."
            )
        if settings.group is not None and settings.folder is not None:
            problems.append(
                f"group={settings.group!r}, folder=...): a run of a group has its folder there. "
                "Leave one of them out."
            )
        if problems:
            raise ConfigError(*(f"{owner}({text}" for text in problems))
        return settings
