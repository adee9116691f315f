"""mode=diff against a run: both executions have that run's settings, but for what is typed.

The reference is the run itself, trained again up to the steps that are compared.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.checkpoint import checkpoint_file, locate
from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config.annotations import typed_value
from runner.config.invocation import Invocation
from runner.config.overrides import path_exists
from runner.config.resolve import to_dict
from runner.config.schema import RunSpec
from runner.config.trusted_targets import SavedConfig
from runner.modes.diff_reference import COMPARED_KEYS
from runner.modes.saved_run import (
    PRESET_GROUPS,
    RUN_KEYS,
    changes,
    check_run,
    folder_config,
    merge,
    typed_overrides,
)
from runner.tracking.history import from_folder
from runner.utils.errors import ConfigError
from runner.utils.files import read_json
from runner.utils.layout import CONFIG, RESULT


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
    run_spec = diffed_run_spec(spec, origin, folder)
    typed = typed_overrides(origin)
    for preset in PRESET_GROUPS:
        if preset in typed:
            raise ConfigError(
                f"against={spec.against} is a run, whose settings are taken. Leave {preset}= out."
            )
    # Its code was judged with the whole of the run's config.
    config = SavedConfig(to_dict(run_spec), folder, "against", is_signed=True)
    found = replace(merge(config, spec, origin, RUN_KEYS), against=str(folder))
    _check_same(found, run_spec, typed)
    names = _option_names(folder)
    choices = {key: names.get(key, "") for key in RUN_KEYS if key not in typed}
    return found, replace(origin, choices={**origin.choices, **choices})


def diffed_run_spec(spec: RunSpec, origin: Invocation, folder: Path) -> RunSpec:
    """Return the spec of a run that can be trained again here.

    Args:
        spec: of mode=diff.
        origin: what was typed.
        folder: of the run.

    Raises:
        ConfigError: it cannot, or its config names code that is not trusted.
    """
    config = folder_config(folder, "against")
    assert config is not None
    run_spec = check_run(config, spec, origin)
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
    words = [
        f"{key}={typed_value(value)}"
        for key, (_, value) in changes(run_spec, spec).items()
        if value is not None and key.startswith(COMPARED_KEYS)
    ]
    hidden = ("precision.", "accelerator.")
    return " ".join(word for word in words if not word.startswith(hidden))


def checkpoint_of_run(folder: Path, run_spec: RunSpec, step: int) -> LoadedCheckpoint | None:
    """Return a run's newest checkpoint before a step; None where it is trained from its start."""
    for path in reversed(locate.checkpoints_of_run(folder)):
        with suppress(ConfigError):  # damaged: an earlier one costs more steps, no exactness
            saved = LoadedCheckpoint(path, checkpoint_file.load(path))
            changed = changes(saved.content["spec"], run_spec)
            # One from before a resume with other settings leads to other weights.
            if saved.content["step"] < step and not any(map(_is_of_training, changed)):
                return saved
    return None


def _is_of_training(key: str) -> bool:
    """Return whether a training's numbers depend on a key."""
    return key.partition(".")[0] in RUN_KEYS


def _check_same(spec: RunSpec, run_spec: RunSpec, typed: Collection[str]) -> None:
    """Refuse values that the run has otherwise and a comparison has once.

    Args:
        spec: of the comparison.
        run_spec: of the run.
        typed: keys of the command.

    Raises:
        ConfigError: names the first.
    """
    for key, (value, _) in changes(run_spec, spec).items():
        if _is_of_training(key) and not key.startswith(COMPARED_KEYS):
            raise ConfigError(
                f"against={spec.against}: the run has {key}={value}, and both executions "
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
