"""The metrics that task.metrics adds to a task's own, those of torchmetrics."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.utils.errors import ModelError
from runner.utils.stop_signals import Stopped

Gather = Callable[[Tensor], list[Tensor]]
"""Returns the tensors of all processes, in their order."""


class AddedMetrics:
    """Metrics that are updated with every batch of an evaluation.

    Args:
        metrics: objects of torchmetrics.Metric, by the names under which they are recorded.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = metrics

    def begin(self, device: torch.device, gather: Gather) -> None:
        """Empty the metrics before an evaluation.

        Args:
            device: where they compute.
            gather: joins the states of the processes when the values are computed.
        """
        for metric in self.metrics.values():
            metric.to(device).reset()
            for part in metric.modules():
                if hasattr(part, "dist_sync_fn"):
                    # torchmetrics' own function takes an empty list of a process without examples
                    # for float32 numbers, and the processes would disagree about dtype and shape.
                    part.dist_sync_fn = lambda tensor, group=None: gather(tensor)

    def update(self, predictions: Any, targets: Any) -> None:
        """Add a batch, in float32 or wider.

        Raises:
            ModelError: a metric does not take them.
        """
        predictions = _widened(predictions)
        if isinstance(targets, Tensor) and not targets.numel():
            return  # no label of the batch counts
        given = f"{_described(predictions)} and {_described(targets)}"
        for name, metric in self.metrics.items():
            with _failures_named(name, f" It is given predictions and targets, {given}."):
                metric.update(predictions, _widened(targets))

    def values(self) -> dict[str, float]:
        """Return the values over all processes, which must all call it, by names "val/...".

        A metric of several numbers has a name for each: val/<name>/<index or key>.

        Raises:
            ModelError: a metric fails, or its value is no number.
        """
        numbers: dict[str, float] = {}
        for name, metric in self.metrics.items():
            with _failures_named(name), warnings.catch_warnings():
                if not metric.update_called:
                    # No label counts in this process, of which the metric warns; others may have
                    # some.
                    warnings.simplefilter("ignore")
                value = metric.compute()
            numbers.update(_numbers(f"val/{name}", value))
        return numbers

    def direction(self, metric: str) -> str | None:
        """Return max or min, whichever is better of a recorded metric; None where it says neither.

        Args:
            metric: val/<name>, val/<set>/<name>, or one number of several of it.
        """
        for word in metric.split("/")[1:]:
            higher = getattr(self.metrics.get(word), "higher_is_better", None)
            if higher is not None:
                return "max" if higher else "min"
        return None


def _widened(value: Any) -> Any:
    """Return a tensor of half precision in float32, and anything else as it is."""
    is_half = isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4
    return value.float() if is_half else value


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield each number of a metric's value with its name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, Tensor) and value.ndim:
        for i, item in enumerate(value.cpu()):
            yield from _numbers(f"{name}/{i}", item)
    elif isinstance(value, Tensor | int | float):
        yield name, float(value)
    else:
        short = name.removeprefix("val/")
        raise ModelError(
            f"task.metrics: {short} returns a {type(value).__name__}, which is recorded nowhere. "
            "Allowed: a number, a tensor of numbers, or a mapping of names to those."
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


@contextmanager
def _failures_named(name: str, more: str = "") -> Iterator[None]:
    """Raise ModelError, with the metric's name, for an error that a metric raises."""
    try:
        yield
    except (torch.OutOfMemoryError, Stopped):
        raise
    except Exception as error:  # of whatever type a metric raises
        text = " ".join(str(error).split()).rstrip(".")
        raise ModelError(
            f"task.metrics: {name} fails: {type(error).__name__}: {text}.{more}"
        ) from error
