"""Classification: one class per example."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from runner.training.tasks.task import class_metrics, class_totals, counted_positions
from runner.training.tasks.tensor_task import TensorTask
from runner.utils.errors import ConfigError


class Classification(TensorTask):
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
    quality = "val/accuracy"
    direction = "max"

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
        self.label_smoothing = label_smoothing

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats, or the loss that task.loss names.

        Raises:
            ValueError: shapes or dtypes are not those of classification.
        """
        logits = self._logits(output, target)
        own = partial(F.cross_entropy, label_smoothing=self.label_smoothing)
        return self.minimised(logits, target, own)

    def totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, correct predictions, labels that count]."""
        return class_totals(self._logits(output, target), target)

    def metric_inputs(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, C] and classes [N] of the examples whose labels count."""
        return counted_positions(self.select(output), target)

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats and val/accuracy in [0, 1]."""
        return class_metrics(totals)

    def _logits(self, output: Any, target: Tensor) -> Tensor:
        logits = self.select(output)
        if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
            raise ValueError(
                "classification needs logits [B, C] and integer targets [B], got "
                f"{list(logits.shape)} and {target.dtype} {list(target.shape)}"
            )
        return logits
