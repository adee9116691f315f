"""Import, check and call the targets (`_target_`) of a config."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from runner.config.loading_keys import data_target_node, loading_nodes, task_nodes
from runner.config.renamed import current_path
from runner.config.schema import RunSpec
from runner.utils.errors import ConfigError

# Number of arguments that the runner passes before the keywords, by group: the parameters to an
# optimizer, the optimizer to a scheduler.
LEADING_ARGUMENT_COUNTS = {"optimizer": 1, "scheduler": 1}

# Keys of a group that describe it to the runner and are not passed to its target.
DESCRIPTIVE_KEYS = {"_target_", "meta", "match", "shuffle"}

RUNNER_KEYS = {
    "optimizer": ("groups", "no_decay_on", "layer_decay"),
    "scheduler": ("warmup",),
}
"""Keys that the runner reads and does not pass to the target, by group."""

# Groups that every run needs; a scheduler or an adapter may be none.
REQUIRED_GROUPS = ("strategy", "precision", "model", "data", "task", "optimizer", "tracking")


def target_arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a group node passes to its target."""
    return {key: value for key, value in node.items() if key not in DESCRIPTIVE_KEYS}


def runner_keys(group: str, target: Any) -> set[str]:
    """Return the keys of RUNNER_KEYS that a target does not take itself, by a parameter's name."""
    try:
        own = signature(target).parameters
    except (TypeError, ValueError):
        return set(RUNNER_KEYS.get(group, ()))
    return {key for key in RUNNER_KEYS.get(group, ()) if key not in own}


def without_runner_keys(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's node with a target, without the keys that the runner reads."""
    keys = runner_keys(group, locate(node["_target_"]))
    return {key: value for key, value in node.items() if key not in keys}


def locate(path: str) -> Callable[..., Any]:
    """Import and return the object at a dotted path.

    Raises:
        ConfigError: it does not import.
    """
    parts = current_path(path).split(".")
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
    raise ConfigError(
        f"{path} does not import: no module named {parts[0]} on the path. "
        "Write package.module.Name, importable from the folder you run in."
    )


def instantiate(node: Mapping[str, Any], *leading: object) -> Any:
    """Call a group node's target with what the runner passes first and the node's keywords."""
    return locate(node["_target_"])(*leading, **target_arguments(node))


def target_nodes(spec: RunSpec) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield each node of a spec with a target: its dotted key, the node, its leading arguments."""
    for part in fields(RunSpec):
        node = getattr(spec, part.name)
        if not isinstance(node, dict):
            continue
        leading = LEADING_ARGUMENT_COUNTS.get(part.name, 0)
        if part.name == "data":
            yield from loading_nodes(node)
            node = data_target_node(node)
        if part.name == "task":
            yield from task_nodes(node)
        if "_target_" in node:
            yield part.name, node, leading
            # Schedules of schedules, each of which is called with the optimizer.
            if part.name == "scheduler" and isinstance(node.get("schedulers"), list):
                yield from _nested_schedules(part.name, node["schedulers"])
            continue
        # Several optimizers, each under a name of its own.
        for key, child in node.items():
            if isinstance(child, dict) and "_target_" in child:
                yield f"{part.name}.{key}", child, leading


def _nested_schedules(
    key: str, parts: Iterable[Any]
) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Yield target_nodes' rows of the schedules in a list, at any depth."""
    for i, part in enumerate(parts):
        if isinstance(part, Mapping) and "_target_" in part:
            name = f"{key}.schedulers.{i}"
            yield name, part, LEADING_ARGUMENT_COUNTS["scheduler"]
            if isinstance(part.get("schedulers"), list):
                yield from _nested_schedules(name, part["schedulers"])


def check_targets(spec: RunSpec) -> list[str]:
    """Return a message for each target that does not import and each argument that does not fit."""
    present = {key.partition(".")[0] for key, _, _ in target_nodes(spec)}
    empty = [key for key in REQUIRED_GROUPS if key not in present]
    problems = [f"{key} has no _target_. Type {key}=<option>." for key in empty]
    for key, node, leading in target_nodes(spec):
        path = node["_target_"]
        if path is None and key not in REQUIRED_GROUPS:
            continue
        if not isinstance(path, str):
            problems.append(f"{key}._target_={path} is no path. Write package.module.Name.")
            continue
        try:
            target = locate(path)
        except ConfigError as error:
            problems += [f"{key}._target_={problem}" for problem in error.problems]
            continue
        own_node = without_runner_keys(key.partition(".")[0], node)
        problems += _argument_problems(key, own_node, target, leading)
    return problems


def _argument_problems(
    key: str, node: Mapping[str, Any], target: Any, leading: int
) -> Iterator[str]:
    if not callable(target):
        kind = type(target).__name__
        yield f"{key}._target_={node['_target_']} is a {kind}, not a class or function."
        return
    try:
        every = list(signature(target).parameters.values())
        is_behind = key.startswith("scheduler") and "optimizer" in [p.name for p in every[1:]]
        # ChainedScheduler takes the optimizer behind its schedules, by its name.
        parameters = [p for p in every if p.name != "optimizer"] if is_behind else every[leading:]
    except (TypeError, ValueError):
        # A builtin without a signature: its own call reports wrong arguments.
        return
    given = target_arguments(node)
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    defaults = {p.name: p.default for p in parameters if p.kind in kinds}
    takes_any_keyword = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    for name in given:
        if name not in defaults and not takes_any_keyword:
            yield (
                f"{key}.{name}={given[name]}: {node['_target_']} takes no {name}. "
                f"It takes: {', '.join(defaults)}."
            )
    for name, default in defaults.items():
        if default is Parameter.empty and name not in given:
            yield f"{key}.{name} is needed by {node['_target_']}. Type +{key}.{name}=<value>."
    # Users write `width: int = None`: a null that is the default fits whatever is annotated.
    nulls = {name for name, value in given.items() if value is None and defaults.get(name) is None}
    values = {name: value for name, value in given.items() if name not in nulls}
    yield from _wrong_types(key, values, target)


def _wrong_types(key: str, given: Mapping[str, Any], target: Any) -> Iterator[str]:
    """Yield a message for each value that does not fit the target's annotation of its argument."""
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)
    except Exception:
        # One annotation that cannot be evaluated, as a name imported under TYPE_CHECKING, makes
        # get_type_hints raise for all of them. Such targets are called without this check: they
        # are correct Python, and their own call reports a value that they cannot use.
        return
    for name, value in given.items():
        # The runner puts the run's length in place of a scheduler's null.
        is_filled = key.startswith("scheduler") and value is None
        if name in hints and not is_filled and not fits_type(value, hints[name]):
            is_text = " is text" if isinstance(value, str) else " does not fit"
            yield f"{key}.{name}={_typed(value)}{is_text}. Allowed: {_words(hints[name])}."


def fits_type(value: Any, hint: Any) -> bool:
    """Return whether a value of YAML fits an annotation; any value fits an unknown kind."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(fits_type(value, option) for option in get_args(hint))
    if kind is Literal:
        # Which of the texts are allowed, the target itself reports.
        takes_texts = all(isinstance(option, str) for option in get_args(hint))
        return isinstance(value, str) or not takes_texts
    if not isinstance(kind, type) or kind is object:
        return True
    # In Python bool is a subclass of int, but `true` is no number in a config.
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if issubclass(kind, str | bool | NoneType):
        return isinstance(value, kind)
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if issubclass(kind, Iterable):
        return isinstance(value, list | tuple) and _fit_items(value, hint)
    return True


def _fit_items(items: Iterable[Any], hint: Any) -> bool:
    """Return whether items of a list fit the annotation of the list."""
    item_hint = next((option for option in get_args(hint) if option is not Ellipsis), Any)
    # A module may be called 0, which YAML reads as a number.
    if item_hint is str:
        item_hint = str | int
    return all(fits_type(item, item_hint) for item in items)


def dataclass_fields_from_json(kind: type, values: object) -> dict[str, Any]:
    """Return the entries of a mapping, read from a file, that are fields of a dataclass.

    Raises:
        ValueError: a value is missing or does not fit its annotation.
    """
    hints = get_type_hints(kind)
    if not isinstance(values, Mapping):
        raise ValueError(f"no {kind.__name__}")
    # Other keys are ignored: a newer version may have written the file.
    entries = {key: value for key, value in values.items() if key in hints}
    for key, value in entries.items():
        if not _fits_field(value, hints[key]):
            raise ValueError(f"{key} is no {kind.__name__}'s")
    # Both are MISSING for a field without a default.
    required = {field.name for field in fields(kind) if field.default is field.default_factory}
    lacking = required - set(entries)
    if lacking:
        raise ValueError(f"no {kind.__name__}: it lacks {', '.join(sorted(lacking))}")
    return entries


def _fits_field(value: Any, hint: Any) -> bool:
    """Return whether a value read from a file fits a field's annotation."""
    if not fits_type(value, hint):
        return False
    if get_origin(hint) is Literal and value not in get_args(hint):
        return False
    if isinstance(value, Mapping):
        _, item_hint = get_args(hint)
        return all(_fits_field(item, item_hint) for item in value.values())
    return True


def _typed(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def _words(hint: Any) -> str:
    """Return an annotation in words, as an error message lists what is allowed."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return " or ".join(_words(option) for option in get_args(hint))
    if kind is Literal:
        return ", ".join(map(str, get_args(hint)))
    if isinstance(kind, type) and kind in _WORDS:
        return _WORDS[kind]
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "keys with values, as in {a: 1}"
    if isinstance(kind, type) and issubclass(kind, Iterable):
        return "a list, as in [a,b]"
    return str(hint).replace("typing.", "").replace("collections.abc.", "")


def build_group(key: str, node: Mapping[str, Any], *leading: object) -> Any:
    """Call a group's target.

    Raises:
        ConfigError: the target refuses a value; the message names the group.
    """
    try:
        return instantiate(node, *leading)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {node['_target_']} refuses its arguments: {error}") from error
