"""Status, metric records and their JSON, as journals and files of a run hold them."""

import json
from collections.abc import Callable, Mapping
from typing import Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]


StopRequested = Callable[[], bool]
"""Returns whether the run was asked to stop."""


MetricRecord = tuple[int, int, Mapping[str, float]]
"""(step, Unix time in milliseconds, values by metric name)."""


NOTE_TAG = "mlflow.note.content"
"""The tag whose text MLflow shows as a run's or an experiment's description."""


# Made once: json.dumps makes an encoder for each call. default=float takes what is not a plain
# number but converts to one (numpy.float32).
encode_json = json.JSONEncoder(separators=(",", ":"), default=float).encode


def metrics_line(step: int, time_ms: int, values: Mapping[str, float]) -> str:
    """Return the line of a metric record in a journal and in METRICS."""
    # Formatted by hand, because a training step waits for it: only the values need an encoder.
    return f'{{"kind":"metrics","step":{step},"time":{time_ms},"values":{encode_json(values)}}}\n'
