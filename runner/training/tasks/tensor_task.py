"""The bases of the built-in tasks, and the sums that they add up over an evaluation's batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core import ConfigError, Task, batch_layout, tensor_facts

_PACKAGE = "runner.training.tasks."


class TrainingLoss:
    """A loss of outputs and targets that is a mean over the labels that count.

    Args:
        loss: a function or nn.Module of (output, target), for example torch.nn.CrossEntropyLoss.

    Raises:
        ConfigError: it cannot be called, sums, leaves out another label than -100, or has
            parameters.
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        _check(loss)
        self.loss = loss
        self._place = None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss: a scalar.

        Raises:
            ConfigError: the loss returned something else than one number.
        """
        dtype = output.dtype
        # Half precision would round class weights. Autocast computes losses in float32.
        kind = output.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.promote_types(dtype, torch.float32)
        self._move(output.device, dtype)
        value = self.loss(output, target)
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.reshape(())
        kind = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(
            f"task.loss={_name(self.loss)} returned {kind}, and training needs one number, the "
            "mean over the labels that count. Return loss.mean()."
        )

    def labels(self, target: Tensor) -> Tensor:
        """Return what the mean divides by: the labels that count, or the sum of their weights."""
        loss = self.loss
        if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss.weight is None:
            return count_labels(target)
        # Labels are counted before the first forward has moved the loss.
        self._move(target.device, loss.weight.dtype)
        weight = loss.weight
        # Into range: the forward says better than an index which weights are missing.
        inside = target.clamp(0, len(weight) - 1)
        counted = weight[inside].masked_fill(target == batch_layout.IGNORED_LABEL, 0)
        return counted.sum(dtype=tensor_facts.widest_float(target.device))

    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move a module's tensors to where the loss is computed, unless they are there."""
        if self._place == (device, dtype):
            return
        if isinstance(self.loss, nn.Module):
            self.loss.to(device, dtype)
        self._place = (device, dtype)


def _check(loss: object) -> None:
    name = _name(loss)
    if not callable(loss):
        raise ConfigError(
            f"task.loss={name} cannot be called. Allowed: a function or torch.nn.Module that takes "
            "the logits and the labels, as in task.loss={_target_: torch.nn.CrossEntropyLoss}."
        )
    if isinstance(loss, partial) and loss.func.__module__.startswith("torch."):
        hidden = [key for key in ("reduction", "ignore_index", "weight") if key in loss.keywords]
        if hidden:
            raise ConfigError(
                f"task.loss: {', '.join(hidden)} of a partial function cannot be seen when the "
                "parts of a step are weighed. Name a class, as in task.loss={_target_: "
                "torch.nn.CrossEntropyLoss, weight: [1.0,5.0]}."
            )
    reduction = getattr(loss, "reduction", "mean")
    if reduction in ("sum", "none"):
        raise ConfigError(
            f"task.loss.reduction={reduction}: the parts of a step are weighed as means over their "
            "labels. Type task.loss.reduction=mean, or leave it out."
        )
    ignored = getattr(loss, "ignore_index", batch_layout.IGNORED_LABEL)
    if ignored != batch_layout.IGNORED_LABEL:
        raise ConfigError(
            f"task.loss.ignore_index={ignored}: with task=segmentation type task.ignore_index="
            f"{ignored} in its place. Other tasks leave {batch_layout.IGNORED_LABEL} out: have the "
            "data set yield it."
        )
    if isinstance(loss, nn.Module) and [*loss.parameters()]:
        raise ConfigError(
            f"task.loss={name} has parameters, which no optimizer would train. Make them a part "
            "of the model, or tensors registered by register_buffer."
        )
    with suppress(ValueError):  # a builtin has no signature
        names = signature(loss.forward if isinstance(loss, nn.Module) else loss)
        try:
            names.bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"task.loss={name} takes ({', '.join(names.parameters)}), and is called with two "
                "arguments, the output and the target. Have the model compute it and type "
                "task=model_loss, or write a task of your own (docs/own-code.md)."
            ) from error


def _name(loss: object) -> str:
    """Return the name of a function, or of an object's class."""
    return str(getattr(loss, "__name__", type(loss).__name__))


class FieldTask(Task):
    """A task whose batches and outputs may have fields, and whose metric is the loss.

    Args:
        inputs: fields of a dict batch that the model takes besides the target; None for all. They
            name the inputs of a tuple batch, in its order.
        target: the field of a dict batch that holds the target; None looks for labels, label,
            targets, target.
        output: key or attribute of the model's output, or place in it (from 0), that the loss
            takes; None leaves it to the task.
    """

    quality = "val/loss"
    direction = "min"

    def __init__(
        self,
        inputs: Sequence[str] | None = None,
        target: str | None = None,
        output: str | int | None = None,
    ) -> None:
        self.input_fields = None if inputs is None else tuple(inputs)
        self.target_field = target
        self.output_field = output

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss, the mean of [summed loss, count]."""
        return {"val/loss": mean(*totals)}


class TensorTask(FieldTask):
    """A task whose loss takes one tensor of the model's output.

    Args:
        inputs, target: see FieldTask.
        output: see FieldTask; None takes a tensor as it is, and the logits of any other output.
        loss: function or nn.Module of (output, target) that training minimises, see TrainingLoss;
            None for the task's own. val/loss is this loss, and val/plain_loss the task's own.
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
        super().__init__(inputs, target, output)
        self.training_loss = None if loss is None else TrainingLoss(loss)

    def minimised(self, output: Tensor, target: Tensor, otherwise: Callable[..., Tensor]) -> Tensor:
        """Return the loss that task.loss names, or else another one: a scalar.

        Raises:
            ConfigError: the loss that task.loss names returned something else than one number.
        """
        return (self.training_loss or otherwise)(output, target)

    def labels(self, target: Tensor) -> Tensor:
        """Return how many labels the training loss averages over, or the sum of their weights."""
        count = self.training_loss.labels if self.training_loss else count_labels
        return count(target)

    def evaluation_totals(self, output: Any, target: Tensor) -> Tensor:
        """Return `totals`, and with task.loss [that loss times its labels, its labels] after it."""
        sums = self.totals(output, target)
        if self.training_loss is None:
            return sums
        loss = self.loss(output, target)
        if isinstance(loss, tuple):  # with an auxiliary head, which the metrics are without
            loss = loss[1]["main_loss"]
        count = self.labels(target).to(sums.dtype)
        # The mean of a batch without a label is NaN.
        summed = (loss.to(sums.dtype) * count).masked_fill(count == 0, 0)
        return torch.cat([sums, torch.stack([summed, count])])

    def evaluation_metrics(self, totals: list[float]) -> dict[str, float]:
        """Return `summarise`, and with task.loss its mean in the place of the task's own loss."""
        if self.training_loss is None:
            return self.summarise(totals)
        metrics = self.summarise(totals[:-2])
        return {**metrics, "val/loss": mean(*totals[-2:]), "val/plain_loss": metrics["val/loss"]}

    def misplaced(self, target: Tensor, classes: int) -> Tensor | None:
        """Return bool [B], which examples have a label that is none of the classes 0 to
        classes - 1; None where labels are no classes."""
        return labels_out_of_range(target, classes)

    def added_losses(self, output: Any) -> dict[str, Tensor]:
        """Return the losses in a model's output that training adds to `loss`, by their names.

        They are its scalars named ..._loss, as the aux_loss of a mixture of experts is, and `loss`
        of a model that is not given the target, named model_loss.
        """
        # A loss of one's own sees the whole output, and takes from it what it wants.
        if isinstance(output, Tensor) or not type(self).loss.__module__.startswith(_PACKAGE):
            return {}
        losses = scalar_losses(output)
        added = {name: value for name, value in losses.items() if name.endswith("_loss")}
        if "loss" in losses and not self.passes_target:
            added["model_loss"] = losses["loss"]
        return added

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
            logits = part_of(output, "logits")
            return logits if isinstance(logits, Tensor) else output
        part = part_of(output, self.output_field)
        if isinstance(part, Tensor):
            return part
        kind = type(output).__name__
        choices = "its attribute"
        if isinstance(output, Mapping):
            kind += f" with the keys {', '.join(map(str, output))}"
            choices = " or ".join(str(key) for key, p in output.items() if isinstance(p, Tensor))
        elif isinstance(output, tuple | list):
            kind += f" of {len(output)}"
            choices = f"0 to {len(output) - 1}"
        raise ConfigError(
            f"task.output={self.output_field}: the model returns a {kind}, and that part of it is "
            f"no tensor. Type task.output=<{choices}>."
        )


class ClassTask(TensorTask):
    """Cross entropy over logits and integer labels, of which -100 does not count.

    Attributes:
        labels_taken: the labels that the loss takes, in words.
        dims: number of dimensions of the logits.
        class_dim: dimension of the logits that has the classes; the others are those of the labels.
        own_loss: of logits and labels: a scalar in nats, the mean over the labels that count.
    """

    labels_taken: ClassVar[str]
    dims: ClassVar[int]
    class_dim: ClassVar[int] = 1
    quality = "val/accuracy"
    direction = "max"
    own_loss: Callable[..., Tensor] = staticmethod(F.cross_entropy)

    def aligned(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, and the labels that they predict.

        Raises:
            ValueError: shapes or dtypes do not match.
        """
        logits = self.select(output)
        is_taken = logits.dim() == self.dims and not target.is_floating_point()
        sizes = [*logits.shape]
        if is_taken:
            del sizes[self.class_dim]
        if not is_taken or [*target.shape] != sizes:
            raise ValueError(
                f"{type(self).__name__.lower()} needs {self.takes} and {self.labels_taken}, got "
                f"{list(logits.shape)} and {target.dtype} {list(target.shape)}"
            )
        return logits, target

    def flattened(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and labels as cross entropy takes them; see aligned."""
        return self.aligned(output, target)

    def loss(self, output: Any, target: Tensor) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the mean cross entropy, in nats, or the loss that task.loss names.

        Raises:
            ValueError: shapes or dtypes do not match.
        """
        return self.minimised(*self.flattened(output, target), self.own_loss)

    def totals(self, output: Any, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, correct predictions, labels that count]."""
        return class_totals(*self.flattened(output, target))

    def metric_inputs(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, C] and classes [N] of the labels that count."""
        logits, labels = self.aligned(output, target)
        return counted_positions(logits.movedim(self.class_dim, -1), labels)

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats and val/accuracy in [0, 1]."""
        return class_metrics(totals)


def scalar_losses(output: Any) -> dict[str, Tensor]:
    """Return the tensors of one number in an output that are named as losses, as aux_loss and
    loss_box_reg, by their names."""
    if hasattr(output, "_asdict"):
        output = output._asdict()
    parts = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    return {
        name: value
        for name, value in parts.items()
        if "loss" in str(name).split("_") and isinstance(value, Tensor) and value.numel() == 1
    }


def part_of(output: Any, field: str | int) -> Any:
    """Return a part of an output by key, attribute or place; None where there is none."""
    if isinstance(output, Mapping):
        return output.get(field)
    if isinstance(output, tuple | list) and isinstance(field, int):
        return output[field] if -len(output) <= field < len(output) else None
    return getattr(output, field, None) if isinstance(field, str) else None


def count_labels(target: Tensor) -> Tensor:
    """Return how many of the labels torch's cross entropy averages over: int64 []."""
    return (target != batch_layout.IGNORED_LABEL).sum()


def counted_positions(predictions: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions [N, C] and classes int64 [N] of the positions whose labels count.

    On a GPU the host waits for their number.

    Args:
        predictions: [..., C].
        target: integers [...] of the same shape without C.
    """
    counted = (target != batch_layout.IGNORED_LABEL).flatten()
    return predictions.flatten(0, -2)[counted], target.flatten()[counted]


def labels_out_of_range(target: Tensor, classes: int) -> Tensor:
    """Return bool [B], which examples of integers [B, ...] have one that is no class."""
    # IGNORED is below 0 and no error: cross entropy leaves it out.
    wrong = ((target < 0) & (target != batch_layout.IGNORED_LABEL)) | (target >= classes)
    return wrong.reshape(len(target), -1).any(1)


def class_totals(logits: Tensor, target: Tensor) -> Tensor:
    """Return [summed cross entropy in nats, correct predictions, labels that count]: float64 [3].

    Args:
        logits: [B, C, ...].
        target: classes int64 [B, ...].
    """
    losses = F.cross_entropy(logits, target, reduction="none").to(wide(logits))
    correct = (logits.argmax(1) == target).sum()
    return stack(losses.sum(), correct, count_labels(target))


def class_metrics(totals: list[float]) -> dict[str, float]:
    """Return val/loss in nats and val/accuracy in [0, 1], from the sums of class_totals."""
    loss, correct, count = totals
    return {"val/loss": mean(loss, count), "val/accuracy": mean(correct, count)}


def stack(*sums: Tensor | int) -> Tensor:
    """Stack sums into one vector [K] on the device of the first, without a sync."""
    # new_full() fills in the host's numbers on the device without a wait for it, which a copy of a
    # host tensor would need.
    first = sums[0]
    assert isinstance(first, Tensor)
    dtype = wide(first)
    parts = [s if isinstance(s, Tensor) else first.new_full((), s, dtype=dtype) for s in sums]
    return torch.stack([part.to(dtype) for part in parts])


def wide(like: Tensor) -> torch.dtype:
    """Return the dtype in which sums are added up: the widest float of the tensor's device."""
    return tensor_facts.widest_float(like.device)


def mean(total: float, count: float) -> float:
    """Return total / count; NaN if nothing was counted."""
    return total / count if count else math.nan
