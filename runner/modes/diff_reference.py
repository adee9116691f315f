"""What mode=diff compares with: the execution, the weights or the dump that `against` names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.annotations import typed_value
from runner.config.overrides import DTYPE_PRECISIONS, PRECISION_ALIASES, path_exists
from runner.config.resolve import resolve_spec, to_dict
from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.config.trusted_targets import interpolation_problem
from runner.diagnostics.divergence.dump import dump_precision, is_dump
from runner.precision import registry
from runner.utils.accelerator import choose_accelerator
from runner.utils.errors import ConfigError, Unavailable

ACCELERATORS = ("cpu", "cuda", "mps", "tpu")
COMPARED_KEYS = (
    *("precision.", "model.", "adapter.", "accelerator.", "init.", "seed"),
    *("train.compile", "train.channels_last", "train.freeze"),
)
"""How the keys begin in which two executions may differ. Both have the same batches and loss."""


@dataclass(frozen=True)
class DiffReference:
    """What an execution is compared with.

    Attributes:
        label: for messages and pages.
        spec: of the reference execution.
        run: folder of the run that is the reference; None for a training of this command.
        dump: file of a dump that takes its place; None computes the reference here.
        own: the compared execution's values of the keys that differ, as overrides.
    """

    label: str
    spec: RunSpec
    run: Path | None = None
    dump: Path | None = None
    own: str = ""


def resolve_reference(spec: RunSpec) -> DiffReference:
    """Return what spec.against names.

    Raises:
        ConfigError: it names nothing that can be compared with.
    """
    text = str(spec.against)
    name = PRECISION_ALIASES.get(text, text)
    if name in registry.precision_names():
        return DiffReference(name, _with_precision(spec, name))
    if text in ACCELERATORS:
        return DiffReference(text, replace(spec, accelerator=replace(spec.accelerator, name=text)))
    if path_exists(text):
        path = Path(text)
        if is_dump(path):
            return _dump_reference(spec, path)
        if max(spec.diff.steps) > 1:
            steps = str(spec.diff.steps).replace(" ", "")
            raise ConfigError(
                f"against={text} compares other weights, and in the later steps of diff.steps="
                f"{steps} both executions have the reference's. Type diff.steps=[1], or "
                f"init.weights={text} against=<a precision>."
            )
        return DiffReference(text, replace(spec, init=replace(spec.init, weights=text)))
    if "=" in text:
        words = text.split(",")
        return DiffReference(text, _with_overrides(spec, words), own=_own_values(spec, words))
    if "/" in text:
        raise ConfigError(f"against={text}: there is no such file or folder.{_paths_near(text)}")
    names = [*registry.precision_names(), *ACCELERATORS]
    near = DTYPE_PRECISIONS.get(text) or get_close_matches(text, names, n=3, cutoff=0.4)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    raise ConfigError(
        f"against={text} is no precision, accelerator, override or file.{hint} Allowed: a "
        "precision (against=32-true), other values of keys (against=train.compile=false), "
        f"{', '.join(ACCELERATORS)}, weights or a checkpoint (a path), a dump (diff-*.safetensors)."
    )


def _dump_reference(spec: RunSpec, path: Path) -> DiffReference:
    """Return a dump as the reference, and the execution here that shows what rounding explains: in
    the precision that the dump was written in, emulated where this device lacks it."""
    saved = dump_precision(path)
    problem = interpolation_problem(saved)
    if problem:
        raise ConfigError(f"against={path} {problem}.")
    name = saved.get("name")
    if name not in registry.precision_names():
        return DiffReference(str(path), spec, dump=path)
    node: dict[str, Any] = {**registry.precision_config(name), "name": name}
    # Of a file from elsewhere only plain values: a `_target_` would name code to run.
    plain = {
        key: value for key, value in saved.items() if "_target_" not in json.dumps({key: value})
    }
    node |= {key: value for key, value in plain.items() if key in node}
    device = choose_accelerator(spec.accelerator.name, spec.accelerator.index).device
    try:
        build_group("precision", node).require(device)
    except Unavailable as error:
        if "emulate" not in node:
            raise ConfigError(
                f"against={path} was written in precision={name}, in which the reference runs here "
                f"to show what rounding explains. {error.what} Compare on a machine that has it."
            ) from error
        node["emulate"] = True
    return DiffReference(f"{name} of {path}", replace(spec, precision=node), dump=path)


def _paths_near(text: str) -> str:
    """Return a sentence with the newest entries of a missing path's folder; empty for none."""
    folder = Path(text).parent
    if not folder.is_dir():
        return ""
    newest = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    names = ", ".join(str(path) for path in newest[:3])
    return f" Newest in {folder}: {names}." if names else f" {folder} is empty."


def _with_precision(spec: RunSpec, name: str) -> RunSpec:
    # As composed without any precision.<key> of the command, which is the other execution's.
    return replace(spec, precision={**registry.precision_config(name), "name": name})


def _with_overrides(spec: RunSpec, words: list[str]) -> RunSpec:
    """Return the spec with other values of its keys.

    Raises:
        ConfigError: a key is not known, is the same in both executions, or the value does not fit.
    """
    for word in words:
        key, _, value = word.partition("=")
        if key == "precision":
            spec = resolve_reference(replace(spec, against=value)).spec
            continue
        spec = _with_value(spec, word, key)
    return spec


def _own_values(spec: RunSpec, words: list[str]) -> str:
    """Return the spec's own values of the keys that other words set, as overrides."""
    config = OmegaConf.create(to_dict(spec))
    missing = object()  # as an option that another precision has
    found = []
    for key in (word.partition("=")[0] for word in words):
        value = OmegaConf.select(config, key, default=missing)
        if key != "precision" and value is not missing:
            found.append(f"{key}={typed_value(value)}")
    return " ".join(found)


def _with_value(spec: RunSpec, word: str, key: str) -> RunSpec:
    config = OmegaConf.create(to_dict(spec))
    missing = object()
    if OmegaConf.select(config, key, default=missing) is missing:
        known = _keys(to_dict(spec))
        near = ", ".join(get_close_matches(key, known, n=3, cutoff=0.4)) or "see --help"
        raise ConfigError(f"against={word}: there is no key {key}. Nearest: {near}.")
    if not key.startswith(COMPARED_KEYS):
        raise ConfigError(
            f"against={word}: both executions have the same {key}. Allowed: precision=<name>, and "
            f"keys that begin with {', '.join(COMPARED_KEYS)}."
        )
    try:
        config.merge_with(OmegaConf.from_dotlist([word]))
        return resolve_spec(config)
    except (OmegaConfBaseException, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"against={word} does not fit: {reason}") from error


def _keys(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted names of all keys."""
    names = []
    for key, value in values.items():
        names.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            names += _keys(value, f"{prefix}{key}.")
    return names
