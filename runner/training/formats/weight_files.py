"""Read weights from files that other programs wrote, or this one without a checkpoint around them.

| what is named | what is read |
| --- | --- |
| a .safetensors file | its tensors |
| a file of torch.save (.pt, .pth, .bin, .ckpt) | a state dict, or one under state_dict, model |
| a folder of save_pretrained | model.safetensors or pytorch_model.bin, or the shards of its index |

Nothing in a file is executed: pickles are read by torch.load with weights_only=True.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from runner.core import ConfigError, files
from runner.precision.layers.quantized_linear import packed_label
from runner.training.initial_weights import entries_below

FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of a folder that save_pretrained wrote, in the order in which they are looked for."""
# Keys under which training scripts save a state dict beside other things.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_OTHER_FORMATS: Mapping[bytes, str] = {
    b"GGUF": "a GGUF file, whose weights are quantised for llama.cpp",
    b"\x89HDF": "an HDF5 file, as Keras writes it",
}
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_ALLOWED = "Give a .safetensors file, a state dict (.pt, .pth, .bin), or save_pretrained's folder."


class WeightFile(NamedTuple):
    """Weights that were read.

    Attributes:
        weights: tensors by name; a value may be something else, in a state dict with extra state.
        source: which file, and which part of it, in words.
    """

    weights: dict[str, Any]
    source: str


def read_weights(where: str) -> WeightFile | None:
    """Return the weights that a path names; None for a checkpoint of this runner, or no weights.

    Args:
        where: a file or a folder.

    Raises:
        ConfigError: the file or folder holds something else than weights, or is damaged.
    """
    path = Path(where)
    try:
        if path.is_file():
            return _read_file(path)
        if path.is_dir() and not any((path / "checkpoints").glob("step-*.pt")):
            return _read_folder(path)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {files.os_error_reason(error)}") from error
    return None


def _read_folder(folder: Path) -> WeightFile | None:
    """Return the weights of a folder; None where it has no file of weights."""
    for name in FOLDER_FILES:
        file = folder / name
        if file.is_file():
            return _read_shards(file) if file.suffix == ".json" else _read_file(file)
    if any(folder.glob("step-*.pt")):
        return None
    if any((folder / name).is_file() for name in _ADAPTER_FILES):
        raise _adapter_refusal(folder)
    paths = sorted(file.name for file in folder.iterdir() if file.suffix in (*_SUFFIXES, ".gguf"))
    if paths:
        names = ", ".join(paths[:6])
        raise _refusal(folder, f"has none of {', '.join(FOLDER_FILES)}. Name one file: {names}", "")
    if (folder / "config.json").is_file():
        raise _refusal(folder, "has a config.json and no weights")
    return None


def _read_shards(index: Path) -> WeightFile:
    """Return the weights of the files that an index lists."""
    try:
        listed = files.read_json(index)["weight_map"]
        names = sorted(set(listed.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refusal(index, "is no index of shards: it has no weight_map of files") from error
    # A name with a path in it would lead to files outside the folder.
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise _refusal(index, "names files outside its folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        lacking = ", ".join(missing[:4])
        raise _refusal(
            index, f"names {len(names)} files, of which {len(missing)} are missing: {lacking}", ""
        )
    weights = {}
    for name in names:
        part = _read_file(index.parent / name)
        weights |= part.weights if part else {}
    return WeightFile(weights, f"{index.name}, {len(names)} files")


def _read_file(path: Path) -> WeightFile | None:
    """Return the weights of a file; None for a checkpoint of this runner."""
    with path.open("rb") as file:
        start = file.read(9)
    for magic, kind in _OTHER_FORMATS.items():
        if start.startswith(magic):
            raise _refusal(path, f"is {kind}")
    if not start:
        raise _refusal(path, "is empty")
    # A length of eight bytes, then JSON.
    if path.suffix == ".safetensors" or start[8:] == b"{":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return WeightFile(_checked(path, load_file(path)), "safetensors")
        except SafetensorError as error:
            reason = str(error).rpartition(": ")[2]
            raise _refusal(path, f"is cut short or damaged ({reason})", "Copy it again.") from error
    # torch.save writes a zip file, or a plain pickle in its older format.
    if start.startswith(b"PK") or start[:1] == b"\x80":
        return _read_torch(path)
    raise _refusal(path, "is in no format of weights that is known here")


def _read_torch(path: Path) -> WeightFile | None:
    """Return the state dict of a file of torch.save; None for a checkpoint of this runner."""
    content = _unpickle(path)
    if isinstance(content, dict) and {"format", "spec"} <= content.keys():
        return None
    if not isinstance(content, dict):
        raise _refusal(path, f"holds a {type(content).__name__} and no state dict")
    if "param_groups" in content and "state" in content:
        raise _refusal(path, "holds the state of an optimizer and no weights")
    for key in _WRAPPERS:
        if _is_state_dict(content.get(key)):
            return WeightFile(_checked(path, content[key]), f'torch.save, "{key}" of it')
    if not _is_state_dict(content):
        keys = ", ".join(map(str, content)) or "none"
        raise _refusal(path, f"holds no state dict; its keys: {keys[:200]}")
    return WeightFile(_checked(path, content), "torch.save")


def _unpickle(path: Path) -> Any:
    """Return the content of a file of torch.save, with tensors on the CPU that are mapped from it.

    Raises:
        ConfigError: it is damaged, or holds more than tensors in plain containers.
    """
    is_zip = False
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if is_zip:
            with ZipFile(path) as archive:
                names = archive.namelist()
                if any(name.endswith("constants.pkl") for name in names):
                    raise _refusal(path, "is a TorchScript program")
                # torch compresses no member, and a small compressed one may unpack to more than
                # the memory.
                compressed = any(m.compress_type != ZIP_STORED for m in archive.infolist())
                if compressed or not any(name.endswith("data.pkl") for name in names):
                    raise _refusal(path, "is a zip file that torch.save did not write")
                damaged = archive.testzip()
                if damaged is not None:
                    changed = f"is damaged: {damaged} has changed on disk"
                    raise _refusal(path, changed, "Copy it again.")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except ConfigError:
        raise
    except Exception as error:
        # torch names the first object of a pickle that holds other than tensors.
        named = _GLOBAL.search(str(error))
        if named:
            raise _refusal(
                path,
                f"holds Python objects ({named[1]}), and a pickle is not executed here",
                "Where you trust it, save its state_dict() with safetensors.torch.save_file.",
            ) from error
        if is_zip:
            raise _refusal(path, "is cut short or damaged", "Copy it again.") from error
        raise _refusal(
            path, "is cut short, or a pickle of another program, which is not executed here"
        ) from error


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def _checked(path: Path, weights: Mapping[Any, Any]) -> dict[str, Any]:
    """Return weights by name.

    Raises:
        ConfigError: they are none, or those of an adapter.
    """
    named = {str(name): value for name, value in weights.items()}
    if not named:
        raise _refusal(path, "holds no tensor")
    if any(".lora_A." in name or ".lora_embedding_A" in name for name in named):
        if any(".base_layer." in name for name in named):
            raise _refusal(
                path,
                "holds the weights of a model with its adapter apart",
                "Of a run of this runner give the folder, whose checkpoint is merged.",
            )
        raise _adapter_refusal(path)
    return named


def packed_layout(weights: Mapping[str, Any]) -> str:
    """Return how weights are packed, as `Precision.layout`; empty for plain ones.

    Raises:
        ValueError: a packed weight lacks its scales.
    """
    label = packed_label(weights)
    if label:
        return label
    for name, value in weights.items():
        if not name.endswith("weight") or not isinstance(value, Tensor):
            continue
        if value.dtype is torch.int8 and f"{name.removesuffix('weight')}SCB" in weights:
            return "bnb-int8"
        if value.dtype is not torch.uint8:
            continue
        parts = entries_below(f"{name}.", weights)
        if any(part.startswith("quant_state") for part in parts):
            from runner.precision.layers.bnb_linear import packed_mode, packing_label

            return f"bnb-{packing_label(*packed_mode(value, parts))}"
    return ""


def _adapter_refusal(path: Path) -> ConfigError:
    return _refusal(
        path,
        "is a LoRA adapter, without the weights that it adds to",
        "Merge it into its base with peft: PeftModel.from_pretrained(base, folder)"
        ".merge_and_unload().save_pretrained(<folder>), and give that folder.",
    )


def _refusal(path: Path, why: str, remedy: str = _ALLOWED) -> ConfigError:
    return ConfigError(f"init.weights={path} {why}. {remedy}".rstrip())
