"""Build the model of a run: construct, convert and adapt it, and restore it from a checkpoint."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config.resolve import to_dict
from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.config.trusted_targets import check_trusted
from runner.precision.casting import DefaultDtype, cast_floats
from runner.precision.contract import Precision
from runner.precision.conversion import ConversionReport, is_converted
from runner.precision.layers.conv1d import is_transposed
from runner.precision.layers.quantized_linear import unpack_state_dict
from runner.training import adapters
from runner.training.freezing import freeze_parameters
from runner.training.initial_weights import InitialWeights, load_selected
from runner.training.lazy_layers import materialize_lazy_layers
from runner.training.pretrained import safe_loading
from runner.utils.errors import ConfigError
from runner.utils.tensors import float32_bytes
from runner.utils.terminal import quote_command


class BuiltModel(NamedTuple):
    """A model on its device, converted.

    Attributes:
        model: the model.
        report: what the conversion changed.
        plain_bytes: bytes that its weights and buffers would take in float32.
        initial: what it took from init.weights; None where it took nothing from there.
    """

    model: nn.Module
    report: ConversionReport
    plain_bytes: int
    initial: InitialWeights | None = None


def build_model(
    spec: RunSpec,
    precision: Precision,
    device: torch.device,
    made_on: torch.device | None = None,
    start: LoadedCheckpoint | None = None,
    restore_exactly: bool = False,
) -> BuiltModel:
    """Build the model with its seeded weights, converted and on its device.

    All precisions start from the same weights, except with init.low_memory, which draws others.

    Args:
        spec: its model and adapter nodes are called.
        precision: converts the model.
        device: where it ends up.
        made_on: device on which its parameters are made; None: the CPU.
        start: a checkpoint to take the weights from.
        restore_exactly: the model is the one that was saved, with its adapter and packed weights.

    Raises:
        ConfigError: the target returns no model, or its model cannot be converted or does not fit
            the checkpoint or train.freeze.
    """
    # In float32 (or the precision's dtype with init.low_memory); the conversion rounds afterwards.
    model = _construct(spec, precision, device, made_on)
    loads_packed = start is not None and (
        restore_exactly or _has_same_packing(spec, precision, start)
    )
    initial = None
    # Plain weights enter before the conversion, which packs them.
    if start is not None and not loads_packed:
        initial = _load_plain_weights(spec, model, precision, start)
    size = float32_bytes(model)
    # Layers that were left unconverted hold plain weights in the checkpoint; converted ones would
    # pack them while they are loaded.
    if start is not None and loads_packed:
        precision.leave_unconverted(start.content.get("bypassed", {}))
    adapter = adapters.build_adapter(spec.adapter)
    if adapter is not None and not loads_packed:
        adapter.read_plain_weights(model, precision.bypassed)
    model, report = precision.convert(model, device)
    if adapter is not None:
        add = adapter.add_for_checkpoint if loads_packed else adapter.add
        add(model, precision.storage, precision.bypassed)
    # Packed weights fit the converted layers only, and an adapter's only the adapted ones.
    if start is not None and loads_packed:
        initial = _load(spec, model, start)
    model = model.to(device)
    # After the adapter, which decides by itself what trains, and before strategies and optimizers.
    if spec.train.freeze:
        freeze_parameters(model, spec.train.freeze)
    return BuiltModel(model, report, size, initial)


def _has_same_packing(spec: RunSpec, precision: Precision, saved: LoadedCheckpoint) -> bool:
    """Return whether a checkpoint's packed weights, and its adapter's, can be loaded unchanged."""
    return bool(precision.layout) and _fits_as_saved(spec, precision, saved)


def _fits_as_saved(spec: RunSpec, precision: Precision, saved: LoadedCheckpoint) -> bool:
    """Return whether a checkpoint has this run's adapter, and weights packed as this run packs them
    (or neither packs any)."""
    theirs = _adapter_settings(saved.content["spec"].get("adapter") or {})
    ours = _adapter_settings(spec.adapter)
    return theirs == ours and saved.content.get("layout", "") == precision.layout


def _adapter_settings(node: Mapping[str, Any]) -> dict[str, Any]:
    # Without a target there is no adapter, whatever else the node holds.
    return dict(node) if node.get("_target_") else {}


def keeps_adapter(spec: RunSpec, precision: Precision, saved: LoadedCheckpoint) -> bool:
    """Return whether a checkpoint's adapter can be loaded unchanged and need not be merged."""
    return bool(spec.adapter.get("_target_")) and _fits_as_saved(spec, precision, saved)


def restore_model(
    spec: RunSpec,
    precision: Precision,
    saved: LoadedCheckpoint,
    device: torch.device,
    made_on: torch.device | None = None,
) -> BuiltModel:
    """Build the model with a checkpoint's weights, whatever precision they were trained in.

    Packed weights are loaded unchanged in their own precision, and as the numbers that they stand
    for in one that packs none.

    Raises:
        ConfigError: the weights do not fit, or are packed in another way than this precision's.
    """
    # An adapter stays one where weights are packed as in training, or packed in neither: so the
    # run's own precision computes what it computed then. Elsewhere it is merged into the weights.
    if not _fits_as_saved(spec, precision, saved):
        spec = replace(spec, adapter={})
    exact = keeps_adapter(spec, precision, saved)
    return build_model(spec, precision, device, made_on, start=saved, restore_exactly=exact)


def restore_precision_state(
    model: nn.Module, precision: Precision, saved: LoadedCheckpoint
) -> None:
    """Give a precision the state that a checkpoint holds of it, such as histories of amax."""
    if saved.content["precision"] == precision.name:
        precision.load_state_dict(model, saved.content.get("precision_state", {}))


def _load_plain_weights(
    spec: RunSpec, model: nn.Module, precision: Precision, saved: LoadedCheckpoint
) -> InitialWeights | None:
    """Load a checkpoint into a plain model; its adapter is merged into the weights."""
    layout = saved.content.get("layout", "")
    if layout and precision.layout and not saved.content["precision"]:
        raise ConfigError(
            f"init.weights={saved.path} holds weights packed as {layout}, which precision="
            f"{precision.name} takes only packed alike and without an adapter. Type a precision "
            "that packs nothing, for example precision=bf16-mixed, or give plain weights."
        )
    if layout and precision.layout:
        raise ConfigError(
            f"checkpoint={saved.path} holds weights packed as {layout}; precision="
            f"{precision.name} would round them a second time, or add to them otherwise. Type "
            f"precision={saved.content['precision']} with the adapter that it was trained with, or "
            "a precision that packs nothing, for example precision=bf16-mixed."
        )
    # The adapter's target comes from the file: it is judged before anything is imported by it.
    config = saved.config("checkpoint")
    check_trusted(config, ["adapter"], to_dict(spec))
    adapter = adapters.build_adapter(config.values.get("adapter") or {})
    # A checkpoint's float64 would be rounded on its way through a float32 model.
    if precision.storage is torch.float64:
        cast_floats(model, torch.float64)
    if adapter is None:
        return _load(spec, model, saved)
    # The adapter freezes what it is added to, and this run trains the merged weights.
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    wide = torch.float64 if precision.storage is torch.float64 else torch.float32
    adapter.add_for_checkpoint(model, wide, saved.content.get("bypassed", {}))
    initial = _load(spec, model, saved)
    adapter.merge(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains[name])
    return initial


def _load(spec: RunSpec, model: nn.Module, saved: LoadedCheckpoint) -> InitialWeights | None:
    """Load a checkpoint; of init.weights what init.skip does not leave out."""
    if not saved.source:
        load_weights(model, saved, spec.model)
        return None
    return load_selected(model, _unpacked_weights(model, saved), spec, saved.source)


def _construct(
    spec: RunSpec,
    precision: Precision,
    device: torch.device,
    made_on: torch.device | None = None,
) -> nn.Module:
    """Call the model's target, and give its lazy layers their shapes.

    Raises:
        ConfigError: the target returns no module.
    """
    low_memory = spec.init.low_memory
    # With init.low_memory no float32 copy is ever made: the parameters are drawn on the device, in
    # the precision's dtype.
    if low_memory:
        made_on = device
    dtype = DefaultDtype(precision.storage) if low_memory else nullcontext()
    with dtype, made_on or nullcontext(), safe_loading(spec.model):
        model = build_group("model", spec.model)
        if isinstance(model, nn.Module):
            materialize_lazy_layers(spec, model, made_on or torch.device("cpu"))
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"model: {spec.model['_target_']} made a {kind}, not a torch.nn.Module.")
    return model


def load_weights(model: nn.Module, saved: LoadedCheckpoint, node: Mapping[str, Any] = {}) -> None:
    """Copy a checkpoint's weights into a model, casting to the model's dtypes.

    A packed weight is copied into a layer that is packed the same way, and is unpacked for a model
    of plain layers.

    Args:
        model: changed in place.
        saved: the checkpoint.
        node: the config node that the model was made from, for the message.

    Raises:
        ConfigError: names, shapes or packing differ.
    """
    try:
        model.load_state_dict(_unpacked_weights(model, saved), strict=True)
    except (RuntimeError, ValueError) as error:
        # torch lists each name below a first line that says nothing about this model.
        lines = str(error).splitlines()
        reason = lines[1].strip() if len(lines) > 1 else str(error)
        remedy = _model_remedy(saved, node)
        if any(map(is_converted, model.modules())):
            remedy += " For packed weights take its own precision.ignore_modules, too."
        raise ConfigError(
            f"checkpoint={saved.path} does not fit the model: {reason} {remedy}"
        ) from error


def _unpacked_weights(model: nn.Module, saved: LoadedCheckpoint) -> Mapping[str, Any]:
    """Return a checkpoint's weights, unpacked for a model of plain layers.

    Raises:
        ValueError: a packed weight lacks its scales.
    """
    weights = saved.content["model"]
    if not saved.content.get("layout") or any(map(is_converted, model.modules())):
        return weights
    transposed = [name for name, m in model.named_modules() if is_transposed(m)]
    return unpack_state_dict(weights, transposed)


def _model_remedy(saved: LoadedCheckpoint, node: Mapping[str, Any]) -> str:
    """Return what to type for the model that a checkpoint was trained with."""
    theirs = saved.content["spec"].get("model") or {}
    if str(theirs.get("_target_")).startswith("runner.api.objects."):
        return f"It was trained with a model object of a Python program, {theirs.get('name')}."
    if node.get("_target_") == theirs.get("_target_"):
        changed = [key for key, value in theirs.items() if node.get(key) != value]
        keys = [key for key in changed if "target" not in str(key)]
        if keys:
            words = [f"model.{key}={str(theirs[key]).replace(' ', '')}" for key in keys]
            return (
                f"The checkpoint's model has other values: type {quote_command(words)}, or in "
                "mode=evaluate leave model= out."
            )
    return (
        "Take the checkpoint's own model: in mode=evaluate leave model= out, elsewhere type its "
        "model=."
    )
