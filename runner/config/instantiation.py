"""Import and call the targets (`_target_`) of a config, as hydra.utils.instantiate does.

Hydra's own function does not fit: it drops `_args_` where the caller passes arguments first, copies
a whole config for each call, and reports every error as an InstantiationException of several lines.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from runner.utils.errors import ConfigError

CALL_KEYS = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
"""Hydra's keys of a node: what is called, and how."""

CONVERT_MODES = ("all", "partial", "object", "none")
"""Values of `_convert_`. A spec holds plain containers, so that the first three are the same; none
passes Hydra's own lists and mappings."""

_EXTRAS = {"torchmetrics": "metrics"}
"""Optional packages that targets of the user's may name, and the extra that installs each."""

# Keys of a group that describe it to the runner and are not passed to its target.
DESCRIPTIVE_KEYS = {"meta", "match", "shuffle"}


def target_arguments(node: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Return the keywords that a node passes to its target, as the config has them.

    Args:
        node: of a group, of one of several optimizers, or below a group.
        key: dotted key of the node. A node below a group (data.sampler) passes every keyword.
    """
    if "." in key and not key.startswith("optimizer."):
        return keywords(node)
    return {name: value for name, value in keywords(node).items() if name not in DESCRIPTIVE_KEYS}


def keywords(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a node below a group, as the config has them."""
    return {key: value for key, value in node.items() if key not in CALL_KEYS}


def is_target_node(value: Any) -> bool:
    """Return whether a value of a config is a node that is built before it is passed."""
    return isinstance(value, Mapping) and "_target_" in value


def locate(path: str) -> Callable[..., Any]:
    """Import and return the object at a dotted path.

    Raises:
        ConfigError: it does not import.
    """
    parts = path.split(".")
    # The longest module first: what follows may be a class, or an attribute of one.
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            # Only this path or a package of it is missing: try a shorter module. An import inside
            # the module that fails is an error to report.
            if error.name and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise ConfigError(f"{path} does not import: {error}.") from error
        except Exception as error:
            raise ConfigError(
                f"{path} does not import: {type(error).__name__}: {error}."
            ) from error
        for name in parts[length:]:
            if not hasattr(found, name):
                raise ConfigError(f"{path} does not import: {module_name} has no {name}.")
            found = getattr(found, name)
        return found
    extra = _EXTRAS.get(parts[0])
    raise ConfigError(
        f"{path} does not import: no module named {parts[0]} on the path. "
        + (
            f"Type pip install 'precision-runner[{extra}]'."
            if extra
            else "Write package.module.Name, importable from the folder you run in."
        )
    )


def instantiate(node: Mapping[str, Any], *leading: object, key: str = "") -> Any:
    """Call a group node's target, after the targets that are nested in its arguments.

    Args:
        node: with `_target_`, keywords, and any of Hydra's `_args_`, `_partial_`, `_convert_` and
            `_recursive_`.
        leading: arguments of the runner's, which are passed before `_args_` and the keywords.
        key: dotted key of the node, for messages.

    Raises:
        ConfigError: a target does not import, or a nested target refuses a value. What this node's
            own target raises is raised as it is.
    """
    # With arguments of the runner's the call is the one that `_partial_` leaves to the program.
    is_partial = node.get("_partial_", False) and not leading
    return _call(key, {**node, "_partial_": is_partial}, target_arguments(node, key), leading)


def refusal(key: str, node: Mapping[str, Any], error: Exception) -> ConfigError:
    """Return the error for a target that refuses its arguments."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError | ImportError):
        return ConfigError(f"{key}: {node['_target_']} fails: {type(error).__name__}: {text}")
    return ConfigError(f"{key}: {node['_target_']} refuses its arguments: {text}")


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors by which targets refuse values.

    OSError is that of a path that cannot be read, ImportError that of a missing package.
    """
    # The configs of transformers check their values by an error of their own, outside these.
    hub_errors = sys.modules.get("huggingface_hub.errors")
    strict = getattr(hub_errors, "StrictDataclassError", ValueError)
    return TypeError, ValueError, OSError, ImportError, strict


def _call(
    key: str,
    node: Mapping[str, Any],
    arguments: Mapping[str, Any],
    leading: tuple[object, ...] = (),
    convert: str = "all",
) -> Any:
    """Call a node's target, or return its functools.partial.

    Args:
        key: dotted key of the node.
        node: with Hydra's keys.
        arguments: keywords, not built yet.
        leading: positional arguments before those of `_args_`.
        convert: `_convert_` of the nodes above this one.
    """
    target = locate(node["_target_"])
    positional = list(node.get("_args_") or ())
    passed = dict(arguments)
    convert = node.get("_convert_", convert)
    if node.get("_recursive_", True):
        positional = _built_items(_joined(key, "_args_"), positional, convert)
        passed = _built_mapping(key, passed, convert)
    elif convert == "none":
        positional = [_configured(item) for item in positional]
        passed = {name: _configured(value) for name, value in passed.items()}
    if node.get("_partial_", False):
        return partial(target, *leading, *positional, **passed)
    return target(*leading, *positional, **passed)


def _built(key: str, value: Any, convert: str) -> Any:
    """Return a value of a config with an object in place of each node that has a `_target_`."""
    if is_target_node(value):
        try:
            return _call(key, value, keywords(value), convert=convert)
        except refusals() as error:
            raise refusal(key, value, error) from error
    if isinstance(value, Mapping):
        value = _built_mapping(key, value, convert)
    elif isinstance(value, list):
        value = _built_items(key, value, convert)
    return _configured(value) if convert == "none" else value


def _built_mapping(key: str, values: Mapping[Any, Any], convert: str) -> dict[Any, Any]:
    return {name: _built(_joined(key, name), value, convert) for name, value in values.items()}


def _built_items(key: str, items: Sequence[Any], convert: str) -> list[Any]:
    return [_built(f"{key}[{i}]", item, convert) for i, item in enumerate(items)]


def _configured(value: Any) -> Any:
    """Return a list or mapping as Hydra's own kind, and any other value as it is."""
    if isinstance(value, list | dict):
        return OmegaConf.create(value, flags={"allow_objects": True})
    return value


def _joined(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)
