"""The contract of a task: its loss, its metrics, and the metric that runs are compared by."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from runner.core.base.errors import ConfigError, ModelError
from runner.core.base.stop_signals import Stopped
from runner.core.base.tensor_facts import dtype_name
from runner.core.loop.batch_layout import IGNORED_LABEL, BatchLayout

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
        """Add a batch, whose numbers are in float32 or wider.

        Raises:
            ModelError: a metric does not take them.
        """
        if isinstance(targets, Tensor) and not targets.numel():
            return  # no label of the batch counts
        given = f"{_described(predictions)} and {_described(targets)}"
        for name, metric in self.metrics.items():
            with _failures_named(name, f" It is given predictions and targets, {given}."):
                metric.update(predictions, targets)

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


@dataclass(frozen=True)
class TaskAdditions:
    """Objects that the keys of the task group name which fit every task.

    Attributes:
        metrics: objects of torchmetrics.Metric, by the names under which they are recorded.
        quality: name of the metric that runs are compared by, "val/..."; None for the task's own.
        direction: whichever of it is better; None where it follows from the metric.
        hook: called after each evaluation with the model and an EvaluationInfo; None for none.
        hook_name: the dotted path of the hook.
        whole_batch: whether the loss is of the batch as a whole; None for what the task says.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    quality: str | None = None
    direction: Literal["max", "min"] | None = None
    hook: Callable[..., Any] | None = None
    hook_name: str = ""
    whole_batch: bool | None = None


class Task(ABC):
    """Loss and metrics of one kind of problem.

    Validation metrics are sums over labels: `totals` of every batch (and process) are added
    on the device and `summarise` divides once, so a partial last batch weighs what it should.
    """

    quality: str
    """The metric that runs are compared by, e.g. "val/accuracy"."""
    direction: Literal["max", "min"]
    """Whether `quality` is better high ("max") or low ("min")."""
    input_fields: Sequence[str] | None = None
    """Fields of a dict batch that the model takes; None for all but the target."""
    target_field: str | None = None
    """The field of a dict batch that holds the target; None looks for the usual names."""
    passes_target: bool = False
    """Whether the model takes the target, too, as one that returns its loss does."""
    ignored_label: int = IGNORED_LABEL
    """The label that does not count in the data, in place of which loss and metrics get -100."""
    layout: type[BatchLayout] = BatchLayout
    """Class that splits the batches."""
    evaluates_losses: bool = False
    """Whether an evaluation takes what the model returns in training mode; see
    core/loop/training_loop.py."""
    whole_batch: bool = False
    """Whether the loss is of the batch as a whole and no mean over its examples, as a contrastive
    loss is, whose negatives are the batch's other examples. Then train.accumulate is refused, and
    processes join their outputs and targets for the loss."""

    additions: TaskAdditions = TaskAdditions()
    """What the keys of the task group that fit every task add to it."""
    added_metrics: AddedMetrics = AddedMetrics({})
    """The metrics that task.metrics names."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the batch's mean loss: a scalar on the device, computed in output's dtype.

        Or return the pair of it and further scalars on the device by name, means over the same
        labels, which are recorded in every step as train/<name>. The names are always the same.
        """

    @abstractmethod
    def totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return one batch's sums: [K] on the device, float64 where it has it, without a sync."""

    def labels(self, target: Tensor) -> Tensor | None:
        """Return how many labels `loss` averages over: a scalar on the device, without a sync.

        The micro-batches of a step, and the parts of several processes, weigh by this number, so
        that their gradients add up to those of one large batch. One that has no label weighs
        nothing; the gradient of its `loss` is multiplied by 0, so it must be finite.

        Returns:
            A number that may be a fraction (a sum of weights); None, for every target, where each
            example weighs alike.
        """
        return None

    def misplaced(self, target: Tensor, classes: int) -> Tensor | None:
        """Return bool [B], which examples have a label that is none of the classes 0 to
        classes - 1; None where labels are no classes."""
        return None

    def check_target(self, target: Any) -> None:
        """Raise ConfigError where the target of a first batch holds what the loss cannot take."""

    def describe_output(self, output: Any) -> str:
        """Return which part of a model's output the loss takes, where that was found out; empty
        where there is nothing to say."""
        return ""

    def added_losses(self, output: Any) -> Mapping[str, Tensor]:
        """Return the losses in a model's output that training adds to `loss`, by their names."""
        return {}

    @abstractmethod
    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return the metrics, named "val/...", from the sums over all batches, K numbers.

        Without any label the metrics are NaN.
        """

    def evaluation_totals(self, output: Any, target: Any) -> Tensor:
        """Return the sums of one batch of an evaluation: `totals`, and what a task adds to them."""
        return self.totals(output, target)

    def evaluation_metrics(self, totals: list[float]) -> dict[str, float]:
        """Return the metrics of an evaluation from the sums of `evaluation_totals`."""
        return self.summarise(totals)

    def metric_inputs(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return the predictions and targets of a batch that the metrics of task.metrics take.

        Args:
            output: of the model.
            target: of the batch.
        """
        return output, target

    def extend(self, **values: Any) -> None:
        """Add what the config names to the task, before it is used.

        Args:
            values: the attributes of TaskAdditions.

        Raises:
            ConfigError: it is not known whether more or less of the quality is better.
        """
        self.additions = additions = TaskAdditions(**values)
        if additions.whole_batch is not None:
            self.whole_batch = additions.whole_batch
        self.added_metrics = AddedMetrics(additions.metrics)
        quality = additions.quality or self.quality
        self.direction = additions.direction or self._direction_of(quality)
        self.quality = quality

    def _direction_of(self, quality: str) -> Literal["max", "min"]:
        """Return whichever of a metric is better."""
        name = quality.rpartition("/")[2]
        # The quality of one of several validation sets is of the same kind.
        if name == self.quality.rpartition("/")[2]:
            return self.direction
        known = self.added_metrics.direction(quality) or _DIRECTIONS.get(name)
        if known is None:
            raise ConfigError(
                f"task.quality={quality}: whether more or less of it is better is not known. Type "
                "task.direction=maximize or task.direction=minimize."
            )
        return "max" if known == "max" else "min"


_DIRECTIONS = {
    "loss": "min",
    "plain_loss": "min",
    "perplexity": "min",
    "accuracy": "max",
    "iou": "max",
}
"""Whichever is better of the metrics of the built-in tasks."""


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
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
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
