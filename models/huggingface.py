"""Any model of Hugging Face's transformers, from a local folder or from a config alone."""

import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping
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
    kind: str, path: str | None = None, config: Any = None, classes: int | None = None
) -> nn.Module:
    """Build a transformers model: pretrained from a folder, or with random weights.

    No code from the folder is run, and nothing is downloaded. Weights are read as safetensors; a
    head that the folder lacks gets random ones. A model that can keep keys and values for
    generation (`use_cache`) does not, unless config is a mapping with use_cache: true: training
    would only hold them in memory.

    Args:
        kind: a key of AUTO_CLASSES.
        path: a folder with config.json and model.safetensors, as save_pretrained writes it, or
            package://<package>/<folder> of an installed package, which may have a
            pytorch_model.bin instead.
        config: in place of path, for random weights: a config.json, a yaml file, or the mapping
            itself, with model_type and further keys of that type's configuration; or a
            configuration object of transformers. Beside path: keys that are changed.
        classes: number of logits of a classifier, 1 and up; None takes the config's own.

    Returns:
        The model in float32. Its forward takes the fields of a batch as keyword arguments.

    Raises:
        ValueError: transformers is not installed, or the kind, the folder or the config cannot be
            used.
    """
    if kind not in AUTO_CLASSES:
        raise ValueError(f"kind={kind} is not known. Allowed: {', '.join(AUTO_CLASSES)}")
    if classes is not None and classes < 1:
        raise ValueError(f"classes={classes} is no number of logits. Allowed: 1 and up")
    transformers = _import_transformers()
    changes = {} if config is None else _read_config(config)
    if kind in _CLASSIFIES and classes is not None:
        changes = {**changes, "num_labels": classes}
    auto_class = getattr(transformers, AUTO_CLASSES[kind])
    # A file or an object holds every key, with whatever another version of transformers wrote.
    typed = changes if isinstance(config, Mapping) else {}
    try:
        if path is None:
            made = _made_config(changes, typed)
            model = auto_class.from_config(made, dtype=torch.float32, trust_remote_code=False)
        else:
            model = _pretrained(auto_class, str(path), changes, typed)
    except (OSError, ImportError, LookupError, ArithmeticError, AttributeError) as error:
        # What transformers raises for values that it cannot use: no kind of error of its own.
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if kind == "causal_lm":
        _check_causal(model.config)
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


def _pretrained(
    auto_class: Any, path: str, changes: Mapping[str, Any], typed: Mapping[str, Any]
) -> nn.Module:
    """Return the model of a folder, with some keys of its config changed, of which some typed."""
    is_packaged = path.startswith(_PACKAGE)
    folder = _package_folder(path) if is_packaged else Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(
            f"path={folder} has no config.json. Give a local folder that save_pretrained wrote"
        )
    settings = _read_config(config_file)
    if "auto_map" in settings:
        raise ValueError(
            f"path={folder} needs code of its own (auto_map in config.json), which is not run. "
            "Give a model whose class transformers has, or a _target_ of your own"
        )
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"path={folder} has an adapter beside its weights, for which peft imports what "
            "adapter_config.json names. Merge it with peft (merge_and_unload), or remove that file"
        )
    files = (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json"))
    has_safetensors = bool(files)
    # A package's pickled weights were installed with it; transformers reads tensors alone of them
    # (weights_only).
    if not (has_safetensors or is_packaged):
        raise ValueError(
            f"path={folder} has no *.safetensors. Write one with save_pretrained(path), or give "
            f"config={config_file} for random weights"
        )
    made = _made_config({**settings, **changes}, typed)
    try:
        model, loaded = auto_class.from_pretrained(
            folder,
            config=made,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=has_safetensors,
            weights_only=True,
            # A head for another number of classes starts with random weights.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A damaged file raises safetensors' own kind of error, or a RuntimeError.
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"path={folder} cannot be loaded: {reason}") from error
    _check_loaded(model, loaded, folder)
    return model


def _check_loaded(model: Any, loaded: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError where weights are random in other parts than a head or a pooler."""
    body = f"{model.base_model_prefix}."
    found = {
        "has weights of other sizes than": [name for name, *_ in loaded["mismatched_keys"]],
        "lacks weights that": loaded["missing_keys"],
    }
    for problem, names in found.items():
        # Models for masked tokens have no pooler, and classifiers are tuned from them.
        lost = sorted(name for name in names if name.startswith(body) and ".pooler." not in name)
        if lost:
            listed = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            raise ValueError(
                f"path={folder} {problem} the model's config asks for: {listed}. Leave out the "
                "keys of config that change the layers, or path for random weights"
            )


def _package_folder(path: str) -> Path:
    """Return the folder that package://<package>/<folder> names, without importing the package."""
    package, _, inside = path.removeprefix(_PACKAGE).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    roots = spec.submodule_search_locations if spec else None
    if roots:
        root = Path(roots[0]).resolve()
        folder = (root / inside).resolve()
        # A path with .. in it would lead to files that nobody installed.
        if folder.is_dir() and folder.is_relative_to(root):
            return folder
    raise ValueError(
        f"path={path} is not among the installed packages. Type pip install --no-deps "
        f"{package or '<package>'}, or path=<a local folder>"
    )


def _made_config(settings: Mapping[str, Any], typed: Mapping[str, Any]) -> Any:
    """Return transformers' configuration for keys with a model_type, of which some were typed.

    Raises:
        ValueError: no or an unknown model_type, an unknown key, or code from elsewhere.
    """
    from transformers import CONFIG_MAPPING

    model_type = settings.get("model_type")
    if model_type is None:
        raise ValueError(
            "neither path=<folder> nor config={model_type: gpt2, ...} says which model to build"
        )
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"config.model_type={model_type} is not known to transformers")
    _refuse_kernels(settings)
    # Not AutoConfig, whose keywords reach beyond the configuration, to hubs and their code.
    made = CONFIG_MAPPING[model_type].from_dict(dict(settings))
    _check_keys(typed, made)
    _disable_cache(made, typed)
    return made


def _refuse_kernels(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for kernels of a hub, which transformers would fetch and run."""
    for name, value in settings.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise ValueError(f"config.{name}={value} names code from elsewhere, which is not run")
        if isinstance(value, Mapping):
            _refuse_kernels(value)


def _check_keys(typed: Iterable[str], config: Any) -> None:
    """Raise ValueError for typed keys that a configuration does not have.

    transformers keeps such a key as an attribute that nothing reads.
    """
    from transformers import GenerationConfig

    # Models read some keys of generation from their config, T5 its decoder_start_token_id.
    known = {*vars(type(config)()), *config.attribute_map, *vars(GenerationConfig())}
    known |= {"model_type", "num_labels", "attn_implementation"}
    for name in typed:
        if name not in known and not hasattr(type(config), name) and not _is_read(name, config):
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f". Close matches: {', '.join(close)}" if close else ""
            raise ValueError(f"config.{name} is no key of {type(config).__name__}{hint}")


def _is_read(name: str, config: Any) -> bool:
    """Return whether the code of a configuration's models reads a key, which it does not declare.

    Many read config.head_dim where it is there.
    """
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return False
    reads = rf"""config\.{re.escape(name)}\b|getattr\((self\.)?config, ["']{re.escape(name)}["']"""
    return re.search(reads, Path(spec.origin).read_text()) is not None


def _disable_cache(config: Any, typed: Mapping[str, Any]) -> None:
    """Turn use_cache off, in the parts of a composite configuration, too, unless it was typed."""
    if "use_cache" in typed:
        return
    for part in (config, config.get_text_config()):
        if hasattr(part, "use_cache"):
            part.use_cache = False


def _check_causal(config: Any) -> None:
    """Raise ValueError for a bidirectional encoder: each of its outputs sees the next token."""
    from transformers import AutoModelForMaskedLM

    is_encoder = type(config) in AutoModelForMaskedLM._model_mapping
    if is_encoder and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"kind=causal_lm needs a model that does not see the next token, and "
            f"{config.model_type} sees all. Type +model.config.is_decoder=true, or kind=masked_lm"
        )


def _read_config(config: Any) -> dict[str, Any]:
    """Return a config's keys, from a mapping, an object of transformers, or a json or yaml file."""
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    file = Path(config)
    if not file.is_file():
        raise ValueError(f"config={config} is no file. Give a config.json or a yaml")
    import yaml

    text = file.read_text()
    try:
        is_json = file.suffix == ".json"
        if not is_json and any(isinstance(each, yaml.AliasEvent) for each in yaml.parse(text)):
            raise ValueError("it has aliases (*name), which may unfold to all memory")
        loaded = json.loads(text) if is_json else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config={config} cannot be read: {reason}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"config={config} holds no keys with values")
    return loaded
