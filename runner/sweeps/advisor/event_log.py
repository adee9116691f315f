"""Write the events of mode=gate as lines that tools for MLPerf logs read.

A line is `:::MLLOG` and a JSON object with the keys of MLPerf's logging library: namespace,
time_ms, event_type, key, value, metadata
(https://github.com/mlcommons/logging/blob/master/mlperf_logging/mllog/README.md).
"""

import json
from pathlib import Path
from typing import Any, Literal

from runner.modes.result import RunResult
from runner.sweeps.advisor.settings import AdviseSettings
from runner.sweeps.report.sequential_test import Look
from runner.utils.formatting import now_ms

EventType = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]
_PREFIX = ":::MLLOG "


class EventLog:
    """A log of events, to which a resumed command appends.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def start_run(self, settings: AdviseSettings, precision: str) -> None:
        """Log what is asked."""
        self._write("INTERVAL_START", "run_start", None)
        for key, value in (
            ("precision", precision),
            ("baseline", settings.baseline),
            ("quality_metric", settings.metric),
            ("max_gap", settings.max_gap),
            ("tolerance", settings.tolerance),
            ("max_seeds", settings.seeds),
            ("max_steps", settings.steps),
        ):
            self._write("POINT_IN_TIME", key, value)

    def trial(self, result: RunResult, metric: str, is_recorded: bool) -> None:
        """Log the result of a trial.

        Args:
            result: the trial's.
            metric: that precisions are judged by.
            is_recorded: whether it was trained before this command.
        """
        metadata = {
            "precision": result.precision,
            "seed": result.seed,
            "step": result.steps,
            "status": result.outcome,
            "recorded": is_recorded,
        }
        self._write("POINT_IN_TIME", metric, result.metrics.get(metric), **metadata)

    def look(self, look: Look, bar: float) -> None:
        """Log what the test says after a seed."""
        metadata = {"seeds": look.seeds, "half_width": look.half_width, "bar": bar}
        self._write("POINT_IN_TIME", "gap", look.gap, decision=look.decision, **metadata)

    def stop_run(self, decision: str) -> None:
        """Log the answer."""
        status = "success" if decision == "accepted" else "aborted"
        self._write("INTERVAL_END", "run_stop", decision, status=status)

    def _write(self, event: EventType, key: str, value: Any, **metadata: Any) -> None:
        line = {
            "namespace": "",
            "time_ms": now_ms(),
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        with self.path.open("a") as file:
            file.write(_PREFIX + json.dumps(line) + "\n")
