"""Tasks with a class at every position: language modelling and the classification of tokens."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from runner.core import batch_layout
from runner.training.tasks.tensor_task import ClassTask, count_labels, mean, stack, wide


class Language(ClassTask):
    """Cross entropy over logits [B, T, V] and tokens int64 [B, T], aligned with each other.

    Every position weighs 1, and one whose token is -100 (padding, a prompt) does not count.
    """

    takes = "logits [B, T, V]"
    labels_taken = "tokens [B, T]"
    dims = 3
    class_dim = -1
    quality = "val/loss"
    direction = "min"

    def flattened(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B T, V] and tokens [B T]; see aligned."""
        logits, tokens = self.aligned(output, target)
        return logits.flatten(0, 1), tokens.flatten()

    def totals(self, output: Any, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, tokens that count]."""
        logits, tokens = self.flattened(output, target)
        losses = F.cross_entropy(logits, tokens, reduction="none")
        return stack(losses.to(wide(logits)).sum(), count_labels(tokens))

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

    def loss(self, output: Any, target: Tensor) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
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
    totals = ClassTask.totals
    summarise = ClassTask.summarise


class MaskedLM(TokenClassification):
    """The tokens under a mask: logits [B, T, V] and labels int64 [B, T], -100 where no token was
    masked; val/accuracy is the share of masked tokens that are guessed right."""

    takes = "logits [B, T, V]"
    quality = "val/loss"
    direction = "min"
