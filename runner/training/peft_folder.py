"""Write a trained adapter as peft's own folder, which peft loads onto the model without it."""

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.precision.layers.conv1d import is_transposed
from runner.utils.import_warnings import suppress_import_warnings

ADAPTER_FOLDER = "adapter"
_PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""
_WEIGHT = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)\.default\.weight$")
_TASK_TYPES = {"causal_lm": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM"}
"""peft's kinds of tasks by the kinds of model=hf; those for classifiers would also train a head."""


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by the dotted names of the layers that they stand for."""
    # A model with such a layer has imported peft; no other one needs to.
    library = sys.modules.get("peft.tuners.lora")
    if library is None:
        return {}
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, library.LoraLayer):
            layers[name] = module
    return {name: layer for name, layer in layers.items() if "default" in layer.lora_A}


def write_adapter(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    folder: Path,
    node: Mapping[str, Any],
    init: str = "default",
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, for PeftModel.from_pretrained.

    Additions that started from a part of the base weights (adapter.init=pissa, olora) are written
    for the original ones, with twice the rank: what they started with is subtracted. Modules that
    train in full beside the adapter are in the folder, too.

    Args:
        model: with its adapter.
        weights: the model's state dict, full tensors on any device.
        folder: made if it is missing.
        node: the model's config node, from which peft's own fields about the base are taken.
        init: the value of adapter.init, which the file of tensors says in its metadata.

    Raises:
        ValueError: a parameter of the model itself trains, which peft has no place for.
        OSError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    layers = lora_layers(model)
    whole = _modules_in_full(model)
    adapted = [name for name in layers if name not in whole]
    named: dict[str, Tensor] = {}
    for (part, module), tensor in _adapter_tensors(weights).items():
        if module in adapted:
            # peft's files have DoRA's magnitudes without the name of the tensor.
            end = "" if part == "lora_magnitude_vector" else ".weight"
            named[f"{_PREFIX}{module}.{part}{end}"] = tensor
    for module in whole:
        for name, tensor in merged(module, weights, layers.get(module)).items():
            named[f"{_PREFIX}{module}.{name}"] = tensor
    # peft's classes for these tasks ask this of the base.
    generates = hasattr(model, "prepare_inputs_for_generation")
    config = _layer_config(
        next(iter(layers.values())),
        # Not "pissa" or "olora", by which peft would change the base again when it loads them.
        init_lora_weights="gaussian" if init == "gaussian" else True,
        # A regular expression, which peft compares with full names; a list also fits their ends.
        target_modules="|".join(re.escape(name) for name in adapted),
        modules_to_save=whole or None,
        fan_in_fan_out=any(is_transposed(layers[name].get_base_layer()) for name in adapted),
        task_type=_TASK_TYPES.get(str(node.get("kind"))) if generates else None,
        base_model_name_or_path=str(node.get("path") or ""),
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    save_file(plain, folder / "adapter_model.safetensors", {"format": "pt", "adapter.init": init})
    config.save_pretrained(str(folder))


def _layer_config(layer: Any, **settings: Any) -> Any:
    """Return peft's config of an adapter: what a layer of peft has, and further settings."""
    with suppress_import_warnings():
        from peft import LoraConfig

    rank, alpha = layer.r["default"], layer.lora_alpha["default"]
    uses_rslora = layer.use_rslora["default"]
    if hasattr(layer, "start_A"):
        # At twice the rank, the factor that makes the scale the same.
        rank, alpha = 2 * rank, alpha * (math.sqrt(2) if uses_rslora else 2)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=float(getattr(layer.lora_dropout["default"], "p", 0.0)),
        use_dora=layer.use_dora["default"],
        use_rslora=uses_rslora,
        **settings,
    )


def _adapter_tensors(weights: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Return the adapter's tensors by their part (lora_A, for example) and the layer's name.

    W - s B0 A0 + s B A is W + s [B, -B0] [A; A0], where W is the original base weight.
    """
    found = {}
    for name, tensor in weights.items():
        match = _WEIGHT.search(name)
        if not match:
            continue
        part, layer = match[1], name[: match.start()]
        if part == "lora_A" and f"{layer}.start_A" in weights:
            tensor = torch.cat([tensor, weights[f"{layer}.start_A"].to(tensor)])
        elif part == "lora_B" and f"{layer}.start_B" in weights:
            tensor = torch.cat([tensor, -weights[f"{layer}.start_B"].to(tensor)], 1)
        found[part, layer] = tensor
    return found


def _modules_in_full(model: nn.Module) -> list[str]:
    """Return the modules that a run changes beside the adapter, for example by adapter.train.

    Raises:
        ValueError: a parameter of the model itself trains.
    """
    found: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" not in name:
            module = name.rpartition(".")[0].removesuffix("base_layer").rstrip(".")
            if not module:
                raise ValueError(f"{name} trains, and is in no module that peft could store")
            found[module] = None
    for name, child in model.named_modules():
        # Its statistics run whether its weights train or not.
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.track_running_stats:
            found[name] = None
    return list(found)


def merged(name: str, weights: Mapping[str, Tensor], layer: Any) -> dict[str, Tensor]:
    """Return the plain weights of one module by their names in it, with its addition in them.

    Args:
        name: of the module; for a layer with an addition that of peft's layer.
        weights: the model's state dict, whose weights are unpacked.
        layer: peft's layer; None for a module without an addition.
    """
    start = f"{name}." if layer is None else f"{name}.base_layer."
    parts = {k.removeprefix(start): v for k, v in weights.items() if k.startswith(start)}
    if layer is not None:
        a = weights[f"{name}.lora_A.default.weight"]
        b = weights[f"{name}.lora_B.default.weight"]
        magnitudes = weights.get(f"{name}.lora_magnitude_vector.default.weight")
        plain = parts["weight"]
        transposed = is_transposed(layer.get_base_layer())
        # In float64, and rounded to the weight's dtype once.
        total = plain.t().double() if transposed else plain.double()
        total = total + (b.double() @ a.double()) * layer.scaling["default"]
        if magnitudes is not None:
            total = total * (magnitudes.double() / total.norm(dim=1))[:, None]
        parts["weight"] = (total.t() if transposed else total).to(plain.dtype)
    return parts
