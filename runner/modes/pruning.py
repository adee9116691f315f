"""End a job of a sweep early whose evaluations are worse than those of the sweep's other jobs.

Every job writes its evaluations to a file in its folder. At each evaluation a job reads the files
of the jobs beside it, and asks a pruner of Optuna's.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.config.invocation import Invocation
from runner.config.overrides import override_key
from runner.training.callbacks.callback import Callback
from runner.training.records import EvalRecord
from runner.utils.files import read_json, write_json
from runner.utils.import_warnings import suppress_import_warnings
from runner.utils.layout import EVALUATIONS, RESULT

MIN_JOBS = 3
"""Complete jobs that must have an evaluation at the step before any job is pruned."""
MIN_EVALUATIONS = 2
"""The first evaluation of a job prunes nothing: a small learning rate begins slowly."""


class Pruning(Callback):
    """Sets should_stop once the quality is worse than the median of other jobs at the same step.

    A job is compared with jobs of its own precision that differ in another key than the seed.

    Args:
        folder: of the job; the folders beside it are the sweep's other jobs.
        origin: of the job.
        quality: name of the metric that jobs are compared by.
        direction: "max" if more of it is better, otherwise "min".
        steps: optimizer steps of the whole training; the last evaluation prunes nothing.
    """

    key = "pruning"

    def __init__(
        self, folder: Path, origin: Invocation, quality: str, direction: str, steps: int
    ) -> None:
        self.should_stop = False
        self._folder = folder
        self._quality = quality
        self._direction = direction
        self._steps = steps
        self._precision = origin.choices.get("precision", "")
        self._sweep = origin.sweep
        self._settings = _settings(origin)
        self._values: dict[int, float] = {}

    def evaluation(self, record: EvalRecord) -> None:
        quality = record.metrics[self._quality]
        self._values[record.step] = quality
        content = {
            "sweep": self._sweep,
            "precision": self._precision,
            "settings": self._settings,
            "quality": self._quality,
            "values": [[step, value] for step, value in self._values.items()],
        }
        # Without the file this job is compared with others, and no other with it.
        with suppress(OSError):
            write_json(self._folder / EVALUATIONS, content)
        is_late_enough = len(self._values) >= MIN_EVALUATIONS
        # A quality that is not finite is the guard's to judge.
        if is_late_enough and record.step < self._steps and math.isfinite(quality):
            self.should_stop = self._is_worse_than_median()

    def _is_worse_than_median(self) -> bool:
        """Return what Optuna's median rule says of this job's evaluations."""
        with suppress_import_warnings():
            import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = "maximize" if self._direction == "max" else "minimize"
        states = optuna.trial.TrialState
        with warnings.catch_warnings():
            # Optuna 2 calls the functions that make a trial of known values experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(direction=direction)
            for values in self._other_jobs():
                other = optuna.trial.create_trial(
                    state=states.COMPLETE, value=values[max(values)], intermediate_values=values
                )
                study.add_trial(other)
            own = optuna.trial.create_trial(state=states.RUNNING, intermediate_values=self._values)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=MIN_JOBS)
        return pruner.prune(study, own)

    def _other_jobs(self) -> Iterator[dict[int, float]]:
        """Yield the evaluations, by step, of each complete job that this one is compared with."""
        for folder in self._folder.parent.iterdir():
            if folder == self._folder or not folder.name.isdecimal():
                continue
            content = _read_json(folder / EVALUATIONS)
            # A pruned job would drag the median down: only jobs that ran to their end count.
            has_finished = _read_json(folder / RESULT).get("status") == "finished"
            if not has_finished or not self._is_peer(content):
                continue
            with suppress(KeyError, TypeError, ValueError):
                values = {int(step): float(value) for step, value in content["values"]}
                # A diverged job has no rank among numbers, and the rule takes the median at one
                # step: a job without that step says nothing.
                is_finite = all(map(math.isfinite, values.values()))
                if is_finite and max(self._values) in values:
                    yield values

    def _is_peer(self, content: Mapping[str, Any]) -> bool:
        """Return whether a job's evaluations are compared with this one's."""
        # An earlier sweep may have left its jobs in the same folder.
        shared = tuple(content.get(key) for key in ("sweep", "precision", "quality"))
        # Seeds of one group do not prune each other: their spread is what they are for.
        is_other_group = content.get("settings") != self._settings
        return shared == (self._sweep, self._precision, self._quality) and is_other_group

    def state_dict(self) -> dict[str, Any]:
        return {"values": [[step, value] for step, value in self._values.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = {int(step): float(value) for step, value in state.get("values", ())}


def _settings(origin: Invocation) -> list[str]:
    """Return what the sweep varies in a job beside precision and seed."""
    swept = origin.swept_overrides
    return sorted(text for text in swept if override_key(text) not in ("precision", "seed"))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file; empty if it is missing or cannot be read."""
    with suppress(OSError, ValueError):
        content = read_json(path)
        if isinstance(content, dict):
            return content
    return {}
