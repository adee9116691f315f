"""Any image model of timm, by name, with random weights or those of a local file."""

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch import nn

# The type checker does not know that setuptools puts models/ into runner/.
from runner.models.torchvision_any import load_except_head  # pyright: ignore[reportMissingImports]


def timm_any(
    name: str,
    classes: int,
    input_shape: Sequence[int],
    checkpoint_path: str | None = None,
    weights: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a timm model; nothing is downloaded.

    Args:
        name: as timm.list_models() lists it.
        classes: number of logits.
        input_shape: [channels, height, width]; vision transformers are built for this size.
        checkpoint_path: a local file of weights that timm reads (.safetensors, .pth), of a model
            with as many classes.
        weights: a state dict, .pth (of tensors alone) or .safetensors. A head for another number
            of classes keeps its random weights, which a line of the log says.
        options: further keywords of timm.create_model.

    Returns:
        A module from float [B, channels, height, width] to logits [B, classes].

    Raises:
        ValueError: timm is not installed, or the name, the file or an option cannot be used.
    """
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            "timm is not installed here. Type pip install 'precision-runner[timm]'"
        ) from error
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.4)
        hint = f"close matches: {', '.join(close)}" if close else "see timm.list_models()"
        raise ValueError(f"timm has no model {name!r}; {hint}")
    if checkpoint_path is not None and not Path(checkpoint_path).is_file():
        raise ValueError(f"checkpoint_path={checkpoint_path} is no file")
    if len(input_shape) != 3:
        raise ValueError(f"input_shape={input_shape} is no [channels, height, width]")
    if classes < 0:
        raise ValueError(f"classes={classes} is no number of logits. Allowed: 0 and up")
    model = _made(name, classes, input_shape, options or {})
    if checkpoint_path is not None:
        _load_checkpoint(model, name, checkpoint_path)
    if weights is not None:
        other = partial(_made, name, classes + 1, input_shape, options or {})
        load_except_head(model, weights, other)
    return model


def _made(
    name: str, classes: int, input_shape: Sequence[int], options: Mapping[str, Any]
) -> nn.Module:
    """Return a model with random weights."""
    import timm

    channels, height, width = input_shape
    keywords = {"num_classes": classes, "in_chans": channels, **options}
    try:
        if "img_size" not in keywords:
            # Models with weights for each position take the size of their images, others refuse it.
            with suppress(TypeError):
                sized = {**keywords, "img_size": (height, width)}
                return timm.create_model(name, pretrained=False, **sized)
        return timm.create_model(name, pretrained=False, **keywords)
    except (RuntimeError, AssertionError) as error:
        first_lines = " ".join(str(error).split("\n")[:2])
        raise ValueError(f"timm cannot build {name}: {first_lines}") from error


def _load_checkpoint(model: nn.Module, name: str, file: str) -> None:
    """Load a file of weights as timm does; nothing in it is executed."""
    from timm.models import load_checkpoint

    try:
        # Said here: what timm does by default differs between its versions.
        load_checkpoint(model, file, weights_only=True)
    except (UnpicklingError, EOFError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"checkpoint_path={file} cannot be read as tensors alone: {reason}. Write one with "
            "torch.save(model.state_dict(), path), or as .safetensors"
        ) from error
    except RuntimeError as error:
        first_lines = " ".join(str(error).split("\n")[:2])
        raise ValueError(f"timm cannot build {name}: {first_lines}") from error
