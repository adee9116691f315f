"""Give lazy layers (nn.LazyLinear, nn.LazyConv2d, ...) their shapes before anything else is done.

torch makes their parameters in the first forward. Here that would be after the conversion, in the
precision's dtype and so with other numbers than in float32, and after the optimizers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from runner.config.schema import RunSpec
from runner.data.build import build_data, build_run_loaders
from runner.precision.casting import cast_nest
from runner.training.example_batch import ForecastUnavailable, example_batch
from runner.training.model_call import call_model
from runner.utils.errors import ConfigError, RunnerError

_CPU = torch.device("cpu")
_EXAMPLES = 2  # in the first forward


def materialize_lazy_layers(spec: RunSpec, model: nn.Module, device: torch.device) -> None:
    """Make the parameters of a model's lazy layers by one forward in evaluation mode.

    A model without such layers is not changed, and computes nothing.

    Args:
        spec: gives the inputs: its data's first examples, in mode=plan random numbers in the shapes
            of data.meta.
        model: not converted yet; changed in place.
        device: where its parameters are.

    Raises:
        ConfigError: no example can be had, the forward fails or does not reach every lazy layer.
        NotImplementedError: the forward fails on the meta device.
    """
    if not any(map(is_lazy, _tensors(model))):
        return
    inputs = _example(spec, device, _names(model))
    inputs = cast_nest(inputs, _dtype(model))
    try:
        with torch.no_grad(), _evaluating(model):
            call_model(model, inputs)
    except RunnerError:
        raise
    except Exception as error:
        if device.type == "meta":
            raise NotImplementedError("lazy layers of this model need real numbers") from error
        shape = list(getattr(inputs, "shape", [])) or type(inputs).__name__
        raise ConfigError(
            f"model: the lazy layers {_names(model)} take their sizes from a first forward, which "
            f"fails on inputs {shape}: {type(error).__name__}: {error}. Give these "
            "layers their sizes (nn.Linear in place of nn.LazyLinear), or type a data= whose "
            "examples the model takes."
        ) from error
    if any(map(is_lazy, _tensors(model))):
        raise ConfigError(
            f"model: the lazy layers {_names(model)} are not called by a forward in evaluation "
            "mode, from which they would take their sizes. Give them their sizes (nn.Linear in "
            "place of nn.LazyLinear)."
        )


def _tensors(module: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    return chain(module.parameters(recurse), module.buffers(recurse))


def _names(model: nn.Module) -> str:
    """Return the names of the layers that are still lazy, three at most, for messages."""
    found = [
        name or "(the model itself)"
        for name, module in model.named_modules()
        if any(map(is_lazy, _tensors(module, recurse=False)))
    ]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{', '.join(found[:3])}{more}"


def _dtype(model: nn.Module) -> torch.dtype:
    dtypes = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    return next(dtypes, torch.get_default_dtype())


def _example(spec: RunSpec, device: torch.device, names: str) -> Any:
    """Return inputs of a few examples, on the device."""
    # The data may draw random numbers, and the weights of the layers are drawn after it: without
    # the fork the weights would depend on what the data draws.
    with torch.random.fork_rng(devices=[]):
        # mode=plan promises to need no data.
        if spec.mode == "plan":
            try:
                return example_batch(spec, _EXAMPLES, device)[0]
            except ForecastUnavailable as error:
                raise ConfigError(
                    f"model: the lazy layers {names} take their sizes from an example: {error} "
                    "Type data.meta.input and data.meta.classes, or give these layers their sizes."
                ) from error
        # No workers for two examples, and no data set moved to the device.
        few = replace(spec.train, batch_size=_EXAMPLES, num_workers=0, data_on_device=False)
        loader = build_run_loaders(replace(spec, train=few), build_data(spec), _CPU).train
        inputs, _ = next(loader.epoch(0))
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put modules in evaluation mode, where norms keep their statistics; restore it after."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
