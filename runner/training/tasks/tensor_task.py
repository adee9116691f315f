"""The base of the built-in tasks, whose loss takes one tensor of the model's output."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from runner.training.tasks.task import Task, count_labels
from runner.training.tasks.training_loss import TrainingLoss
from runner.utils.errors import ConfigError


class TensorTask(Task):
    """A task whose loss takes one tensor of the model's output, and whose batches may have fields.

    Args:
        inputs: fields of a dict batch that the model takes; None for all but the target. They name
            the inputs of a tuple batch, in its order.
        target: the field of a dict batch that holds the target; None looks for labels, label,
            targets, target.
        output: key or attribute of the model's output, or place in a tuple (from 0), that the loss
            takes; None takes a tensor as it is, and the logits of any other output.
        loss: function or nn.Module of (output, target) that training minimises, see TrainingLoss;
            None for the task's own. The metrics keep the task's own loss, so that runs stay
            comparable.
    """

    takes: ClassVar[str] = ""
    """The tensor that the loss takes, in words."""

    def __init__(
        self,
        inputs: Sequence[str] | None = None,
        target: str | None = None,
        output: str | int | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self.input_fields = None if inputs is None else tuple(inputs)
        self.target_field = target
        self.output_field = output
        self.training_loss = None if loss is None else TrainingLoss(loss)

    def minimised(self, output: Tensor, target: Tensor, otherwise: Callable[..., Tensor]) -> Tensor:
        """Return the loss that task.loss names, or else another one: a scalar.

        Raises:
            ConfigError: the loss that task.loss names returned something else than one number.
        """
        return (self.training_loss or otherwise)(output, target)

    def counted(self, target: Tensor) -> Tensor:
        """Return how many labels the training loss averages over, or the sum of their weights."""
        count = self.training_loss.labels if self.training_loss else count_labels
        return count(target)

    def select(self, output: Any) -> Any:
        """Return the part of a model's output that the loss takes.

        An output without logits is returned as it is where task.output names no part; the loss
        refuses it.

        Raises:
            ConfigError: the output has no part as task.output names it.
        """
        if isinstance(output, Tensor):
            if self.output_field is not None:
                raise ConfigError(
                    f"task.output={self.output_field}: the model returns one tensor. "
                    "Leave task.output out."
                )
            return output
        if self.output_field is None:
            logits = _part(output, "logits")
            return logits if isinstance(logits, Tensor) else output
        found = _part(output, self.output_field)
        if isinstance(found, Tensor):
            return found
        raise ConfigError(
            f"task.output={self.output_field}: the model returns a {_described(output)}, and that "
            f"part of it is no tensor. Type task.output=<{_choices(output)}>."
        )


def _part(output: Any, wanted: str | int) -> Any:
    """Return a part of an output by key, attribute or place; None where there is none."""
    if isinstance(output, Mapping):
        return output.get(wanted)
    if isinstance(output, tuple | list) and isinstance(wanted, int):
        return output[wanted] if -len(output) <= wanted < len(output) else None
    return getattr(output, wanted, None) if isinstance(wanted, str) else None


def _described(output: Any) -> str:
    """Return an output in words."""
    name = type(output).__name__
    if isinstance(output, Mapping):
        return f"{name} with the keys {', '.join(map(str, output))}"
    return f"{name} of {len(output)}" if isinstance(output, tuple | list) else name


def _choices(output: Any) -> str:
    """Return what task.output may be for an output."""
    if isinstance(output, Mapping):
        return " or ".join(str(key) for key, part in output.items() if isinstance(part, Tensor))
    if isinstance(output, tuple | list):
        return f"0 to {len(output) - 1}"
    return "its attribute"
