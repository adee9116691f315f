"""Explain why the inputs of a batch are not the arguments that a model's forward takes."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from runner.data.batch_layout import KeywordInputs, PositionalInputs
from runner.training.model_call import takes_fields

_LAYOUTS = "(docs/own-code.md)"


def binds(model: nn.Module, inputs: Any) -> bool:
    """Return whether a model's forward takes the inputs of a batch in the way they are passed."""
    forward = signature(model.forward)
    try:
        if type(inputs) is PositionalInputs:
            forward.bind(*inputs)
        elif takes_fields(model, inputs):
            needed = [name for name in forward.parameters if name in inputs]
            forward.bind(**{name: inputs[name] for name in needed})
        else:
            forward.bind(inputs)
    except TypeError:
        return False
    return True


def explain_arguments(model: nn.Module, inputs: Any, kind: str) -> str:
    """Return what to change where a forward takes other arguments than a batch gives.

    Args:
        model: its forward does not bind the inputs.
        inputs: of the batch.
        kind: of the inputs, in words.
    """
    parameters = signature(model.forward).parameters
    names = [*parameters]
    takes = f"{type(model).__name__}.forward takes ({', '.join(names)})"
    if type(inputs) is KeywordInputs and takes_fields(model, inputs):
        return f"{takes}, and {_missing_fields(parameters, inputs)}"
    if type(inputs) is KeywordInputs:
        fields = ", ".join(map(str, inputs))
        return (
            f"{takes}, and a batch has the fields {fields} beside its target: as none of them is "
            "an argument's name, the forward was given all of them as one dict. Have the data set "
            f"yield a field named {names[0] if names else 'as the argument'}, or (input, target) "
            f"{_LAYOUTS}."
        )
    if type(inputs) is PositionalInputs:
        return (
            f"{takes}, and a batch has {len(inputs)} inputs before its target, which are passed by "
            f"position. Yield one for each argument, or name the inputs: task.inputs=[<names>] "
            f"{_LAYOUTS}."
        )
    if isinstance(inputs, Tensor) and len(names) > 1:
        return (
            f"{takes}, and of a batch (input, target) it is given the input alone, here {kind}. "
            f"Yield ({', '.join(names)}, target) for several inputs, which are passed by position; "
            "or type task=model_loss if the forward takes the target, too, and returns the loss "
            f"{_LAYOUTS}."
        )
    return (
        f"{takes}, and the runner passes the inputs of a batch as one argument, here a {kind}. "
        f"{_own_forward(names, inputs)}"
    )


def _missing_fields(parameters: Mapping[str, Parameter], inputs: Mapping[str, Any]) -> str:
    """Return which arguments a batch of fields lacks, and what to type."""
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is Parameter.empty
        and parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    missing = ", ".join(name for name in needed if name not in inputs)
    return (
        f"a batch has the fields {', '.join(map(str, inputs))} beside its target, which are passed "
        f"by their names: {missing} is missing. Have the data set yield fields of these names "
        f"{_LAYOUTS}."
    )


def _own_forward(names: Sequence[str], inputs: Any) -> str:
    """Return the forward to write for inputs that are one argument, or the batch to yield."""
    if isinstance(inputs, Mapping):
        start = "; ".join(f'{name} = inputs["{name}"]' for name in names)
    elif names:
        start = f"{', '.join(names)} = inputs"
    else:
        start = "return ..."
    written = f"rite `def forward(self, inputs): {start}`"
    if isinstance(inputs, tuple | list) and len(names) > 1:
        flat = ", ".join(names)
        return (
            f"Yield ({flat}, target), whose inputs are passed by position, in place of "
            f"(({flat}), target); or w{written}."
        )
    return f"W{written}."
