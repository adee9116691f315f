"""Call a model with the inputs of a batch: as one argument, as positional ones or as keywords."""

from collections.abc import Mapping
from functools import lru_cache
from inspect import Parameter, Signature, signature
from typing import Any
from weakref import ref

from torch import Tensor, nn

from runner.core.loop.batch_layout import KeywordInputs, PositionalInputs


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Return a model's output for the inputs of a batch.

    A tensor is the model's one argument. KeywordInputs are keyword arguments, without the fields
    that the forward does not take; PositionalInputs are positional arguments. A dict from a pair
    (dict, target) is given as keyword arguments if the forward takes them all, else as one
    argument; any other nest is one argument.

    Args:
        model: may be wrapped by torch.compile or DDP.
        inputs: of a batch, cast to the precision.
    """
    kind = type(inputs)
    # The test for a tensor costs ten times what the others do.
    if kind is PositionalInputs:
        return model(*inputs)
    if kind is not KeywordInputs and isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        names = _names_for(model, inputs)
        # A call with keywords makes a dict anyway; no other one is made for it.
        if names is not None and len(names) == len(inputs):
            return model(**inputs)
        if names is not None:
            return model(**{name: inputs[name] for name in names})
    return model(inputs)


def describe_call(model: nn.Module, inputs: Any) -> str:
    """Return how a batch that is not a single tensor reaches a model, in words; empty for one."""
    forward = f"{type(plain_module(model)).__name__}.forward"
    if type(inputs) is PositionalInputs:
        return f"{len(inputs)} inputs of a batch go to {forward} by position"
    if not isinstance(inputs, Mapping):
        return ""
    names = _names_for(model, inputs)
    if names is None:
        return f"the inputs of a batch go to {forward} as one dict: {', '.join(map(str, inputs))}"
    left_out = [str(name) for name in inputs if name not in names]
    unused = f"; not taken by it: {', '.join(left_out)}" if left_out else ""
    return f"{', '.join(names)} of a batch go to {forward}{unused}"


def takes_fields(model: nn.Module, inputs: Any) -> bool:
    """Return whether a model is given the inputs of a batch as keyword arguments."""
    return isinstance(inputs, Mapping) and _names_for(model, inputs) is not None


def taken_inputs(model: nn.Module, inputs: Any) -> Any:
    """Return the inputs of a batch without the fields that a model's forward does not take."""
    names = _names_for(model, inputs) if isinstance(inputs, Mapping) else None
    if names is None or type(inputs) is not KeywordInputs:
        return inputs
    return KeywordInputs({name: inputs[name] for name in names})


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch.compile and DDP."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _names_for(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names that are given as keywords; None where the dict is one argument."""
    # A signature takes 20 µs to read, in every step. A reference does not keep the model alive.
    return _taken_names(ref(model), type(inputs), tuple(inputs))


@lru_cache(maxsize=8)
def _taken_names(
    model: "ref[nn.Module]", kind: type, fields: tuple[str, ...]
) -> tuple[str, ...] | None:
    """Return what _names_for returns for a mapping of a type with these fields."""
    owner = model()
    assert owner is not None  # the caller holds it
    parameters = signature(plain_module(owner).forward).parameters
    if kind is KeywordInputs:
        # Of a dict batch, further fields are left out. A wrapper `forward(self, **inputs)` gets
        # every field, and `forward(self, inputs)` the dict. Hugging Face's models have names and
        # **kwargs, into which no other field belongs.
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        keywords = {name for name, p in parameters.items() if p.kind in kinds}
        names = tuple(name for name in fields if name in keywords)
        takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
        return names or (fields if takes_any else None)
    try:
        Signature([*parameters.values()]).bind(**dict.fromkeys(fields))
    except TypeError:
        return None
    return fields
