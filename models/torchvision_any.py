"""Any classification model of torchvision, by name."""

import difflib
from collections.abc import Sequence
from typing import Any

import torch
import torchvision
from torch import nn


def torchvision_any(name: str, classes: int, input_shape: Sequence[int]) -> nn.Module:
    """Build a torchvision classification model with random weights.

    Args:
        name: one of `torchvision.models.list_models(module=torchvision.models)`.
        classes: number of logits.
        input_shape: [channels, height, width]. With other than 3 channels the first convolution
            is replaced; its weights are drawn with the standard deviation of those it replaces.

    Returns:
        A module from float [B, channels, height, width] to logits [B, classes].

    Raises:
        ValueError: unknown name (close matches are listed), or an image size the model refuses.
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"{name} needs input_shape [channels, height, width], got {list(input_shape)}"
        )
    _check_name(name)
    channels, height, width = input_shape
    try:
        model = torchvision.models.get_model(
            name, weights=None, num_classes=classes, **_options(name, height, width)
        )
    except AssertionError as problem:  # torchvision's vision transformers check sizes so
        raise ValueError(f"{name} refuses images of {height} x {width}: {problem}") from problem
    if channels != 3:
        _adapt(model, channels)
    return model


def _check_name(name: str) -> None:
    """Raise ValueError, with close matches, for a model that torchvision does not have."""
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
        raise ValueError(
            f"torchvision has no classification model {name!r}; "
            f"{'close matches' if close else 'some of them'}: {', '.join(close or known[:5])}"
        )


def _options(name: str, height: int, width: int) -> dict[str, Any]:
    """Return the keywords that a family of models needs in addition to the number of classes."""
    if name in ("googlenet", "inception_v3"):
        # With auxiliary heads they return a tuple in training; init_weights unset is a warning.
        return {"aux_logits": False, "init_weights": True}
    if name.startswith(("vit_", "maxvit")):
        if height != width:
            raise ValueError(f"{name} needs square images, got {height} x {width}")
        if name.startswith("maxvit"):
            return {"input_size": (height, width)}
        return {"image_size": height}
    return {}


def _adapt(model: nn.Module, channels: int) -> None:
    """Replace the first convolution, in place, by one that takes this many channels."""
    name, old = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
    bias = old.bias is not None
    size: Any = (old.kernel_size, old.stride, old.padding, old.dilation)
    new = nn.Conv2d(channels, old.out_channels, *size, bias=bias)
    with torch.no_grad():
        new.weight.normal_().mul_(old.weight.std())
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    model.set_submodule(name, new)
