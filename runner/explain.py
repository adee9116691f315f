"""Hydra's and OmegaConf's complaints in our form: what you gave, what is allowed, what to type."""

from collections.abc import Sequence
from difflib import get_close_matches

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)


def explain(error: Exception, argv: Sequence[str]) -> str:
    """One clear message for a config that does not compose.

    Args:
        error: from Hydra or OmegaConf.
        argv: the command, to name the override as it was typed.
    """
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override} is not an override. Type key=value; {_first_line(error)}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return _unknown_key(cause, argv)
    if isinstance(cause, ValidationError):
        typed = _typed(str(cause.full_key), argv) or str(cause.full_key)
        return f"{typed}: {_first_line(cause)}."
    if isinstance(cause, InterpolationResolutionError):
        return f"{cause.full_key}: {_first_line(cause)}. Give it a value: {cause.full_key}=<value>."
    return str(error).strip()


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = [str(name) for name in error.options or ()]
    if not group or not options:
        return str(error).strip().replace("\n", " ")
    near = get_close_matches(option, options, 1, 0.3)
    hint = f" Type {group}={near[0]}." if near else ""
    return f"{group}={option} is not known. Allowed: {', '.join(options)}.{hint}"


def _unknown_key(error: OmegaConfBaseException, argv: Sequence[str]) -> str:
    full = str(error.full_key)
    parent, _, name = full.rpartition(".")
    node = error.parent_node
    keys = [str(key) for key in node] if node is not None else []  # type: ignore[union-attr]
    prefix = f"{parent}." if parent else ""
    near = get_close_matches(name, keys, 1, 0.5)
    hint = f" Type {prefix}{near[0]}=<value>." if near else ""
    known = ", ".join(f"{prefix}{key}" for key in keys) or "none"
    return f"{_typed(full, argv) or full} is not known. Allowed: {known}.{hint}"


def _typed(key: str, argv: Sequence[str]) -> str | None:
    return next((text for text in argv if text.lstrip("+~").startswith(f"{key}=")), None)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
