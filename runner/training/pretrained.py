"""Say where a model's weights come from, and keep the libraries that load them from unpickling."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pickle import UnpicklingError
from typing import Any

from runner.config.targets import locate, target_arguments
from runner.utils.errors import ConfigError
from runner.utils.files import tensors_only

_LOADING_KEYWORDS = (
    "pretrained",
    "weights",
    "weights_backbone",
    "checkpoint_path",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "path",
)
"""Keywords by which timm, torchvision and the models of the runner load weights."""
_KNOWN_PACKAGES = ("runner.models.", "timm.", "torchvision.models.")
"""Packages whose models load weights only where one of these keywords asks for it."""
_LIBRARIES = (*_KNOWN_PACKAGES, "peft.", "transformers.")
"""Packages whose files of weights hold tensors and plain containers alone."""


def starts_random(node: Mapping[str, Any]) -> bool:
    """Return whether a model's weights are known to be random.

    They are for a model of the runner, timm or torchvision that is not asked to load any. False
    claims nothing: transformers' from_pretrained and a user's own code load weights in ways that
    the node does not show.

    Args:
        node: the model's config node, with its `_target_`.
    """
    target = str(node.get("_target_", ""))
    if "_args_" in node:
        return False  # one of them may be `pretrained`
    return target.startswith(_KNOWN_PACKAGES) and not any(
        _is_true(node, target, key) for key in _LOADING_KEYWORDS
    )


@contextmanager
def safe_loading(node: Mapping[str, Any]) -> Iterator[None]:
    """Have the library that builds a model unpickle nothing but tensors and plain containers.

    One's own code reads its files as it says.

    Args:
        node: the model's config node, with its `_target_`.

    Raises:
        ConfigError: a file of weights holds more.
    """
    target = str(node.get("_target_", ""))
    if not target.startswith(_LIBRARIES):
        yield
        return
    try:
        with tensors_only():
            yield
    except (UnpicklingError, RuntimeError) as error:
        # timm raises an error of its own from torch's.
        if not isinstance(error.__cause__ or error, UnpicklingError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: {target} loads a file that holds more than tensors, and a pickle is not "
            f"executed here. Where you trust it, save its state_dict() with "
            f"safetensors.torch.save_file. (torch: {reason})"
        ) from error


def _is_true(node: Mapping[str, Any], target: str, key: str) -> bool:
    """Return whether a keyword is true, by the target's default where the node lacks it."""
    # torchvision's detection models load their backbone unless weights_backbone=None is given.
    if key in target_arguments(node):
        return bool(node[key])
    try:
        known = signature(locate(target)).parameters
    except (ConfigError, TypeError, ValueError):
        return False
    return key in known and bool(known[key].default)
