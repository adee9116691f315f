"""Rewrite Hydra's and OmegaConf's errors: what you gave, what is allowed, what to type."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from runner.config.overrides import DTYPE_PRECISIONS, SWEEP_KEYS, as_typed
from runner.core import Room, errors, fmt, layout, terminal

# Options whose plugin is installed by an extra of this package, and that extra.
_EXTRAS = {
    "hydra/sweeper=optuna": "optuna",
    "hydra/launcher=submitit_slurm": "slurm",
    "hydra/launcher=submitit_local": "slurm",
    "hydra/launcher=ray": "ray",
    "hydra/launcher=joblib": "joblib",
}

CPU_CASTS = (
    "autocast followed torch's list for CPUs, which leaves norms, softmax, pow, exp, log and sums "
    "in half precision, where CUDA's list has them in float32."
)
"""Caveat of every mixed run on a CPU, unless it emulates CUDA's casts."""

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError, TypeError)
"""Errors that Hydra and OmegaConf raise while they compose a config."""


def explain(error: Exception, argv: Sequence[str]) -> str:
    """Return one clear message for a config that does not compose.

    Args:
        error: from Hydra, OmegaConf or the operating system.
        argv: the command, to name the override as it was typed.
    """
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return _wrong_override(as_typed(str(error.override)))
    if isinstance(error, YAMLError):
        return _invalid_yaml(error)
    if isinstance(error, UnicodeDecodeError):
        return f"A config is not UTF-8 text ({error}). Save the yamls of --config-dir as UTF-8."
    wrong_yaml = _wrong_yaml(str(error))
    if wrong_yaml:
        return wrong_yaml
    # Hydra wraps OmegaConf's error, which has the key and its config, in one of its own.
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return unknown_key(str(cause.full_key), cause.parent_node, argv)
    if isinstance(cause, ValidationError):
        return _wrong_value(cause, argv)
    if isinstance(cause, InterpolationResolutionError):
        return _unresolved(cause)
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.filename or Path.cwd()}: {error.strerror}. Run in a folder that takes files, "
            "or type hydra.run.dir=<folder> (in a sweep hydra.sweep.dir=<folder>)."
        )
    # Hydra raises a TypeError for group=[[x]].
    if isinstance(error, TypeError):
        return f"The overrides do not compose ({error}). A group takes a name, as in model=mlp."
    ambiguous = _AMBIGUOUS.match(str(error))
    if ambiguous:
        words = terminal.quote_command(["python", "-m", "runner", "-m", *map(as_typed, argv)])
        return f"{ambiguous[1]} is a list of values, and a run takes one. Type {words}."
    return str(error).strip()


_AMBIGUOUS = re.compile(r"Ambiguous value for argument '(.*)'\n")


def _wrong_override(override: str) -> str:
    """Return a message for a word that Hydra's grammar does not take as an override."""
    key, _, value = override.partition("=")
    if re.match(r"{(.*[{,])? *[^ :,{}]*[\"'@][^ ,{}]*:", value):
        return f"{override} does not parse. Allowed as names in {{}}: letters, digits, _ . -"
    call = re.fullmatch(r"(\w+)\((.*)\)", value)
    if call:
        reason = f"Hydra has no function {call[1]}, or none of these values, which are never null"
        return f"{override}: {reason}. Type the values without it: {key}={call[2]}."
    if value.endswith(","):
        return f"{override} ends with a comma. Type a list without spaces, as in {override}<value>."
    if value and "'" not in value and re.fullmatch(r"[+~]{0,2}[\w./@-]+", key):
        return f"{override} holds characters that Hydra wants quoted. Type \"{key}='{value}'\"."
    commands = Room.all_commands()
    if override in commands:
        return f"{override} comes before all else. Type python -m runner {override} ..."
    near = get_close_matches(override, commands, n=1)
    typed = f"{near[0]} or key=value" if near else "key=value"
    return f"{override} is not an override. Type {typed}."


def _unresolved(error: InterpolationResolutionError) -> str:
    """Return a message for an interpolation without a value."""
    # Only a scheduler's keys refer to optimizer.lr, which several optimizers do not have.
    if "optimizer.lr" in str(error):
        return (
            f"{error.full_key}: this optimizer is several, without one optimizer.lr. Type "
            f"{error.full_key}=<a rate for all>, or scheduler=cosine, which scales each rate."
        )
    reason = errors.first_line(error)
    own_value = re.search(r"key '(vars\.[^']+)' not found", reason)
    if own_value:
        return f"{error.full_key}: {reason}. Type {own_value[1]}=<value>."
    resolver = re.search(r"Unsupported interpolation type (\S+)", reason)
    if resolver:
        return (
            f"{error.full_key}: no resolver is called {resolver[1]}. Register it in a module of "
            "hydra_plugins/ in the folder of --config-dir (docs/own-code.md), or type "
            f"{error.full_key}=<value>."
        )
    return f"{error.full_key}: {reason}. Give it a value: {error.full_key}=<value>."


_LIST = re.compile(r"In '([^']+)'.*Cannot merge DictConfig with ListConfig", re.DOTALL)


def _wrong_yaml(error: str) -> str:
    """Return a message for a yaml whose content is no config; empty for any other error."""
    list_config = _LIST.search(error)
    if list_config:
        file = f"{list_config[1]}.yaml"
        return f"{file} holds a list. Write keys with values, as in `_target_: lab.Net`."
    if "Unsupported item value in defaults" in error:
        return (
            "An option in the `defaults` of a yaml is a number or a boolean. Write its full name, "
            "in quotes where YAML reads no text, as in `override /precision: 16-mixed`."
        )
    return ""


def _invalid_yaml(error: YAMLError) -> str:
    """Return where a config file is no valid YAML, the reason and what to look at."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return f"A config is no YAML: {errors.first_line(error)}. Write plain text in UTF-8."
    problem = getattr(error, "problem", None) or errors.first_line(error)
    return (
        f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: this is no YAML: {problem}. "
        "Look there and in the line above: spaces, not tabs, before a key; a space after `:`; each "
        "bracket and quote closed; ${...} within braces or brackets quoted; no key twice."
    )


def _wrong_value(error: ValidationError, argv: Sequence[str]) -> str:
    """Return a message for a value that does not fit its key's type."""
    full = str(error.full_key)
    given = as_typed(_typed(full, argv) or full)
    try:
        hint = get_type_hints(error.object_type)[full.rpartition(".")[2]]
    except (KeyError, TypeError):
        return f"{given}: {errors.first_line(error)}."
    allowed = fmt.annotation_words(hint)
    if is_dataclass(hint) or get_origin(hint) is dict:
        allowed = f"keys under it, {full}.<key>=<value>"
    return f"{given} does not fit. Allowed: {allowed}."


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = [str(name) for name in error.options or ()]
    if not group:
        return str(error).strip().replace("\n", " ")
    extra = _EXTRAS.get(f"{group}={option}")
    if extra:
        package = f"precision-runner[{extra}]"
        return f"{group}={option} needs a package that is missing. Type pip install '{package}'."
    if not options:
        return f"{group}={option} is not known: there is no option in {group}/."
    hint = option_hint(group, option, options)
    if group == "device" and not hint:  # as of other programs
        hint = f" Type {_OTHER_PROGRAMS_KEYS[group]}."
    if group == "callbacks":
        hint = (
            " A callback of your own is callbacks.<name>._target_=package.module.Name, or a yaml "
            "callbacks/<name>.yaml in the folder of --config-dir."
        )
    # Before the list, which is long for a precision.
    return f"{group}={option} is not known.{hint} Allowed: {', '.join(options)}."


def option_hint(group: str, option: str, options: Sequence[str]) -> str:
    """Return which option to type in place of an unknown one; empty if none is like it."""
    name = option.lower().replace("_", "-")
    # Nearly an option's whole name, the dtype in it, any likeness, or a likeness of its beginning.
    near = get_close_matches(name, options, n=1, cutoff=0.91)
    if group == "precision" and not near:
        near = [*next((names for dtype, names in DTYPE_PRECISIONS.items() if dtype in name), ())]
    near = near or errors.nearest_names(name, options)
    size = len(name)
    near = near or [each for each in options if get_close_matches(name, [each[:size]], cutoff=0.75)]
    typed = " or ".join(f"{group}={each}" for each in near[:3])
    return f" Type {typed}." if near else ""


def unknown_key(full: str, node: Any, argv: Sequence[str]) -> str:
    """Return the message for a key that a config does not have.

    Args:
        full: the dotted key.
        node: the part of the config that lacks it.
        argv: the command, to name the override as it was typed.
    """
    parent, _, name = full.rpartition(".")
    keys = [str(key) for key in node] if isinstance(node, DictConfig) else []
    prefix = f"{parent}." if parent else ""
    near = [f"{prefix}{key}" for key in errors.nearest_names(name, keys)]
    # The exact name in another group is a better guess than a similar name in this one: lr=1e-3
    # means optimizer.lr.
    elsewhere: list[str] = []
    if name not in near:
        our_name = _SYNONYMS.get(name, name)
        every = dotted_keys("", _root(node))
        elsewhere = [key for key in every if key.rpartition(".")[2] == our_name][:3]
    # A typed key may be the beginning of one: checkpoint.every means checkpoint.every_steps.
    begun = [key for key in near if parent and key.startswith(full)]
    hint = _hint(begun or elsewhere or near) + _target_hint(full, argv)
    hint = f" Type {_OTHER_PROGRAMS_KEYS[full]}." if full in _OTHER_PROGRAMS_KEYS else hint
    known = ", ".join(f"{prefix}{key}" for key in keys) or "none"
    given = _typed(full, argv) or full
    if given.startswith("sweep."):
        known = ", ".join(["sweep=<preset>", "sweep.resume", *SWEEP_KEYS])
        near = get_close_matches(given.partition("=")[0], SWEEP_KEYS, n=1)
        return f"{given} is not known. Allowed: {known}.{_hint(near)}"
    if full.startswith("precision."):
        root = _root(node)
        option = OmegaConf.select(root, "precision.name") if isinstance(root, DictConfig) else None
        text = f"{given} is not known. Allowed for precision={option or '<yours>'}: {known}."
        others = precisions_with_key(full.removeprefix("precision."))
        if others:
            text += f" Precisions that have it: {', '.join(others)}."
        return f"{text}{hint}"
    return f"{given} is not known. Allowed: {known}.{hint}"


_SYNONYMS = {
    "learning_rate": "lr",
    "bs": "batch_size",
    "num_epochs": "epochs",
    "steps": "max_steps",
    "workers": "num_workers",
    "wd": "weight_decay",
    "path": "root",
}
"""Names that other programs use for some of our keys."""
# Words to type in place of other programs' keys that stand for no key of the config.
_OTHER_PROGRAMS_KEYS = {
    **{name: f"precision={' or '.join(each)}" for name, each in DTYPE_PRECISIONS.items()},
    **dict.fromkeys(("config", "cfg", "c"), "--config-dir <folder of your yamls>"),
    "device": "accelerator=cuda accelerator.index=<n>",
    "gpus": "torchrun --nproc-per-node=<n> -m runner strategy=ddp",
}


def dotted_keys(prefix: str, node: object) -> Iterator[str]:
    """Yield every dotted key of a config except Hydra's own."""
    if not isinstance(node, DictConfig):
        return
    for key in node:
        full = f"{prefix}.{key}" if prefix else str(key)
        if full != "hydra":
            yield full
            yield from dotted_keys(full, node._get_node(key))


def _hint(keys: Sequence[str]) -> str:
    """Return what to type in place of an unknown key; empty if no key is like it."""
    typed = " or ".join(f"{key}=<value>" for key in keys)
    return f" Type {typed}." if keys else ""


_TARGET_GROUPS = ("model", "adapter", "data", "task", "optimizer", "scheduler")
"""Groups whose target may take arguments that their yaml does not list."""
_CHECKPOINT_OVERRIDES = ("checkpoint=", "checkpoint.path=", "checkpoint.resume=")


def _target_hint(full: str, argv: Sequence[str]) -> str:
    """Return how to set a key of a group that its yaml does not list; empty for other keys."""
    group, _, name = full.partition(".")
    if group not in _TARGET_GROUPS or not name:
        return ""
    # A checkpoint's options replace the defaults later than Hydra checks the typed keys.
    is_chosen = any(text.startswith(f"{group}=") for text in argv)
    has_checkpoint = any(text.lstrip("+").startswith(_CHECKPOINT_OVERRIDES) for text in argv)
    if has_checkpoint and not is_chosen:
        return f" These are the keys of the default {group}. Type {group}=<the checkpoint's>, too."
    given = _typed(full, argv) or f"{full}=<value>"
    swept = [text for text in argv if text.startswith(f"{group}=") and "," in text]
    if swept:
        return f" Not every option of {swept[0]} has it: sweep those that have it on their own."
    return f" An argument that the yaml does not list takes a plus: +{given.lstrip('+')}."


def _root(node: Any) -> Any:
    """Return the whole config that a node belongs to."""
    while node is not None and node._get_parent() is not None:
        node = node._get_parent()
    return node


def has_key(config: object, key: str) -> bool:
    """Return whether a config holds a dotted key, with or without a value."""
    for part in key.split("."):
        # OmegaConf's own `in` is False for a key without a value (`???`).
        if not isinstance(config, DictConfig) or part not in list(config.keys()):
            return False
        config = config._get_node(part)
    return True


def precisions_with_key(key: str) -> list[str]:
    """Return the names of the built-in precisions that have a key, given without `precision.`."""
    folder = layout.BUILT_IN_CONFIGS / "precision"
    return [
        path.stem for path in sorted(folder.glob("*.yaml")) if has_key(OmegaConf.load(path), key)
    ]


def _typed(key: str, argv: Sequence[str]) -> str | None:
    """Return the last override that sets a key or one under it; None if there is none."""
    found = [text for text in argv if text.lstrip("+~").startswith((f"{key}=", f"{key}."))]
    return found[-1] if found else None
