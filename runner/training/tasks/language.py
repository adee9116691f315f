"""Tasks with a class at every position: language modelling and the classification of tokens."""

import math
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from runner.core import batch_layout
from runner.training.tasks.tensor_task import (
    TensorTask,
    class_metrics,
    class_totals,
    count_labels,
    counted_positions,
    mean,
    stack,
    wide,
)


class Language(TensorTask):
    """Cross entropy over logits [B, T, V] and tokens int64 [B, T], aligned with each other.

    Every position weighs 1, and one whose token is -100 (padding, a prompt) does not count.
    """

    takes = "logits [B, T, V]"

    def aligned(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, V] and the tokens [B, T] that they predict.

        Raises:
            ValueError: the shapes do not match.
        """
        logits = self.select(output)
        if logits.dim() != 3 or target.shape != logits.shape[:2]:
            name = type(self).__name__.lower()
            raise ValueError(
                f"{name} needs logits [B, T, V] and tokens [B, T], got "
                f"{list(logits.shape)} and {list(target.shape)}"
            )
        return logits, target

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean cross entropy per token, in nats, or the loss that task.loss names.

        Raises:
            ValueError: the shapes do not match.
        """
        logits, tokens = self.aligned(output, target)
        return self.minimised(logits.flatten(0, 1), tokens.flatten(), F.cross_entropy)

    def totals(self, output: Any, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, tokens that count]."""
        logits, tokens = self.aligned(output, target)
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        return stack(losses.to(wide(logits)).sum(), count_labels(tokens))

    def metric_inputs(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] and tokens [N] of the positions whose labels count."""
        return counted_positions(*self.aligned(output, target))

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats per token and val/perplexity, its exponential."""
        loss = mean(*totals)
        try:
            perplexity = math.exp(loss)
        # Above a loss of about 709 nats; a diverged run reports infinity and continues.
        except OverflowError:
            perplexity = math.inf
        return {"val/loss": loss, "val/perplexity": perplexity}


class CausalLM(Language):
    """Next-token prediction whose targets are the input tokens, as Hugging Face's `labels` are.

    The logits [B, T, V] of each position predict the token of the next one, so the first token of
    the labels int64 [B, T] and the last logits do not count.
    """

    def aligned(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, V] and the tokens [B, T] that they predict, -100 for the last."""
        logits, tokens = super().aligned(output, target)
        # The labels are shifted: a slice of the logits would have to be copied, which are V times
        # as large.
        return logits, F.pad(tokens[:, 1:], (0, 1), value=batch_layout.IGNORED_LABEL)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the mean cross entropy per token, in nats, or the loss that task.loss names.

        Raises:
            ValueError: the shapes do not match.
        """
        if self.training_loss is None:
            return super().loss(output, target)
        # Most losses know no label that does not count, so they get none that was added here.
        logits, tokens = super().aligned(output, target)
        return self.training_loss(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def labels(self, target: Tensor) -> Tensor:
        """Return how many tokens count."""
        return super().labels(target[..., 1:])


class Seq2Seq(Language):
    """An encoder-decoder's target tokens, which the model takes, too, and shifts by itself.

    The model makes its decoder's inputs from `labels`, as Hugging Face's T5 and BART do; the logits
    [B, T, V] are aligned with the labels int64 [B, T].
    """

    passes_target = True


class TokenClassification(Language):
    """A class for every token: logits [B, T, C] and labels int64 [B, T], of which -100 does not
    count."""

    takes = "logits [B, T, C]"
    quality = "val/accuracy"
    direction = "max"

    def totals(self, output: Any, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, correct predictions, labels that count]."""
        logits, labels = self.aligned(output, target)
        return class_totals(logits.flatten(0, 1), labels.flatten())

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats per label and val/accuracy in [0, 1]."""
        return class_metrics(totals)


class MaskedLM(TokenClassification):
    """The tokens under a mask: logits [B, T, V] and labels int64 [B, T], -100 where no token was
    masked; val/accuracy is the share of masked tokens that are guessed right."""

    takes = "logits [B, T, V]"
    quality = "val/loss"
    direction = "min"
