"""Save a trained model in the folders of other libraries: peft's adapter, transformers' model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree

from torch import Tensor, nn

from runner.modes.context import RunContext
from runner.training.pretrained_folder import (
    ADAPTER_FOLDER,
    PRETRAINED_FOLDER,
    is_pretrained_model,
    lora_layers,
    write_adapter,
    write_pretrained,
)
from runner.training.state import TrainState
from runner.utils.errors import ConfigError
from runner.utils.files import os_error_reason
from runner.utils.formatting import relative_path


def check_model_folders(run: RunContext, model: nn.Module) -> None:
    """Raise ConfigError where checkpoint.pretrained is set for a model of another library."""
    if run.spec.checkpoint.pretrained and not is_pretrained_model(model):
        raise ConfigError(
            f"checkpoint.pretrained=true: {run.spec.model['_target_']} made a "
            f"{type(model).__name__}, which is no model of transformers, so from_pretrained could "
            "not load it. Type checkpoint.safetensors=true for its weights."
        )


def wants_model_folders(run: RunContext, state: TrainState) -> bool:
    """Return whether a run's keys ask for a folder of another library."""
    return run.spec.checkpoint.pretrained or _wants_adapter(run, state)


def save_model_folders(run: RunContext, state: TrainState) -> list[str]:
    """Write the folders that the run's keys ask for, with the weights that are evaluated.

    All processes must call it: sharded weights are gathered from each.

    Returns:
        Why a folder was not written, a sentence each.
    """
    unsaved: list[str] = []
    with state.evaluated_weights():
        # Inside: the averaged weights are in the model as long as the context lasts.
        weights = _full_weights(state)
        if not run.strategy.place.is_main:
            return unsaved
        if _wants_adapter(run, state):
            _save_adapter(run, state, weights)
        if run.spec.checkpoint.pretrained:
            unsaved += _save_pretrained(run, state, weights)
    return unsaved


def _save_adapter(run: RunContext, state: TrainState, weights: Mapping[str, Tensor]) -> None:
    def write(folder: Path) -> None:
        init = str(run.spec.adapter.get("init", "default"))
        write_adapter(state.plain_model, weights, folder, run.spec.model, init)

    problems = _save_folder(run, ADAPTER_FOLDER, write)
    # Nobody has to have asked for it, so a run does not fail for the lack of it.
    for problem in problems:
        run.say(f"warning: {problem}")


def _save_pretrained(
    run: RunContext, state: TrainState, weights: Mapping[str, Tensor]
) -> list[str]:
    node = run.spec.model
    named = (run.spec.data.get("tokenizer"), node.get("path"))
    beside = [Path(text) for text in named if isinstance(text, str) and Path(text).is_dir()]

    def write(folder: Path) -> None:
        said = write_pretrained(state.plain_model, weights, folder, node, beside)
        run.say(f"from_pretrained loads {relative_path(folder)} ({said})")

    return _save_folder(run, PRETRAINED_FOLDER, write)


def _save_folder(run: RunContext, name: str, write: Callable[[Path], None]) -> list[str]:
    """Write a folder and upload it; return why it was not written, in a list of one sentence."""
    from safetensors import SafetensorError

    folder = run.out / name
    try:
        write(folder)
    except (OSError, ValueError, SafetensorError) as error:
        # An unfinished folder would be taken for a whole one.
        rmtree(folder, ignore_errors=True)
        return [f"{relative_path(folder)} was not written: {os_error_reason(error)}."]
    run.tracker.artifact(folder, name)
    return []


def _wants_adapter(run: RunContext, state: TrainState) -> bool:
    return run.spec.checkpoint.adapter and _has_lora(run, state)


def _has_lora(run: RunContext, state: TrainState) -> bool:
    """Return whether the run's model has an adapter of peft."""
    return bool(run.spec.adapter.get("_target_")) and bool(lora_layers(state.plain_model))


def _full_weights(state: TrainState) -> dict[str, Tensor]:
    """Return the model's state dict with full tensors; empty on other processes than the first."""
    model = state.plain_model
    if state.strategy.shards:
        return state.strategy.full_state_dict(model)
    # With the scales of packed weights, which are neither parameters nor buffers.
    return dict(model.state_dict())
