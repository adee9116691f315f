"""Classification: one class per example, or a yes or no for each of several labels."""

from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from runner.core import ConfigError, batch_layout
from runner.training.tasks.tensor_task import (
    ClassTask,
    TensorTask,
    class_metrics,
    count_labels,
    stack,
    wide,
)


class Classification(ClassTask):
    """Cross entropy over logits [B, C] and integer targets [B], of which -100 does not count.

    Args:
        label_smoothing: share of each target spread over all classes, in [0, 1) (Szegedy et al.
            2015, arXiv:1512.00567). The training loss has it, val/loss has not, so that runs
            stay comparable.
        inputs, target, output, loss: see TensorTask.

    Raises:
        ConfigError: label_smoothing is out of range, or given beside another loss.
    """

    takes = "logits [B, C]"
    labels_taken = "integer targets [B]"
    dims = 2

    def __init__(
        self,
        label_smoothing: float = 0.0,
        inputs: Sequence[str] | None = None,
        target: str | None = None,
        output: str | int | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(inputs, target, output, loss)
        if not 0 <= label_smoothing < 1:
            raise ConfigError(
                f"task=classification: label_smoothing={label_smoothing} is not in [0, 1). "
                "Type task.label_smoothing=0.1."
            )
        if label_smoothing and loss is not None:
            raise ConfigError(
                f"task.label_smoothing={label_smoothing} is not part of task.loss. In its place "
                f"type task.loss.label_smoothing={label_smoothing}, where that loss takes it."
            )
        self.own_loss = partial(F.cross_entropy, label_smoothing=label_smoothing)

    def describe_output(self, output: Any) -> str:
        """Return a warning where a model returns probabilities, as it seems, for logits."""
        numbers = self.select(output)
        # The loss of a subclass may take another output.
        if self.training_loss or not isinstance(numbers, Tensor):
            return ""
        error = (numbers.sum(-1) - 1).abs().amax()
        # A sum in bfloat16 is 2**-7 off at most, that of 250000 classes in float32 about 1e-6.
        is_probable = numbers.amin() >= 0 and error <= (2**-7 if numbers.itemsize == 2 else 1e-5)
        warning = (
            "warning: the outputs for each example of the first batch sum to 1, and task="
            "classification takes logits. If the model ends in a softmax, leave it out"
        )
        return warning if is_probable else ""


class Binary(TensorTask):
    """Binary cross entropy over logits [B, ...] and targets of that shape in [0, 1], of any dtype;
    -100 does not count. Logits [B, 1] fit targets [B], too."""

    takes = "logits in the shape of the targets, which are 0 or 1"

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean binary cross entropy per label, in nats, or the loss of task.loss.

        Raises:
            ValueError: the shapes do not match.
        """
        return self.minimised(*self._pair(output, target), _mean_binary_entropy)

    def totals(self, output: Any, target: Tensor) -> Tensor:
        """Return [summed binary cross entropy in nats, right answers, labels that count]."""
        logits, labels = self._logits(output, target)
        right = ((logits > 0) == (labels > 0.5)) & (labels != batch_layout.IGNORED_LABEL)
        losses = _binary_entropies(logits, labels).to(wide(logits))
        return stack(losses.sum(), right.sum(), count_labels(target))

    def misplaced(self, target: Tensor, classes: int) -> None:
        """Return None: a class is a place in the target, which check_target looks into."""

    def check_target(self, target: Tensor) -> None:
        """Raise ConfigError where a label is neither in [0, 1] nor one that does not count."""
        # A loss of the user's own would take -100 for a label.
        ignored = [] if self.training_loss else [batch_layout.IGNORED_LABEL]
        wrong = [v for v in target.unique().tolist() if not (0 <= v <= 1 or v in ignored)]
        if wrong:
            raise ConfigError(
                f"task=binary: the targets hold {wrong[0]:g}. Allowed: 0 or 1, a probability in "
                "between, and -100 for a label that does not count, without task.loss. Have the "
                "data set yield these."
            )

    def metric_inputs(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and labels int64, [N] of those that count, or [B, ...] with -100."""
        logits, labels = self._logits(output, target)
        answers = (
            (labels > 0.5)
            .long()
            .masked_fill(labels == batch_layout.IGNORED_LABEL, batch_layout.IGNORED_LABEL)
        )
        if labels.ndim > 1:
            return logits.sigmoid(), answers
        counted = labels != batch_layout.IGNORED_LABEL
        return logits[counted].sigmoid(), answers[counted]

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats and val/accuracy, of the labels one by one, in [0, 1]."""
        return class_metrics(totals)

    def describe_output(self, output: Any) -> str:
        """Return a warning where a model returns probabilities, as it seems, for logits."""
        numbers = self.select(output)
        # A model that was never trained returns logits near 0, of both signs.
        is_probable = numbers.numel() >= 8 and 0.4 <= numbers.amax() <= 1 and numbers.amin() >= 0
        warning = (
            "warning: all outputs of the first batch are in [0, 1], and task=binary takes logits. "
            "If the model ends in a sigmoid, type task.loss=torch.nn.BCELoss, or leave it out"
        )
        return warning if is_probable and not self.training_loss else ""

    def _logits(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and labels, also where task.loss takes probabilities."""
        numbers, labels = self._pair(output, target)
        loss = getattr(self.training_loss, "loss", None)
        if isinstance(loss, nn.BCELoss) or getattr(loss, "func", loss) is F.binary_cross_entropy:
            # BCELoss ends at a loss of 100, too.
            numbers = numbers.to(wide(numbers)).logit().clamp(-100, 100)
        return numbers, labels.to(numbers.dtype)

    def _pair(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.select(output)
        if logits.shape == (*target.shape, 1):
            logits = logits.squeeze(-1)
        if logits.shape != target.shape or not logits.is_floating_point():
            raise ValueError(
                "binary needs logits and targets of one shape, got "
                f"{logits.dtype} {list(logits.shape)} and {target.dtype} {list(target.shape)}"
            )
        return logits, target.to(logits.dtype)


def _binary_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross entropy of each label, 0 where it does not count."""
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.masked_fill(labels == batch_layout.IGNORED_LABEL, 0)


def _mean_binary_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the labels that count; without any NaN, whose gradient is 0."""
    count = count_labels(labels)
    total = _binary_entropies(logits, labels).sum()
    return (total / count.clamp(min=1)).masked_fill(count == 0, nan)
