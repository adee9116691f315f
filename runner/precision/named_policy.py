"""Make the policy of a named precision, for a training loop of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runner.config.arguments import Arguments
from runner.config.instantiation import keywords, locate
from runner.config.overrides import PRECISION_ALIASES
from runner.config.targets import build_group
from runner.precision.policy import Policy
from runner.precision.registry import precision_config
from runner.utils.errors import ConfigError


def precision(
    name: str | int,
    /,
    device: str | torch.device = "cpu",
    *,
    config_dir: str | Path | None = None,
    **keys: Any,
) -> Policy:
    """Return the policy of a precision for a training loop of one's own.

    Args:
        name: of a yaml in conf/precision/, as "16-mixed"; "16", "bf16", "32" and "64" are short
            names, as on the command line.
        device: where the model will compute: auto, cpu, cuda, cuda:1, mps or tpu.
        config_dir: folder whose `precision/<name>.yaml` is a precision of one's own.
        keys: those under `precision.` on the command line, such as keep_fp32=["head"],
            loss_scale={"init_scale": 1024.0} or emulate=True.

    Raises:
        ConfigError: the name, a key, a value or the device is not known.
        Unavailable: this machine lacks what the precision or the device needs.
    """
    text = PRECISION_ALIASES.get(str(name), str(name))
    folder = None if config_dir is None else Path(config_dir)
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"config_dir={config_dir} is no folder in {Path.cwd()}.")
    node = _merge(precision_config(text, folder), keys)
    path = node.get("_target_")
    if not isinstance(path, str):
        raise ConfigError(f"precision={text} has no _target_. Name a class in its yaml.")
    passed = Arguments("precision", path, [], keywords(node), 0, False)
    problems = [*passed.problems(locate(path))]
    if problems:
        raise ConfigError(*problems)
    return Policy(build_group("precision", node), device)


def _merge(node: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node with some keys changed; of a mapping, such as loss_scale, the given keys."""
    merged = dict(node)
    for key, value in keys.items():
        current = merged.get(key)
        if isinstance(value, Mapping) and isinstance(current, Mapping):
            value = _merge(current, value)
        # As a yaml has it, which the checks of values expect.
        merged[key] = list(value) if isinstance(value, tuple) else value
    return merged
