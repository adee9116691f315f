"""Any classification, detection, segmentation or video model of torchvision, by name."""

import difflib
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import detection, segmentation, video

log = logging.getLogger(__name__)

_KINDS = (torchvision.models, detection, segmentation, video)
_OWN_OPTIONS: Mapping[str, str] = {
    "weights": "model.weights=<a local file>",
    "weights_backbone": "model.weights=<a local file>",
    "num_classes": "model.classes=<number>",
    "trainable_backbone_layers": "train.freeze=[backbone] or other patterns of names",
}
"""Keywords of torchvision that model.options may not hold, and what to type instead."""
_IGNORE_OPTIONS = ("torchvision.models.detection.", "torchvision.models.segmentation.")
"""Modules of torchvision whose models take any keyword, and ignore those that they do not know."""
_AUXILIARY_HEADS: Mapping[str, tuple[str, ...]] = {
    "googlenet": ("aux1.", "aux2."),
    "inception_v3": ("AuxLogits.",),
}
"""Starts of the names of weights that a model is built without, because its training would return
a tuple with them."""


_MOST_NAMED = 5
"""Names of weights in a message, at most."""


def torchvision_any(
    name: str,
    classes: int,
    input_shape: Sequence[int] | None = None,
    weights: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a torchvision model, with random weights or those of a local file; nothing is
    downloaded.

    Args:
        name: one of `torchvision.models.list_models()` that has classes: detection and
            segmentation included.
        classes: number of logits. Detection models count the background among them, as
            torchvision documents for each.
        input_shape: [channels, height, width]; None for 3 channels where the model needs no size.
            With other than 3 channels the first convolution is replaced; its weights are drawn
            with the standard deviation of those it replaces.
        weights: a state dict, .pth (of tensors alone) or .safetensors. A head for another number
            of classes keeps its random weights, which a line of the log says.
        options: further keywords of the model's builder, as {min_size: 320} of a detection model
            or {aux_loss: true} of a segmentation model.

    Returns:
        A module from float [B, channels, height, width] to logits [B, classes]; of segmentation to
        {"out": logits [B, classes, height, width], ...}; of detection from a list of images
        [channels, height, width] and, in training, a list of targets to a dict of losses.

    Raises:
        ValueError: unknown name (close matches are listed), an image size or an option that the
            model refuses, or weights that do not fit it.
    """
    options = dict(options or {})
    _check_options(options)
    kind = _kind(name)
    builder = torchvision.models.get_model_builder(name)
    channels = _channels(name, kind, input_shape, options)
    keywords = {**_options(name, builder, input_shape), **options}
    make = partial(_make, name, builder, keywords, channels)
    model = make(classes)
    _check_taken(name, builder, type(model), options)
    if weights is not None:
        left_out = _AUXILIARY_HEADS.get(name, ())
        # The head is what has other shapes in a model of other classes.
        load_except_head(model, weights, lambda: make(classes + 1), left_out)
    return model


def _check_options(options: Mapping[str, Any]) -> None:
    for key, instead in _OWN_OPTIONS.items():
        if key in options:
            raise ValueError(f"options.{key}={options[key]} is not an option. Type {instead}")


def _check_taken(name: str, builder: Any, model_class: type, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that torchvision's **keywords take and ignore."""
    known = {*signature(builder).parameters}
    if name.startswith("mobilenet_v3"):
        known |= {"width_mult", "reduced_tail", "dilated"}
    elif not model_class.__module__.startswith(_IGNORE_OPTIONS):
        return  # the class has refused what it does not know
    if model_class.__module__.startswith("torchvision.models.detection."):
        for base in model_class.__mro__:
            known |= {*signature(base.__init__).parameters}
    unknown = [key for key in options if key not in known]
    if unknown:
        taken = sorted(known - {*_OWN_OPTIONS, "self", "args", "kwargs", "progress", "backbone"})
        raise ValueError(
            f"{name} takes no options {', '.join(unknown)}. It takes {', '.join(taken)}"
        )


def _kind(name: str) -> Any:
    """Return the module of torchvision that lists a model.

    Raises:
        ValueError: torchvision has no such model, or it has no classes; close matches are listed.
    """
    known: dict[str, Any] = {}
    for kind in _KINDS:
        known |= dict.fromkeys(torchvision.models.list_models(module=kind), kind)
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    raise ValueError(
        f"torchvision has no model of images or videos with classes {name!r}; "
        f"{'close matches' if close else 'some of them'}: {', '.join(close or [*known][:5])}"
    )


def _channels(
    name: str, kind: Any, input_shape: Sequence[int] | None, options: Mapping[str, Any]
) -> int:
    """Return the channels of an input, after a check of its shape."""
    axes = "[channels, frames, height, width]" if kind is video else "[channels, height, width]"
    if input_shape is None and kind in (detection, segmentation):
        return 3
    if input_shape is None or len(input_shape) != len(axes.split(",")):
        shape = None if input_shape is None else list(input_shape)
        raise ValueError(
            f"{name} needs input_shape {axes}, got {shape}. Type data.meta.input=[3,32,32]"
        )
    channels = input_shape[0]
    if kind is detection and channels != 3 and "image_mean" not in options:
        raise ValueError(
            f"{name} normalises images of 3 channels itself, and these have {channels}. Type "
            "model.options={image_mean: [...], image_std: [...]} with a number for each"
        )
    return channels


def _options(name: str, builder: Any, input_shape: Sequence[int] | None) -> dict[str, Any]:
    """Return the keywords that a family of models needs in addition to the number of classes."""
    if "weights_backbone" in signature(builder).parameters:
        return {"weights_backbone": None}  # by default that of ImageNet, which is downloaded
    if name in ("googlenet", "inception_v3"):
        # With auxiliary heads they return a tuple in training; init_weights unset is a warning.
        return {"aux_logits": False, "init_weights": True}
    if not name.startswith(("vit_", "maxvit")):
        return {}
    assert input_shape is not None
    height, width = input_shape[1:]
    if height != width:
        raise ValueError(f"{name} needs square images, got {height} x {width}")
    if name.startswith("maxvit"):
        return {"input_size": (height, width)}
    return {"image_size": height}


def _make(
    name: str, builder: Any, keywords: Mapping[str, Any], channels: int, classes: int
) -> nn.Module:
    """Return a model with random weights."""
    try:
        model = builder(weights=None, num_classes=classes, **keywords)
    except AssertionError as problem:  # torchvision's vision transformers check sizes so
        size = keywords.get("image_size") or keywords.get("input_size")
        height, width = size if isinstance(size, tuple) else (size, size)
        raise ValueError(f"{name} refuses images of {height} x {width}: {problem}") from problem
    except (TypeError, ValueError) as problem:
        typed = {key: value for key, value in keywords.items() if key not in _OWN_OPTIONS}
        raise ValueError(
            f"torchvision cannot build {name} with options={typed}: {problem}. It takes "
            f"{_taken(builder)}"
        ) from problem
    if channels != 3:
        _adapt(model, channels)
    return model


def _taken(builder: Any) -> str:
    """Return the names of a builder's options, in words."""
    parameters = signature(builder).parameters.values()
    named = [p.name for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
    names = [name for name in named if name not in (*_OWN_OPTIONS, "progress")]
    return ", ".join([*names, "the keywords of the class that it builds"])


def _adapt(model: nn.Module, channels: int) -> None:
    """Replace the first convolution, in place, by one that takes this many channels."""
    convolutions = (nn.Conv2d, nn.Conv3d)
    name, old = next((n, m) for n, m in model.named_modules() if isinstance(m, convolutions))
    bias = old.bias is not None
    size: Any = (old.kernel_size, old.stride, old.padding, old.dilation)
    new = type(old)(channels, old.out_channels, *size, bias=bias)
    with torch.no_grad():
        new.weight.normal_().mul_(old.weight.std())
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    model.set_submodule(name, new)


def load_except_head(
    model: nn.Module, file: str, other_head: Callable[[], nn.Module], left_out: Sequence[str] = ()
) -> None:
    """Copy the weights of a local file into a model; nothing is downloaded.

    A head for another number of classes keeps the weights that it has, which a line of the log
    says.

    Args:
        model: changed in place.
        file: a state dict, .pth (of tensors alone) or .safetensors.
        other_head: makes the model with a head of another size: the weights that have another
            shape in it are those of the head. It is called where a shape differs.
        left_out: starts of the names in the file that the model is built without.

    Raises:
        ValueError: the file cannot be read, or it has other names or shapes than the model.
    """
    saved = _without(_read_weights(file), left_out)
    own = model.state_dict()
    differing = [name for name in saved if name in own and saved[name].shape != own[name].shape]
    head = _head_names(own, other_head) if differing else set()
    problems: list[str] = []
    for name in differing:
        if name not in head:
            here = list(own[name].shape)
            problems.append(f"{name} has the shape {list(saved[name].shape)}, and here {here}")
    result = model.load_state_dict(
        {name: value for name, value in saved.items() if name not in {*head, *differing}},
        strict=False,
    )
    missing = [name for name in result.missing_keys if name not in {*head, *differing}]
    if missing:
        problems.append(f"it lacks {_listed(missing)}")
    if result.unexpected_keys:
        problems.append(f"the model has no {_listed(result.unexpected_keys)}")
    if problems:
        raise ValueError(
            f"weights={file} do not fit the model: {'; '.join(problems)}. Give a file of this "
            "model, or the model.name= and model.options= that it was made with"
        )
    if head:
        log.warning(
            "model.weights: the head keeps its random weights, because the file's is for other "
            "classes: %s",
            _listed(sorted(head)),
        )


def _read_weights(file: str) -> dict[str, Tensor]:
    """Return the tensors of a local file by name; nothing in it is executed.

    Raises:
        ValueError: it is missing, or holds something else.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"weights={file} is no file. Give a local .pth or .safetensors")
    found: Any
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"weights={file} cannot be read: {error}") from error
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            first_line = str(error).split("\n")[0]
            raise ValueError(
                f"weights={file} cannot be read as tensors alone: {first_line}. Write one with "
                "torch.save(model.state_dict(), path), or as .safetensors"
            ) from error
    is_state = isinstance(found, Mapping) and all(isinstance(v, Tensor) for v in found.values())
    if not (is_state and found):
        keys = f" with the keys {_listed(list(map(str, found)))}" if hasattr(found, "keys") else ""
        raise ValueError(
            f"weights={file} holds a {type(found).__name__}{keys}, no state dict: tensors by "
            "name. Write one with torch.save(model.state_dict(), path)"
        )
    return dict(found)


def _without(saved: Mapping[str, Tensor], starts: Sequence[str]) -> dict[str, Tensor]:
    kept = {name: value for name, value in saved.items() if not name.startswith(tuple(starts))}
    if len(kept) < len(saved):
        log.warning(
            "model.weights: %s of the file are left out, which the model is built without",
            _listed([name for name in saved if name not in kept]),
        )
    return kept


def _head_names(own: Mapping[str, Tensor], other_head: Callable[[], nn.Module]) -> set[str]:
    """Return the names of the weights whose shapes depend on the number of classes."""
    with torch.device("meta"):
        other = other_head().state_dict()
    return {name for name in own if own[name].shape != other[name].shape}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
