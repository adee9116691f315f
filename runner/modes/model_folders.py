"""Save a trained model in the folders of other libraries: peft's adapter, transformers' model."""

from collections.abc import Mapping
from shutil import rmtree

from torch import Tensor

from runner.modes.context import RunContext
from runner.training.peft_folder import ADAPTER_FOLDER, lora_layers, write_adapter
from runner.training.state import TrainState
from runner.utils.files import os_error_reason
from runner.utils.formatting import relative_path


def wants_model_folders(run: RunContext, state: TrainState) -> bool:
    """Return whether a run's keys ask for a folder of another library."""
    return run.spec.checkpoint.adapter and _has_lora(run, state)


def save_model_folders(run: RunContext, state: TrainState) -> list[str]:
    """Write the folders that the run's keys ask for, with the weights that are evaluated.

    All processes must call it: sharded weights are gathered from each.

    Returns:
        Why a folder was not written, a sentence each.
    """
    with state.evaluated_weights():
        weights = _full_weights(state)
        # Inside: the averaged weights are in the model as long as the context lasts.
        return _save_adapter(run, state, weights) if run.strategy.place.is_main else []


def _save_adapter(run: RunContext, state: TrainState, weights: Mapping[str, Tensor]) -> list[str]:
    from safetensors import SafetensorError

    folder = run.out / ADAPTER_FOLDER
    try:
        write_adapter(state.plain_model, weights, folder, run.spec.model)
    except ValueError as error:
        run.say(f"No adapter folder for peft was written: {error}.")
        return []
    except (OSError, SafetensorError) as error:
        # An unfinished folder would be taken for a whole one.
        rmtree(folder, ignore_errors=True)
        return [f"{relative_path(folder)} was not written: {os_error_reason(error)}."]
    run.tracker.artifact(folder, folder.name)
    return []


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
