"""Build the model of a run: made, converted, adapted, and restored from a checkpoint."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.checkpoint import checkpoint_file, locate
from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config import trusted_targets
from runner.config.resolve import to_dict
from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.precision.casting import cast_floats, default_dtype
from runner.precision.conversion import is_converted
from runner.precision.layers.conv1d import is_transposed
from runner.precision.precision import ConversionReport, Precision
from runner.training import adapters
from runner.training.lazy_layers import materialize_lazy_layers
from runner.utils.errors import ConfigError
from runner.utils.tensors import float32_bytes
from runner.utils.terminal import quote_command


class BuiltModel(NamedTuple):
    """A model on its device; plain_bytes is what its weights and buffers take in float32."""

    model: nn.Module
    report: ConversionReport
    plain_bytes: int


def load_init_weights(spec: RunSpec) -> LoadedCheckpoint | None:
    """Return the checkpoint that init.weights names; None where it names none."""
    where = spec.init.weights
    if where is None:
        return None
    path = locate.find_checkpoint(where, spec.tracking.get("uri"), key="init.weights")
    return LoadedCheckpoint(path, checkpoint_file.load(path))


def build_model(
    spec: RunSpec,
    precision: Precision,
    device: torch.device,
    made_on: torch.device | None = None,
    start: LoadedCheckpoint | None = None,
    whole: bool = False,
) -> BuiltModel:
    """Build the model with its seeded weights, converted and on its device.

    It is made in float32 first, so that all precisions start from the same weights (with
    init.low_memory directly in the precision's dtype, which draws other ones).

    Args:
        spec: its model and adapter nodes are called.
        precision: converts the model.
        device: where it ends up.
        made_on: where its parameters are made, other than the CPU.
        start: a checkpoint to take the weights from.
        whole: the model is the one that was saved, its adapter and packed weights included.

    Raises:
        ConfigError: what was made is no model, cannot be converted or does not fit the checkpoint.
    """
    model = _make(spec, precision, device, made_on)
    exact = start is not None and (whole or _same_packing(spec, precision, start))
    if start is not None and not exact:
        _load(spec, model, precision, start)
    size = float32_bytes(model)
    if start is not None and exact:  # its plain weights would be packed as they are loaded
        precision.leave_unconverted(start.content.get("bypassed", {}))
    model, report = precision.convert(model, device)
    if (addition := adapters.build_adapter(spec.adapter)) is not None:
        addition.add(model, precision.storage, precision.bypassed)
    if start is not None and exact:
        load_weights(model, start, spec.model)
    return BuiltModel(model.to(device), report, size)


def _same_packing(spec: RunSpec, precision: Precision, saved: LoadedCheckpoint) -> bool:
    """Whether a checkpoint's packed weights, and its adapter's, fit as they are."""
    return bool(precision.layout) and _fits_as_saved(spec, precision, saved)


def _fits_as_saved(spec: RunSpec, precision: Precision, saved: LoadedCheckpoint) -> bool:
    """Whether a checkpoint has this run's adapter, and packs weights as this run's precision does
    (or neither packs any)."""
    nodes = (saved.content["spec"].get("adapter") or {}, spec.adapter)
    theirs, ours = (dict(node) if node.get("_target_") else {} for node in nodes)
    return theirs == ours and saved.content.get("layout", "") == precision.layout


def keeps_adapter(spec: RunSpec, precision: Precision, saved: LoadedCheckpoint) -> bool:
    """Return whether the adapter that a checkpoint was trained with can be loaded as it is, in this
    precision's dtype, and need not be merged."""
    return bool(spec.adapter.get("_target_")) and _fits_as_saved(spec, precision, saved)


def restore_model(
    spec: RunSpec, precision: Precision, device: torch.device, saved: LoadedCheckpoint
) -> BuiltModel:
    """Build the model with a checkpoint's weights, whatever precision they were trained in.

    Packed weights are loaded as they are in their own precision, and as the numbers that they
    stand for in one that packs none. An adapter is kept where weights are packed as they were in
    training, or not at all in both, so that the run's own precision computes what it computed
    then; elsewhere it is merged.

    Raises:
        ConfigError: the weights do not fit, or are packed in another way than this precision's.
    """
    if not _fits_as_saved(spec, precision, saved):
        spec = replace(spec, adapter={})  # merged into the weights
    whole = keeps_adapter(spec, precision, saved)
    built = build_model(spec, precision, device, start=saved, whole=whole)
    if saved.content["precision"] == precision.name:
        precision.load_state_dict(built.model, saved.content.get("precision_state", {}))
    return built


def _load(spec: RunSpec, model: nn.Module, precision: Precision, saved: LoadedCheckpoint) -> None:
    """Load a checkpoint into a plain model; its adapter is merged into the weights."""
    layout = saved.content.get("layout", "")
    if layout and precision.layout:
        raise ConfigError(
            f"checkpoint={saved.path} holds weights packed as {layout}; precision="
            f"{precision.name} would round them a second time, or add to them otherwise. Type "
            f"precision={saved.content['precision']} with the adapter that it was trained with, or "
            "a precision that packs nothing, for example precision=bf16-mixed."
        )
    theirs = saved.content["spec"]
    own = checkpoint_file.is_own(saved.content)
    trusted_targets.check_trusted(theirs, ["adapter"], to_dict(spec), saved.path, "checkpoint", own)
    addition = adapters.build_adapter(theirs.get("adapter") or {})
    if precision.storage is torch.float64:  # else a checkpoint's float64 is rounded on its way
        cast_floats(model, torch.float64)
    if addition is None:
        load_weights(model, saved, spec.model)
        return
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    wide = torch.float64 if precision.storage is torch.float64 else torch.float32
    addition.add(model, wide, saved.content.get("bypassed", {}))
    load_weights(model, saved, spec.model)
    addition.merge(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains[name])


def _make(
    spec: RunSpec,
    precision: Precision,
    device: torch.device,
    made_on: torch.device | None = None,
) -> nn.Module:
    low = spec.init.low_memory
    made_on = device if low else made_on
    dtype = default_dtype(precision.storage) if low else nullcontext()
    init_context = precision.init_context() if low else nullcontext()
    with dtype, made_on or nullcontext(), init_context:
        model = build_group("model", spec.model)
        if isinstance(model, nn.Module):
            materialize_lazy_layers(spec, model, made_on or torch.device("cpu"))
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"model: {spec.model['_target_']} made a {kind}, not a torch.nn.Module.")
    return model


def load_weights(model: nn.Module, saved: LoadedCheckpoint, node: Mapping[str, Any] = {}) -> None:
    """Copy a checkpoint's weights into a model, casting to the model's dtypes. A packed weight
    enters a layer that is packed the same way as it is, and a plain layer as what it stands for.

    Args:
        model: changed in place.
        saved: the checkpoint.
        node: of the config that the model was made from, for the message.

    Raises:
        ConfigError: names, shapes or packing differ.
    """
    weights = saved.content["model"]
    try:
        if saved.content.get("layout") and not any(map(is_converted, model.modules())):
            from runner.precision.layers.linear_4bit import unpack_state_dict

            transposed = [name for name, m in model.named_modules() if is_transposed(m)]
            weights = unpack_state_dict(weights, transposed)
        model.load_state_dict(weights, strict=True)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise ConfigError(
            f"checkpoint={saved.path} does not fit the model: {reason} "
            f"{_own_model(saved, node)} For packed weights take its own precision.ignore_modules, "
            "too."
        ) from error


def _own_model(saved: LoadedCheckpoint, node: Mapping[str, Any]) -> str:
    """Return what to type for the model that a checkpoint was trained with."""
    theirs = saved.content["spec"].get("model") or {}
    if node.get("_target_") == theirs.get("_target_"):
        keys = [k for k, value in theirs.items() if node.get(k) != value and "target" not in str(k)]
        if keys:
            words = [f"model.{key}={str(theirs[key]).replace(' ', '')}" for key in keys]
            return (
                f"The checkpoint's model has other values: type {quote_command(words)}, or in "
                "mode=evaluate leave model= out."
            )
    return (
        "Take the checkpoint's own model: leave model= out in mode=evaluate, give it with "
        "init.weights."
    )
