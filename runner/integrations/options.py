"""Keyword arguments that the callbacks of all trainers take, and their checks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from runner.precision.registry import precision_names
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.errors import ConfigError, refuse

_GROUP_NAME = re.compile(r"\w[\w .-]*")


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
        given = cls(**options)
        steps = "it is a number of steps, 1 or more."
        folder = (
            "it becomes a folder in outputs/groups. Type letters, digits, '-', '_', '.' and "
            "spaces, for example group='digits'."
        )
        quality = f"evaluations are recorded under val/. Type quality='val/{given.quality}'."
        place = "its folder is there, which folder= contradicts. Leave one of them out."
        allowed_names = f"allowed are {', '.join(precision_names())}."
        measures = given.numerics_every is not None
        rules = (
            ("log_every", _is_count(given.log_every), steps),
            ("numerics_every", not measures or _is_count(given.numerics_every), steps),
            ("expected", given.expected in (None, *precision_names()), allowed_names),
            ("quality", given.quality.startswith("val/"), quality),
            ("direction", given.direction in ("max", "min"), "allowed are 'max' and 'min'."),
            ("group", given.group is None or _GROUP_NAME.fullmatch(given.group), folder),
            ("group", given.group is None or given.folder is None, place),
        )
        refuse(
            f"{owner}({key}={getattr(given, key)!r}): {remedy}"
            for key, fits, remedy in rules
            if not fits
        )
        return given


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
