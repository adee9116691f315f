"""Write a trained model as the folder that transformers loads, and an adapter as that of peft."""

import copy
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.core import files, module_tree, tensor_facts, terminal
from runner.precision.layers.conv1d import is_transposed
from runner.precision.layers.derived_weight import current_weight
from runner.precision.layers.experts import Stack, expert_matrices, expert_stacks, is_known_mixture
from runner.training.initial_weights import entries_below, unpack_weights
from runner.training.schedules import Node

# Files of a tokenizer or an image processor, which save_pretrained writes beside a model.
_BESIDE = (
    "tokenizer*.json",
    "*_tokens*.json",
    "chat_template.jinja",
    "vocab.*",
    "merges.txt",
    "*.model",
    "preprocessor_config.json",
)
# Modules that make subclasses of a model's class in place.
_CHANGED_HERE = ("runner.precision.", "runner.training.", "torch.")


# What peft puts before the names of the model that it wraps.
_PREFIX = "base_model.model."
_WEIGHT = re.compile(r"\.(lora_[AB]|lora_magnitude_vector)\.default\.weight$")
# peft's kinds of tasks by the kinds of model=hf; those for classifiers would also train a head.
_TASK_TYPES = {"causal_lm": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM"}


def is_pretrained_model(model: nn.Module) -> bool:
    """Return whether a model is one of transformers."""
    # A model of transformers has imported it; nothing else needs to.
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def write_pretrained(
    model: nn.Module, weights: Mapping[str, Tensor], folder: Path, node: Node, beside: list[Path]
) -> str:
    """Write config.json and model.safetensors, and copy files of a tokenizer.

    Packed weights are unpacked, and an adapter is merged. All numbers are in the narrowest
    dtype that holds all that the model stores, which the config names.

    Args:
        model: of transformers, converted, with or without an adapter.
        weights: the model's state dict, full tensors on any device.
        folder: made if it is missing.
        node: the model's config node.
        beside: folders that may hold files of a tokenizer or an image processor; the first one
            that has a file counts.

    Returns:
        The dtype and the copied files, in words.

    Raises:
        ValueError: the weights are not those of the model's class, as of layers that fuse two.
        OSError: the folder cannot be written.
    """
    plain = plain_weights(model, weights)
    floats = {value.dtype for value in plain.values() if value.is_floating_point()}
    widest = max(floats, key=lambda dtype: torch.finfo(dtype).bits)
    if len(floats) > 1 and widest is not torch.float64:
        widest = torch.float32  # float16 and bfloat16 hold other numbers
    for name, value in plain.items():
        cast = value.to(widest) if value.is_floating_point() else value
        plain[name] = cast.detach().cpu()
    plain_model = _with_weights(model, plain, node)
    folder.mkdir(parents=True, exist_ok=True)
    plain_model.save_pretrained(folder)
    copied = {}
    left_out = []
    for source in beside:
        for pattern in _BESIDE:
            for file in sorted(source.glob(pattern)):
                if _is_of_folder(file):
                    copied.setdefault(file.name, file)
                else:
                    left_out.append(f"without {file}, a link to {file.resolve()}")
    sources = {}
    for name, file in copied.items():
        shutil.copyfile(file, files.prepare_output(folder / name))
        sources[f"tokenizer files of {file.parent}"] = None
    return ", ".join([tensor_facts.dtype_name(widest), *sources, *left_out])


def _is_of_folder(file: Path) -> bool:
    """Return whether a file's content is that of its own folder, whoever made the folder.

    A link may lead to any file of this user's, which a copy would publish. Hugging Face's cache has
    a link to `<model>/blobs/<hash>` in `<model>/snapshots/<commit>`.
    """
    folder = file.parent.resolve()
    content = file.resolve()
    is_cache = folder.parent.name == "snapshots"
    own = (folder.parents[1] / "blobs") if is_cache else folder
    return content.is_relative_to(own) or content.is_relative_to(folder)


def plain_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict that a model has without packing and adapter.

    Args:
        model: converted, with or without an adapter.
        weights: its state dict.
    """
    plain = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    plain = unpack_weights(model, plain)
    layers = lora_layers(model)
    changed = {}
    experts = set()
    for stack in expert_stacks(model):
        if stack.layers[0] not in layers:
            continue
        experts.update(stack.layers)
        changed[stack.name] = plain[stack.name].clone()
        matrices = expert_matrices(changed[stack.name], stack.transposed)
        for name, matrix in zip(stack.layers, matrices, strict=True):
            matrix.copy_(_with_addition(matrix, name, plain, layers[name]))
    for name in layers.keys() - experts:
        parts = merged(name, plain, layers[name])
        changed |= {f"{name}.{part}": value for part, value in parts.items()}
    kept = {
        k: v for k, v in plain.items() if layers.keys().isdisjoint(module_tree.name_prefixes(k))
    }
    return kept | changed


def _with_weights(model: Any, plain: Mapping[str, Tensor], node: Node) -> Any:
    """Return a new model of the same class and config with these weights.

    Raises:
        ValueError: it needs others.
    """
    kinds = type(model).__mro__
    kind: Any = next(k for k in kinds if not k.__module__.startswith(_CHANGED_HERE))
    config = copy.deepcopy(model.config)
    typed = node.get("config")
    if not (isinstance(typed, Mapping) and "use_cache" in typed):
        # model=hf turns use_cache off for training; the folder has what the model came with.
        source = Path(str(node.get("path") or "")) / "config.json"
        settings = json.loads(source.read_text()) if source.is_file() else {}
        for part in (config, config.get_text_config()):
            if hasattr(part, "use_cache"):
                part.use_cache = settings.get("use_cache", True)
    with torch.device("meta"):
        fresh = kind(config)
    own = dict(fresh.state_dict(keep_vars=True))
    loaded = {name: value for name, value in plain.items() if name in own}
    loaded_ids = {id(own[name]) for name in loaded}
    # A tied weight is given under one of its names.
    missing = [name for name, value in own.items() if id(value) not in loaded_ids]
    if missing:
        raise ValueError(f"its layers have other weights than {kind.__name__}'s {missing[0]}")
    fresh.load_state_dict(loaded, strict=False, assign=True)
    fresh.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        fresh.generation_config = copy.deepcopy(model.generation_config)
        fresh.generation_config.use_cache = getattr(config, "use_cache", True)
    return fresh


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by the dotted names of the layers that they stand for."""
    # A model with such a layer has imported peft; no other one needs to.
    library = sys.modules.get("peft.tuners.lora")
    if library is None:
        return {}
    modules: dict[str, Any] = dict(model.named_modules())
    layers = {name: m for name, m in modules.items() if isinstance(m, library.LoraLayer)}
    return {name: layer for name, layer in layers.items() if "default" in layer.lora_A}


def write_adapter(
    model: nn.Module, weights: Mapping[str, Tensor], folder: Path, node: Node, init: str = "default"
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, for PeftModel.from_pretrained.

    Additions that started from a part of the base weights (adapter.init=pissa, olora) are written
    for the original ones, with twice the rank: what they started with is subtracted. Modules that
    train in full beside the adapter are in the folder, too. Those of experts are written as peft
    has them of a stacked weight (target_parameters).

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

    with terminal.suppress_warnings():
        from peft import LoraConfig

    layers = lora_layers(model)
    whole = _modules_in_full(model)
    stacks = [stack for stack in expert_stacks(model) if stack.layers[0] in layers]
    experts = {name for stack in stacks for name in stack.layers}
    adapted = [name for name in layers if name not in whole and name not in experts]
    additions = _adapter_tensors(weights)
    named = _expert_tensors(stacks, additions)
    for (part, module), tensor in additions.items():
        if module in adapted:
            # peft's files have DoRA's magnitudes without the name of the tensor.
            end = "" if part == "lora_magnitude_vector" else ".weight"
            named[f"{_PREFIX}{module}.{part}{end}"] = tensor
    for module in whole:
        for name, tensor in merged(module, weights, layers.get(module)).items():
            named[f"{_PREFIX}{module}.{name}"] = tensor
    # peft's classes for these tasks ask this of the base.
    generates = hasattr(model, "prepare_inputs_for_generation")
    layer = next(iter(layers.values()))
    rank, alpha = layer.r["default"], layer.lora_alpha["default"]
    uses_rslora = layer.use_rslora["default"]
    if hasattr(layer, "start_A"):
        # At twice the rank, the factor that makes the scale the same.
        rank, alpha = 2 * rank, alpha * (math.sqrt(2) if uses_rslora else 2)
    expression = "|".join(re.escape(name) for name in adapted)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        # peft has none for experts; the folder is for evaluation.
        lora_dropout=0.0 if stacks else float(getattr(layer.lora_dropout["default"], "p", 0.0)),
        use_dora=layer.use_dora["default"],
        use_rslora=uses_rslora,
        # With "pissa" or "olora" peft would change the base again when it loads them.
        init_lora_weights="gaussian" if init == "gaussian" else True,
        # A regular expression, which peft compares with full names; a list also fits their ends.
        # For a mixture of transformers peft takes an expression for the ends of what it matches.
        target_modules=adapted if is_known_mixture(model) or not adapted else expression,
        target_parameters=[stack.name for stack in stacks] or None,
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


def _adapter_tensors(weights: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Return the adapter's tensors by their part (lora_A, for example) and the layer's name.

    W - s B0 A0 + s B A is W + s [B, -B0] [A; A0], where W is the original base weight.
    """
    tensors = {}
    for name, tensor in weights.items():
        match = _WEIGHT.search(name)
        if not match:
            continue
        part, layer = match[1], name[: match.start()]
        if part == "lora_A" and f"{layer}.start_A" in weights:
            tensor = torch.cat([tensor, weights[f"{layer}.start_A"].to(tensor)])
        elif part == "lora_B" and f"{layer}.start_B" in weights:
            tensor = torch.cat([tensor, -weights[f"{layer}.start_B"].to(tensor)], 1)
        tensors[part, layer] = tensor
    return tensors


def _expert_tensors(
    stacks: Sequence[Stack], additions: Mapping[tuple[str, str], Tensor]
) -> dict[str, Tensor]:
    """Return the additions of experts by the names that they have in a file of peft.

    Source: peft, ParamWrapper: lora_A [experts * rank, in], lora_B [out, rank * experts], where the
    experts are outermost in the one and innermost in the other; of several stacked weights of a
    module the last one is wrapped last.
    """
    named = {}
    for index, stack in enumerate(stacks):
        module = stack.name.rpartition(".")[0]
        if not module:
            raise ValueError(f"{stack.name} is in no module that peft could wrap")
        inside = sum(other.module is stack.module for other in stacks[index + 1 :])
        prefix = f"{_PREFIX}{module}{'.base_layer' * inside}"
        down = [additions["lora_A", name] for name in stack.layers]
        up = [additions["lora_B", name] for name in stack.layers]
        # Without this attribute peft takes a stacked weight for [experts, out, in].
        if stack.transposed is not getattr(stack.module, "is_transposed", False):
            down, up = [b.t() for b in up], [a.t() for a in down]
        named[f"{prefix}.lora_A.weight"] = torch.cat(down)
        named[f"{prefix}.lora_B.weight"] = torch.stack(up, dim=-1).flatten(1)
    return named


def _modules_in_full(model: nn.Module) -> list[str]:
    """Return the modules that a run changes beside the adapter, for example by adapter.train.

    Raises:
        ValueError: a parameter of the model itself trains.
    """
    modules = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" not in name:
            module = name.rpartition(".")[0].removesuffix("base_layer").rstrip(".")
            if not module:
                raise ValueError(f"{name} trains, and is in no module that peft could store")
            modules[module] = None
    for name, child in model.named_modules():
        # Its statistics run whether its weights train or not.
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.track_running_stats:
            modules[name] = None
    return list(modules)


def merged(name: str, weights: Mapping[str, Tensor], layer: Any) -> dict[str, Tensor]:
    """Return the plain weights of one module by their names in it, with its addition in them.

    Args:
        name: of the module; for a layer with an addition that of peft's layer.
        weights: the model's state dict, whose weights are unpacked.
        layer: peft's layer; None for a module without an addition.
    """
    start = f"{name}." if layer is None else f"{name}.base_layer."
    parts = entries_below(start, weights)
    if layer is not None:
        # One that is derived from other parameters, which the adapter freezes, is the layer's.
        plain = parts["weight"] if "weight" in parts else current_weight(layer.get_base_layer())
        parts["weight"] = _with_addition(plain, name, weights, layer)
    return parts


def _with_addition(plain: Tensor, name: str, weights: Mapping[str, Tensor], layer: Any) -> Tensor:
    """Return the weight of one of peft's layers with its addition; see merged()."""
    a = weights[f"{name}.lora_A.default.weight"]
    b = weights[f"{name}.lora_B.default.weight"]
    magnitudes = weights.get(f"{name}.lora_magnitude_vector.default.weight")
    transposed = is_transposed(layer.get_base_layer())
    # It is computed in float64, and rounded to the weight's dtype once.
    total = plain.t().double() if transposed else plain.double()
    total = total + (b.double() @ a.double()) * layer.scaling["default"]
    if magnitudes is not None:
        total = total * (magnitudes.double() / total.norm(dim=1))[:, None]
    return (total.t() if transposed else total).to(plain.dtype)
