"""Write a trained model of transformers as the folder that its from_pretrained loads."""

import copy
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.precision.layers.conv1d import is_transposed
from runner.precision.layers.quantized_linear import unpack_state_dict
from runner.training.peft_folder import lora_layers, merged
from runner.utils.tensors import dtype_name

PRETRAINED_FOLDER = "pretrained"
_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "preprocessor_config.json",
)
"""Files of a tokenizer or an image processor, which save_pretrained writes beside a model."""
_CHANGED_HERE = ("runner.precision.", "runner.training.", "torch.")
"""Modules that make subclasses of a model's class in place."""


def is_pretrained_model(model: nn.Module) -> bool:
    """Return whether a model is one of transformers."""
    # A model of transformers has imported it; nothing else needs to.
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def write_pretrained(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    folder: Path,
    node: Mapping[str, Any],
    beside: list[Path],
) -> str:
    """Write config.json and model.safetensors, and copy files of a tokenizer.

    Packed weights are unpacked, and an adapter is merged. All numbers are in the widest dtype that
    the model stores, which the config names.

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
    made = _with_weights(model, plain, node)
    folder.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(folder)
    copied = _copy_beside(beside, folder)
    return ", ".join([dtype_name(widest), *copied])


def plain_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict that a model has without packing and adapter.

    Args:
        model: converted, with or without an adapter.
        weights: its state dict.
    """
    plain = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    transposed = [name for name, module in model.named_modules() if is_transposed(module)]
    plain = unpack_state_dict(plain, transposed)
    for name, layer in lora_layers(model).items():
        parts = merged(name, plain, layer)
        plain = {key: value for key, value in plain.items() if not key.startswith(f"{name}.")}
        plain |= {f"{name}.{part}": value for part, value in parts.items()}
    return plain


def _with_weights(model: Any, plain: Mapping[str, Tensor], node: Mapping[str, Any]) -> Any:
    """Return a new model of the same class and config with these weights.

    Raises:
        ValueError: it needs others.
    """
    kinds = type(model).__mro__
    kind: Any = next(k for k in kinds if not k.__module__.startswith(_CHANGED_HERE))
    config = copy.deepcopy(model.config)
    _restore_cache(config, node)
    with torch.device("meta"):
        made = kind(config)
    wanted = dict(made.state_dict(keep_vars=True))
    loaded = {name: value for name, value in plain.items() if name in wanted}
    given = {id(wanted[name]) for name in loaded}
    # A tied weight is given under one of its names.
    missing = [name for name, value in wanted.items() if id(value) not in given]
    if missing:
        raise ValueError(f"its layers have other weights than {kind.__name__}'s {missing[0]}")
    made.load_state_dict(loaded, strict=False, assign=True)
    made.tie_weights()
    if getattr(model, "generation_config", None) is not None:
        made.generation_config = copy.deepcopy(model.generation_config)
        made.generation_config.use_cache = getattr(config, "use_cache", True)
    return made


def _restore_cache(config: Any, node: Mapping[str, Any]) -> None:
    """Set use_cache, which model=hf turns off for training, to what the model came with."""
    typed = node.get("config")
    if isinstance(typed, Mapping) and "use_cache" in typed:
        return
    source = Path(str(node.get("path") or "")) / "config.json"
    settings = json.loads(source.read_text()) if source.is_file() else {}
    for part in (config, config.get_text_config()):
        if hasattr(part, "use_cache"):
            part.use_cache = settings.get("use_cache", True)


def _copy_beside(sources: list[Path], folder: Path) -> list[str]:
    """Copy a tokenizer's files; return from where, in words."""
    copied: dict[str, Path] = {}
    for source in sources:
        for pattern in _BESIDE:
            for file in sorted(source.glob(pattern)):
                copied.setdefault(file.name, file)
    for name, file in copied.items():
        shutil.copyfile(file, folder / name)
    places = dict.fromkeys(file.parent for file in copied.values())
    return [f"tokenizer files of {place}" for place in places]
