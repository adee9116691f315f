"""Import, check and call the targets (`_target_`) of a config, as hydra.utils.instantiate does.

Hydra's own function does not fit: it drops `_args_` where the caller passes arguments first, copies
a whole config for each call, and reports every error as an InstantiationException of several lines.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, TypeGuard, get_type_hints

from omegaconf import OmegaConf

from runner.core.base.annotations import BUILT, fits_type
from runner.core.base.errors import ConfigError
from runner.core.base.fmt import annotation_words, typed_value


def is_target_node(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value of a config is a node whose target is called."""
    return isinstance(value, Mapping) and "_target_" in value


CALL_KEYS = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")
"""Hydra's keys of a node: what is called, and how."""

CONVERT_MODES = ("all", "partial", "object", "none")
"""Values of `_convert_`. A spec holds plain containers, so that the first three are the same; none
passes Hydra's own lists and mappings."""

_EXTRAS = {"torchmetrics": "metrics"}
"""Optional packages that targets of the user's may name, and the extra that installs each."""

# Keywords that transformers' configs take without a field, a property or an alias of that name.
_TRANSFORMERS_KEYWORDS = (
    *("attn_implementation", "experts_implementation", "per_layer_config"),
    *("rope_theta", "partial_rotary_factor"),
)
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

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


_NEW_PLACES = {
    "distributed.strategy.": "core.loop.strategy.",
    "distributed.": "training.strategies.",
    "tracking.tracker.": "core.record.tracker.",
}
"""Where the targets of saved configs are now, by how they begin; all of the package runner."""


def _new_place(path: str) -> str:
    """Return a sentence on where a target of the runner is now; empty for one that did not move."""
    for old, new in _NEW_PLACES.items():
        if path.startswith(f"runner.{old}"):
            place = path.replace(old, new, 1)
            return f" It is now {place}: write that in its place."
    return ""


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
                raise ConfigError(
                    f"{path} does not import: {module_name} has no {name}.{_new_place(path)}"
                )
            found = getattr(found, name)
        return found
    remedy = "Write package.module.Name, importable from the folder you run in."
    if parts[0] in _EXTRAS:
        remedy = f"Type pip install 'precision-runner[{_EXTRAS[parts[0]]}]'."
    raise ConfigError(f"{path} does not import: no module named {parts[0]} on the path. {remedy}")


@dataclass(frozen=True)
class Arguments:
    """Arguments that a config node passes to its target.

    Attributes:
        key: dotted key of the node.
        path: of the target.
        items: those of `_args_`.
        keywords: by name.
        leading: number of arguments that the runner passes first.
        is_partial: True if the target is called later, with more arguments.
    """

    key: str
    path: str
    items: Sequence[Any]
    keywords: Mapping[str, Any]
    leading: int
    is_partial: bool

    def problems(self, target: Any) -> Iterator[str]:
        """Yield a message for each argument that the target does not take, lacks or cannot use."""
        if not callable(target):
            kind = type(target).__name__
            yield f"{self.key}._target_={self.path} is a {kind}, not a class or function."
            return
        try:
            named = dict(signature(target).parameters)
        except (TypeError, ValueError):
            # A builtin without a signature: its own call reports wrong arguments.
            return
        # The parameters that the runner fills come first; but ChainedScheduler takes the optimizer
        # behind its schedules, by its name.
        parameters = [*named.values()]
        rest = parameters[self.leading :]
        if self.key.startswith("scheduler") and "optimizer" in [*named][1:]:
            del named["optimizer"]
            rest = [*named.values()]
        names = [p.name for p in rest if p.kind in _BY_POSITION]
        filled = dict(zip(names, self.items, strict=False))
        if len(self.items) > len(names) and not _takes_any(parameters, "*"):
            limit = f"no more than {len(names)} by position: {', '.join(names) or 'none'}"
            yield f"{self.key}._args_={list(self.items)}: {self.path} takes {limit}."
        yield from self._keyword_problems(target, rest, filled)
        yield from self._type_problems(target, rest, filled)

    def _keyword_problems(
        self, target: Any, parameters: Sequence[Parameter], filled: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message for each keyword too many and each that is missing.

        Args:
            target: that is called.
            parameters: of the target, without those that the runner fills.
            filled: names that `_args_` fills, with their values.
        """
        defaults = {p.name: p.default for p in parameters if p.kind in _BY_KEYWORD}
        takes_any_keyword = _takes_any(parameters, "**")
        for name, value in self.keywords.items():
            if name in filled:
                yield f"{self.key}.{name}={value}: _args_ gives {name}, too. Leave one of them out."
            elif not (name in defaults or takes_any_keyword or _is_config_keyword(target, name)):
                leading = [*signature(target).parameters][: self.leading]
                yield self._unknown_keyword(name, value, leading, list(defaults))
        given = {*self.keywords, *filled}
        for name, default in defaults.items():
            if default is Parameter.empty and name not in given and not self.is_partial:
                addition = f"Type +{self.key}.{name}=<value>."
                # Hydra's overrides reach into mappings, not into lists.
                if "[" in self.key:
                    addition = f"Add {name}: <value> to that item in the yaml."
                yield f"{self.key}.{name} is needed by {self.path}. {addition}"

    def _unknown_keyword(
        self, name: str, value: Any, leading: Sequence[str], known: Sequence[str]
    ) -> str:
        """Return the message for a keyword that the target does not take, or the runner passes."""
        text = f"{self.key}.{name}={value}: the runner passes {name} of {self.path} itself"
        if name in leading and self.key != "data.sampler":
            return f"{text}. Leave it out."
        if name in leading:
            return f"{text}, the training set. Name a function that takes it (docs/own-code.md)."
        # r of rank, lora_alpha of alpha; in a short list a misspelt name is seen without help.
        similar = [each for each in known if each.startswith(name) or name.endswith(f"_{each}")]
        if len(known) > 10:
            similar += get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f" Write {similar[0]} in place of {name}." if similar else ""
        takes = ", ".join(known)
        return f"{self.key}.{name}={value}: {self.path} takes no {name}. It takes: {takes}.{hint}"

    def _type_problems(
        self, target: Any, parameters: Sequence[Parameter], filled: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message for each value that does not fit the target's annotation.

        Args:
            target: that is called.
            parameters: of the target, without those that the runner fills.
            filled: names that `_args_` fills, with their values.
        """
        hints = _type_hints(target)
        defaults = {parameter.name: parameter.default for parameter in parameters}
        for name, value in {**filled, **self.keywords}.items():
            # Users write `width: int = None`: a null that is the default fits whatever is
            # annotated. The runner puts the run's length in place of a scheduler's null.
            is_default = value is None and defaults.get(name) is None
            is_length = value is None and self.key.startswith("scheduler")
            if name not in hints or is_default or is_length:
                continue
            if not fits_type(_with_built(value), hints[name]):
                is_text = " is text" if isinstance(value, str) else " does not fit"
                allowed = annotation_words(hints[name])
                yield f"{self.key}.{name}={typed_value(value)}{is_text}. Allowed: {allowed}."


def _takes_any(parameters: Sequence[Parameter], stars: str) -> bool:
    """Return whether a target takes any number of items (`*`) or keywords (`**`)."""
    kind = {"*": Parameter.VAR_POSITIONAL, "**": Parameter.VAR_KEYWORD}[stars]
    return any(parameter.kind is kind for parameter in parameters)


def _is_config_keyword(target: Any, name: str) -> bool:
    """Return whether a config class of transformers takes a keyword that its signature lacks."""
    # These classes keep any other keyword as an attribute that no model reads: a typing error
    # would train another model than the one that was asked for.
    aliases = getattr(target, "attribute_map", None)
    if not isinstance(aliases, Mapping):
        return False
    return name in aliases or name in _TRANSFORMERS_KEYWORDS or hasattr(target, name)


def _type_hints(target: Any) -> dict[str, Any]:
    """Return the annotations of a target's parameters, as far as they can be evaluated."""
    called = target.__init__ if isinstance(target, type) else target
    try:
        return get_type_hints(called)
    except Exception:
        # One annotation that cannot be evaluated, as a name imported under TYPE_CHECKING, makes
        # get_type_hints raise for all of them. Those that are no text need no evaluation; values
        # of the others are judged by the target's own call.
        hints = getattr(called, "__annotations__", {})
        return {name: hint for name, hint in hints.items() if not isinstance(hint, str)}


def _with_built(value: Any) -> Any:
    """Return a value with BUILT in place of each node that is built before it is passed."""
    if is_target_node(value):
        return BUILT
    if isinstance(value, Mapping):
        return {name: _with_built(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_built(item) for item in value]
    return value


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
    # A call with the runner's arguments is the one that `_partial_` leaves to the program.
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
