"""What mode=diff compares with: the run, the execution, the weights or the dump of `against`.

Against a run, both executions have that run's settings, but for what is typed. The reference is the
run itself, trained again up to the steps that are compared.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.checkpoint import locate
from runner.config.annotations import typed_value
from runner.config.invocation import Invocation
from runner.config.messages import dotted_keys
from runner.config.overrides import DTYPE_PRECISIONS, PRECISION_ALIASES, path_exists
from runner.config.resolve import resolve_spec, to_dict
from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.config.trusted_targets import SavedConfig, interpolation_problem
from runner.diagnostics.divergence.dump import dump_precision, is_dump
from runner.modes.saved_run import (
    PRESET_GROUPS,
    RUN_KEYS,
    changes,
    check_run,
    folder_config,
    merge,
    typed_overrides,
)
from runner.precision import registry
from runner.utils.accelerator import choose_accelerator
from runner.utils.errors import ConfigError, Unavailable
from runner.utils.files import read_json
from runner.utils.formatting import relative_path
from runner.utils.layout import CONFIG, RESULT

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


def run_reference(spec: RunSpec, invocation: Invocation) -> DiffReference | None:
    """Return the run that spec.against names; None where it names no run's folder.

    Raises:
        ConfigError: the run cannot be trained again, or its config names code that is not trusted.
    """
    folder = run_folder_of(spec)
    if folder is None:
        return None
    run_spec = diffed_run_spec(spec, invocation, folder)
    label = f"{run_spec.precision['name']} of {relative_path(folder)}"
    # Without the values of the precision and the accelerator, which the executions' names say.
    own = [
        f"{key}={typed_value(value)}"
        for key, (_, value) in changes(run_spec, spec).items()
        if value is not None and key.startswith(COMPARED_KEYS)
    ]
    hidden = ("precision.", "accelerator.")
    words = " ".join(word for word in own if not word.startswith(hidden))
    return DiffReference(label, run_spec, run=folder, own=words)


def resolve_reference(spec: RunSpec) -> DiffReference:
    """Return what spec.against names, which is no run.

    Raises:
        ConfigError: it names nothing that can be compared with.
    """
    text = str(spec.against)
    name = PRECISION_ALIASES.get(text, text)
    if name in registry.precision_names():
        # As composed without any precision.<key> of the command, which is the other execution's.
        precision = {**registry.precision_config(name), "name": name}
        return DiffReference(name, replace(spec, precision=precision))
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
        reference = spec
        for word in words:
            key, _, value = word.partition("=")
            if key == "precision":
                reference = resolve_reference(replace(reference, against=value)).spec
            else:
                reference = _with_value(reference, word, key)
        return DiffReference(text, reference, own=_own_values(spec, words))
    if "/" in text:
        parent = Path(text).parent
        hint = ""
        if parent.is_dir():
            newest = sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            names = ", ".join(str(path) for path in newest[:3])
            hint = f" Newest in {parent}: {names}." if names else f" {parent} is empty."
        raise ConfigError(f"against={text}: there is no such file or folder.{hint}")
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
        known = list(dotted_keys("", config))
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


def is_of_training(key: str) -> bool:
    """Return whether a training's numbers depend on a key."""
    return key.partition(".")[0] in RUN_KEYS


def run_folder_of(spec: RunSpec) -> Path | None:
    """Return the folder of the run that spec.against names, by itself or by its MLflow id; None
    where it names something else."""
    text = spec.against or ""
    if path_exists(text):
        return Path(text) if (Path(text) / CONFIG).is_file() else None
    if len(text) == 32 and text.isalnum():
        return locate.resolve_path(text, spec.tracking.get("uri"), "against")
    return None


def with_diffed_run(spec: RunSpec, invocation: Invocation) -> tuple[RunSpec, Invocation]:
    """Return the spec of a comparison with a run: the run's values where none was typed.

    Args:
        spec: of mode=diff, as composed.
        invocation: what was typed.

    Returns:
        The spec, and the invocation with the names of the run's options; both as they were where
        `against` names no run.

    Raises:
        ConfigError: the run cannot be trained again, or something was typed that both have.
    """
    folder = run_folder_of(spec)
    if folder is None:
        return spec, invocation
    run_spec = diffed_run_spec(spec, invocation, folder)
    typed = typed_overrides(invocation)
    for preset in PRESET_GROUPS:
        if preset in typed:
            raise ConfigError(
                f"against={spec.against} is a run, whose settings are taken. Leave {preset}= out."
            )
    # Its code was judged with the whole of the run's config.
    config = SavedConfig(to_dict(run_spec), folder, "against", is_signed=True)
    names: Any = {}
    with suppress(OSError, ValueError):  # a run that was killed has no result
        names = read_json(folder / RESULT)
    if not isinstance(names, dict):
        names = {}
    choices = {key: names.get(key, "") for key in RUN_KEYS if key not in typed}
    merged, invocation = merge(config, spec, invocation, RUN_KEYS, choices)
    merged = replace(merged, against=str(folder))
    for key, (value, _) in changes(run_spec, merged).items():
        if is_of_training(key) and not key.startswith(COMPARED_KEYS):
            # The word that was typed and set the key, as `data` sets `data.context`.
            parents = [word for word in typed if f"{key}.".startswith(f"{word}.")]
            parent = f"{max(parents, key=len)}=" if parents else key
            raise ConfigError(
                f"against={merged.against}: the run has {key}={value}, and both executions "
                f"take its batches and training. Leave {parent} out. Allowed to "
                f"differ: precision, and keys that begin with {', '.join(COMPARED_KEYS)}."
            )
    return merged, invocation


def diffed_run_spec(spec: RunSpec, invocation: Invocation, folder: Path) -> RunSpec:
    """Return the spec of a run that can be trained again here.

    Args:
        spec: of mode=diff.
        invocation: what was typed.
        folder: of the run.

    Raises:
        ConfigError: it cannot, or its config names code that is not trusted.
    """
    config = folder_config(folder, "against")
    assert config is not None
    run_spec = check_run(config, spec, invocation)
    problem = ""
    if run_spec.mode != "train":
        problem = f"has mode={run_spec.mode} and trains nothing. Name the folder of a training"
    elif not str(run_spec.strategy["_target_"]).endswith(".Single"):
        problem = (
            "was trained in several processes, and mode=diff computes in one. Name one of its "
            "checkpoints with init.weights=, and a precision with against="
        )
    elif run_spec.train.compile and run_spec.train.compile != "regional":
        problem = "was compiled as one program, in which there are no modules to see"
    if problem:
        raise ConfigError(f"against={spec.against}: the run {problem}.")
    return replace(run_spec, accelerator=spec.accelerator)
