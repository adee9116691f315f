"""The loss that the model itself returns."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.core import ConfigError
from runner.training.tasks.tensor_task import (
    FieldTask,
    counted_positions,
    part_of,
    scalar_losses,
    stack,
)


class ModelLoss(FieldTask):
    """The loss that the model returns for inputs and labels, as Hugging Face's models do.

    The model is given the target among its inputs. Each example weighs alike: a model that averages
    over labels of which some do not count is weighted exactly by the task of its kind
    (task=causal_lm, ...).

    Args:
        inputs, target: see FieldTask.
        output: see FieldTask; None takes a scalar as it is, `loss` of an output that has it, and
            the sum of a dict of losses.
    """

    passes_target = True

    def loss(self, output: Any, target: Any) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the model's loss, a scalar, with the other losses that it returns by their names.

        Raises:
            ConfigError: the output has no loss.
        """
        value = self._loss_in(output)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.reshape(())
            parts = scalar_losses(output)
            parts.pop("loss", None)
            return (value, parts) if parts else value
        raise ConfigError(
            f"task=model_loss: the model returns no loss, but a {type(output).__name__}. Have it "
            "return its loss for the labels that it is given, type task.output=<where it is>, or "
            "the task= that computes it."
        )

    def _loss_in(self, output: Any) -> Any:
        field = self.output_field
        if field is None and isinstance(output, Tensor):
            return output
        if field is None and isinstance(output, Mapping) and "loss" not in output:
            # Detection models return the terms of their loss by name.
            return sum(loss_terms(output).values())
        if isinstance(field, int):
            # Hugging Face's outputs are mappings whose values have places, too.
            with suppress(LookupError):
                return output[field]
            return None
        return part_of(output, "loss" if field is None else field)

    def totals(self, output: Any, target: Any) -> Tensor:
        """Return [the loss times the examples of the batch, its examples]."""
        returned = self.loss(output, target)
        loss = returned[0] if isinstance(returned, tuple) else returned
        # The length of the target's first tensor, or of a list.
        leaves = [leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.ndim]
        examples = len(leaves[0]) if leaves else 1
        if isinstance(target, list):
            examples = len(target)
        return stack(loss * examples, examples)

    def metric_inputs(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return the output's logits, or the whole output without any, and the target as it is.

        Logits [B, C] of targets [B] leave out those whose label does not count.
        """
        is_mapping = isinstance(output, Mapping)
        logits = output.get("logits") if is_mapping else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            return output, target
        is_classes = isinstance(target, Tensor) and not target.is_floating_point()
        if is_classes and logits.ndim == 2 and target.shape == logits.shape[:1]:
            return counted_positions(logits, target)
        return logits, target


def loss_terms(output: Any) -> dict[str, Tensor]:
    """Return the losses of a model that returns nothing else, by name; of another output, none."""
    terms = output if isinstance(output, Mapping) else {}
    are_losses = all(isinstance(term, Tensor) and term.numel() == 1 for term in terms.values())
    return {name: term.reshape(()) for name, term in terms.items() if are_losses}
