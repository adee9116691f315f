"""mode=diff against a run: both executions have that run's settings, but for what is typed.

The reference is the run itself, trained again up to the steps that are compared.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.checkpoint import checkpoint_file, locate
from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config import trusted_targets
from runner.config.annotations import typed_value
from runner.config.invocation import Invocation
from runner.config.overrides import path_exists
from runner.config.resolve import flatten, resolve_spec, to_dict
from runner.config.schema import RunSpec
from runner.modes import run_metadata
from runner.modes.diff_reference import COMPARED_KEYS
from runner.modes.resumed_spec import (
    PRESET_GROUPS,
    TARGET_GROUPS,
    changed_settings,
    copy_key,
    typed_overrides,
)
from runner.modes.rewind import RUN_KEYS, run_spec_of
from runner.tracking.history import from_folder
from runner.utils.errors import ConfigError
from runner.utils.files import read_json
from runner.utils.layout import CONFIG, RESULT

_KEYS = (*RUN_KEYS, "scheduler")
"""Top-level keys that a comparison takes from its run."""


def run_folder_of(spec: RunSpec) -> Path | None:
    """Return the folder of the run that spec.against names, by itself or by its MLflow id; None
    where it names something else."""
    text = spec.against or ""
    if path_exists(text):
        return Path(text) if (Path(text) / CONFIG).is_file() else None
    if len(text) == 32 and text.isalnum():
        return locate.resolve_path(text, spec.tracking.get("uri"), "against")
    return None


def with_diffed_run(spec: RunSpec, origin: Invocation) -> tuple[RunSpec, Invocation]:
    """Return the spec of a comparison with a run: the run's values where none was typed.

    Args:
        spec: of mode=diff, as composed.
        origin: what was typed.

    Returns:
        The spec, and the invocation with the names of the run's options; both as they were where
        `against` names no run.

    Raises:
        ConfigError: the run cannot be trained again, or something was typed that both have.
    """
    folder = run_folder_of(spec)
    if folder is None:
        return spec, origin
    run_spec = diffed_run_spec(spec, folder)
    typed = typed_overrides(origin)
    for preset in PRESET_GROUPS:
        if preset in typed:
            raise ConfigError(
                f"against={spec.against} is a run, whose settings are taken. Leave {preset}= out."
            )
    ours = dict(origin.composed_config or to_dict(spec))
    merged = {**ours, **{key: to_dict(run_spec)[key] for key in _KEYS}}
    for key in typed:
        copy_key(ours, merged, key.split("."))
    try:
        found = replace(resolve_spec(OmegaConf.create(merged)), against=str(folder))
    except OmegaConfBaseException as error:
        raise ConfigError(f"against={spec.against}: {error}") from error
    signed = run_metadata.signed_config(folder) is not None
    untyped = [group for group in TARGET_GROUPS if group in _KEYS and group not in typed]
    trusted_targets.check_trusted(to_dict(found), untyped, to_dict(spec), folder, "against", signed)
    _check_same(found, run_spec, typed)
    names = _option_names(folder)
    choices = {key: names.get(key, "") for key in _KEYS if key not in typed}
    return found, replace(origin, choices={**origin.choices, **choices})


def diffed_run_spec(spec: RunSpec, folder: Path) -> RunSpec:
    """Return the spec of a run that can be trained again here.

    Raises:
        ConfigError: it cannot.
    """
    run_spec = run_spec_of(folder)
    assert run_spec is not None
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


def changed_words(spec: RunSpec, run_spec: RunSpec) -> str:
    """Return what a comparison has otherwise than its run, as overrides without the precision's."""
    ours, theirs = flatten(spec), flatten(run_spec)
    words = [
        f"{key}={typed_value(value)}"
        for key, value in ours.items()
        if key.startswith(COMPARED_KEYS) and theirs.get(key) != value
    ]
    hidden = ("precision.", "accelerator.")
    return " ".join(word for word in words if not word.startswith(hidden))


def checkpoint_of_run(folder: Path, step: int) -> LoadedCheckpoint | None:
    """Return a run's newest checkpoint before a step; None where it is trained from its start."""
    run_spec = run_spec_of(folder)
    assert run_spec is not None
    for path in reversed(locate.checkpoints_of_run(folder)):
        with suppress(ConfigError):  # damaged: an earlier one costs more steps, no exactness
            saved = LoadedCheckpoint(path, checkpoint_file.load(path))
            changed = changed_settings(run_spec, saved)
            # One from before a resume with other settings leads to other weights.
            if saved.content["step"] < step and not _of_training(changed):
                return saved
    return None


def _of_training(keys: Iterable[str]) -> list[str]:
    """Return those of some keys that a training's numbers depend on."""
    return [key for key in keys if key.partition(".")[0] in _KEYS]


def _check_same(spec: RunSpec, run_spec: RunSpec, typed: Collection[str]) -> None:
    """Refuse values that the run has otherwise and a comparison has once.

    Args:
        spec: of the comparison.
        run_spec: of the run.
        typed: keys of the command.

    Raises:
        ConfigError: names the first.
    """
    ours, theirs = flatten(spec), flatten(run_spec)
    for key in {**ours, **theirs}:
        is_shared = _of_training([key]) and not key.startswith(COMPARED_KEYS)
        if is_shared and ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"against={spec.against}: the run has {key}={theirs.get(key)}, and both executions "
                f"take its batches and training. Leave {_typed_parent(key, typed)} out. Allowed to "
                f"differ: precision, and keys that begin with {', '.join(COMPARED_KEYS)}."
            )


def _typed_parent(key: str, typed: Collection[str]) -> str:
    """Return the key that was typed and set another one, as `data` sets `data.context`."""
    parents = [word for word in typed if f"{key}.".startswith(f"{word}.")]
    return f"{max(parents, key=len)}=" if parents else key


def logged_loss(folder: Path, step: int) -> float | None:
    """Return the training loss that a run recorded at a step; None where it recorded none."""
    curve = from_folder(folder).get("train/loss")
    if curve is None:
        return None
    steps, _, losses = curve
    found = losses[steps == step]
    return float(found[-1]) if len(found) else None


def _option_names(folder: Path) -> dict[str, Any]:
    """Return the names of a run's model, data and precision; none for a run that was killed."""
    try:
        content = read_json(folder / RESULT)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
