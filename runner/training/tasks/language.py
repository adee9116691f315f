"""Language modelling: the next token at every position."""

import math
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from runner.training.tasks.task import Task, count_labels, labels_out_of_range, mean, stack, wide


class Language(Task):
    """Cross entropy over logits [B, T, V] and tokens int64 [B, T].

    Every position weighs 1, and one whose token is -100 (padding, a prompt) does not count.
    """

    quality: ClassVar[str] = "val/loss"
    direction = "min"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy per token, in nats.

        Raises:
            ValueError: the shapes do not match.
        """
        _check(output, target)
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, tokens that count]."""
        _check(output, target)
        losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        return stack(losses.to(wide(output)).sum(), count_labels(target))

    def labels(self, target: Tensor) -> Tensor:
        """Return how many tokens count."""
        return count_labels(target)

    def misplaced(self, target: Tensor, classes: int) -> Tensor:
        """Return bool [B], which sequences hold a token that is no class."""
        return labels_out_of_range(target, classes)

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats per token and val/perplexity, its exponential."""
        loss = mean(*totals)
        return {"val/loss": loss, "val/perplexity": _exp(loss)}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    # Above a loss of about 709 nats math.exp raises; a diverged run reports infinity and continues.
    except OverflowError:
        return math.inf


def _check(output: Tensor, target: Tensor) -> None:
    if output.dim() != 3 or target.shape != output.shape[:2]:
        raise ValueError(
            "language needs logits [B, T, V] and tokens [B, T], got "
            f"{list(output.shape)} and {list(target.shape)}"
        )
