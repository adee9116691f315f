"""Checkpoints: one file each, loadable without unpickling anything but tensors and containers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.config import to_dict
from runner.errors import ConfigError
from runner.spec import RunSpec
from runner.state import TrainState

FORMAT = 1


def save(
    folder: Path, state: TrainState, spec: RunSpec, keep: int, choices: Mapping[str, str] = {}
) -> Path:
    """Write `step-<n>.pt` aside, sync and rename it, then drop all but the newest `keep`.

    Args:
        folder: created.
        state: schedules that wait for a found-inf flag are settled.
        spec: of the run.
        keep: 1 and up.
        choices: option chosen in each config group, for the labels of evaluations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for driven in state.driven:
        driven.settle()
    content = {
        "format": FORMAT,
        "spec": to_dict(spec),
        "choices": dict(choices),
        "precision": state.precision.name,
        "step": state.step,
        "epoch": state.epoch,
        "skipped_steps": state.skipped,
        "model": plain(state.model).state_dict(),
        "optimizers": [driven.optimizer.state_dict() for driven in state.driven],
        "schedulers": [d.scheduler.state_dict() if d.scheduler else {} for d in state.driven],
        "loss_scale": state.scale.state_dict(),
    }
    path = folder / f"step-{state.step:08d}.pt"
    aside = path.with_suffix(".partial")
    with aside.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        old.unlink()
    return path


def plain(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, whose names carry no prefix."""
    return getattr(model, "_orig_mod", model)


def find(where: str, tracking_uri: str | None = None) -> Path:
    """The checkpoint that a file, a run's folder or an MLflow run id names.

    Raises:
        ConfigError: there is none.
    """
    path = Path(where)
    if path.is_file():
        return path
    if not path.exists() and "/" not in where and "\\" not in where:
        path = folder_of_run(where, tracking_uri)
    found = sorted(path.glob("checkpoints/step-*.pt")) or sorted(path.glob("step-*.pt"))
    if not found:
        raise ConfigError(
            f"checkpoint={where}: no checkpoint is there. Give a .pt file, the folder of a run "
            "(outputs/runs/<time>), or the id of an MLflow run that was trained on this machine."
        )
    return found[-1]


def folder_of_run(run_id: str, tracking_uri: str | None) -> Path:
    """A run keeps its output folder as a tag. mlflow is imported here only."""
    from runner.tracking.uri import resolve_uri, sqlite_path

    uri = resolve_uri(tracking_uri, os.environ, Path.cwd())
    unknown = f"checkpoint={run_id} is neither a file, a folder nor the id of a run in {uri}."
    if (database := sqlite_path(uri)) and not database.exists():
        raise ConfigError(unknown)  # MLflow would create it

    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        run = MlflowClient(uri).get_run(run_id)
    except MlflowException:
        raise ConfigError(unknown) from None
    return Path(run.data.tags.get("output_dir", "missing"))


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU.

    Raises:
        ConfigError: the file is not one of ours, or damaged.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"checkpoint={path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"checkpoint={path} was not written by this runner (format {FORMAT}).")
    return content


def load_weights(model: nn.Module, content: dict[str, Any], path: Path) -> None:
    """Copy a checkpoint's weights into a model, casting to the model's dtypes.

    Raises:
        ConfigError: names or shapes differ.
    """
    try:
        model.load_state_dict(content["model"], strict=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise ConfigError(
            f"checkpoint={path} does not fit the model: {reason} "
            "Leave model= out to take the checkpoint's own."
        ) from error
