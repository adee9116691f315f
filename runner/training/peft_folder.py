"""Write a trained adapter as peft's own folder, which peft loads onto the model without it."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runner.precision.layers.conv1d import is_transposed
from runner.utils.import_warnings import suppress_import_warnings

ADAPTER_FOLDER = "adapter"
_PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""
_WEIGHT = re.compile(r"\.(lora_[AB])\.default\.weight$")
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
    model: nn.Module, weights: Mapping[str, Tensor], folder: Path, node: Mapping[str, Any]
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, for PeftModel.from_pretrained.

    Modules that train in full beside the adapter are in the folder, too.

    Args:
        model: with its adapter.
        weights: the model's state dict, full tensors on any device.
        folder: made if it is missing.
        node: the model's config node, from which peft's own fields about the base are taken.

    Raises:
        ValueError: a parameter of the model itself trains, which peft has no place for.
        OSError: the folder cannot be written.
    """
    with suppress_import_warnings():
        from peft import LoraConfig
    from safetensors.torch import save_file

    layers = lora_layers(model)
    whole = _modules_in_full(model)
    adapted = [name for name in layers if name not in whole]
    tensors = {
        name: tensor for name, tensor in _adapter_tensors(weights).items() if name[1] in adapted
    }
    named = {f"{_PREFIX}{module}.{part}.weight": t for (part, module), t in tensors.items()}
    for module in whole:
        for name, tensor in merged(module, weights, layers.get(module)).items():
            named[f"{_PREFIX}{module}.{name}"] = tensor
    first: Any = next(iter(layers.values()))
    # peft's classes for these tasks ask this of the base.
    generates = hasattr(model, "prepare_inputs_for_generation")
    dropout = first.lora_dropout["default"]
    config = LoraConfig(
        r=first.r["default"],
        lora_alpha=first.lora_alpha["default"],
        lora_dropout=float(getattr(dropout, "p", 0.0)),
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
    save_file(plain, folder / "adapter_model.safetensors", {"format": "pt"})
    config.save_pretrained(str(folder))


def _adapter_tensors(weights: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Return the adapter's tensors by their part, lora_A or lora_B, and the layer's name."""
    found = {}
    for name, tensor in weights.items():
        match = _WEIGHT.search(name)
        if match:
            found[match[1], name[: match.start()]] = tensor
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
        addition = (b.double() @ a.double()) * layer.scaling["default"]
        if is_transposed(layer.get_base_layer()):
            addition = addition.t()
        plain = parts["weight"]
        # In float64, and rounded to the weight's dtype once.
        parts["weight"] = (plain.double() + addition).to(plain.dtype)
    return parts
