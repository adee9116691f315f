"""The task of a Hugging Face model, by the kind of the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.core import ConfigError
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import CausalLM, MaskedLM, Seq2Seq, TokenClassification
from runner.training.tasks.tensor_task import TensorTask

TASKS: Mapping[str, type[TensorTask]] = {
    "causal_lm": CausalLM,
    "masked_lm": MaskedLM,
    "seq2seq_lm": Seq2Seq,
    "sequence_classification": Classification,
    "token_classification": TokenClassification,
    "image_classification": Classification,
}
"""The tasks by the kinds of models, as model.kind names them."""


def task_for(
    kind: str,
    inputs: Sequence[str] | None = None,
    target: str | None = None,
    output: str | int | None = None,
    loss: Callable[..., Any] | None = None,
) -> TensorTask:
    """Return the task of a kind of model.

    Args:
        kind: a key of TASKS.
        inputs, target, output, loss: see TensorTask.

    Raises:
        ConfigError: the kind is not known.
    """
    if kind not in TASKS:
        raise ConfigError(f"model.kind={kind} is not known. Allowed: {', '.join(TASKS)}.")
    return TASKS[kind](inputs=inputs, target=target, output=output, loss=loss)
