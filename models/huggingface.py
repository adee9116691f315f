"""Any model of Hugging Face's transformers, from a local folder or from a config alone."""

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

AUTO_CLASSES: Mapping[str, str] = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "image_classification": "AutoModelForImageClassification",
}
"""transformers' classes by the kinds of models."""
_PACKAGE = "package://"
_CLASSIFIES = ("sequence_classification", "token_classification", "image_classification")


def huggingface(
    kind: str,
    path: str | None = None,
    config: Any = None,
    classes: int | None = None,
) -> nn.Module:
    """Build a transformers model: pretrained from a folder, or with random weights.

    No code from the folder is run, and nothing is downloaded. Weights are read as safetensors; a
    head that the folder lacks gets random ones.

    Args:
        kind: a key of AUTO_CLASSES.
        path: a folder with config.json and model.safetensors, as save_pretrained writes it, or
            package://<package>/<folder> of an installed package, which may have a
            pytorch_model.bin instead.
        config: in place of path, for random weights: a config.json, a yaml file, or the mapping
            itself, with model_type and further keys of that type's configuration; or a
            configuration object of transformers. Beside path: keys that are changed.
        classes: number of logits of a classifier; None takes the config's own.

    Returns:
        The model in float32. Its forward takes the fields of a batch as keyword arguments, and a
        decoder keeps no cache of keys and values, which only the generation of text reads.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the kind, the folder or the config cannot be used.
    """
    if kind not in AUTO_CLASSES:
        raise ValueError(f"kind={kind} is not known. Allowed: {', '.join(AUTO_CLASSES)}")
    transformers = _import_transformers()
    changes = {} if config is None else _read_config(config)
    if kind in _CLASSIFIES and classes is not None:
        changes = {**changes, "num_labels": classes}
    auto_class = getattr(transformers, AUTO_CLASSES[kind])
    try:
        if path is not None:
            model = _pretrained(auto_class, path, changes)
        else:
            model = auto_class.from_config(_made_config(changes), dtype=torch.float32)
    except OSError as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    _switch_off_caches(model)
    return model


def _import_transformers() -> Any:
    """Return the library, without the log lines of what it imports.

    Raises:
        ValueError: it is not installed.
    """
    level = logging.root.manager.disable
    # torch warns of classes of torchao, where that is installed; a user can do nothing about it.
    logging.disable(max(level, logging.WARNING))
    try:
        import transformers
        import transformers.modeling_utils
    except ImportError as error:
        raise ValueError(
            "transformers is not installed here. Type pip install 'precision-runner[hf]'"
        ) from error
    finally:
        logging.disable(level)
    return transformers


def _switch_off_caches(model: nn.Module) -> None:
    """Have decoders keep no keys and values: they cost 6 % of a small model's step."""
    # Encoder and decoder of one model have configs of their own.
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False


def _pretrained(auto_class: Any, path: str, changes: Mapping[str, Any]) -> nn.Module:
    """Return the model of a folder, with some keys of its config changed."""
    is_packaged = path.startswith(_PACKAGE)
    folder = _package_folder(path) if is_packaged else Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(
            f"path={folder} has no config.json. Give a local folder that save_pretrained wrote"
        )
    settings = json.loads(config_file.read_text())
    if "auto_map" in settings:
        raise ValueError(
            f"path={folder} needs code of its own (auto_map in config.json), which is not run. "
            "Give a model whose class transformers has, or a _target_ of your own"
        )
    has_safetensors = any(folder.glob("*.safetensors")) or any(
        folder.glob("*.safetensors.index.json")
    )
    # A package's pickled weights were installed with it; transformers reads tensors alone of them
    # (weights_only).
    if not (has_safetensors or is_packaged):
        raise ValueError(
            f"path={folder} has no *.safetensors. Write one with save_pretrained(path), or give "
            f"config={config_file} for random weights"
        )
    return auto_class.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=has_safetensors,
        # A head for another number of classes starts with random weights.
        ignore_mismatched_sizes="num_labels" in changes,
        **changes,
    )


def _package_folder(path: str) -> Path:
    """Return the folder that package://<package>/<folder> names, without importing the package."""
    package, _, inside = path.removeprefix(_PACKAGE).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    roots = spec.submodule_search_locations if spec else None
    folder = Path(roots[0]) / inside if roots else None
    if folder is None or not folder.is_dir():
        raise ValueError(
            f"path={path} is not among the installed packages. Type pip install --no-deps "
            f"{package or '<package>'}, or path=<a local folder>"
        )
    return folder


def _made_config(settings: Mapping[str, Any]) -> Any:
    """Return transformers' configuration for keys with a model_type.

    Raises:
        ValueError: no or an unknown model_type.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = dict(settings)
    settings.pop("auto_map", None)
    model_type = settings.pop("model_type", None)
    if model_type is None:
        raise ValueError(
            "neither path=<folder> nor config={model_type: gpt2, ...} says which model to build"
        )
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"config.model_type={model_type} is not known to transformers")
    return AutoConfig.for_model(model_type, **settings)


def _read_config(config: Any) -> dict[str, Any]:
    """Return a config's keys, from a mapping, an object of transformers, or a json or yaml file."""
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    file = Path(config)
    if not file.is_file():
        raise ValueError(f"config={config} is no file. Give a config.json or a yaml")
    if file.suffix == ".json":
        loaded = json.loads(file.read_text())
    else:
        import yaml

        loaded = yaml.safe_load(file.read_text())
    if not isinstance(loaded, dict):
        raise ValueError(f"config={config} holds no keys with values")
    return loaded
