"""Find the precisions by their yamls, load them, and ask each whether it runs on a device, or with
what else a run sets.

There is no table to keep: a yaml in conf/precision/, or in the folder `precision` of a
`--config-dir`, is a precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from runner.core import (
    ConfigError,
    Mode,
    Precision,
    RunSpec,
    Strategy,
    Unavailable,
    layout,
    targets,
)

PRECISION_CONFIGS = layout.BUILT_IN_CONFIGS / "precision"


@dataclass(frozen=True)
class PrecisionSupport:
    """A precision's answer whether it runs on a device.

    Attributes:
        name: of its yaml.
        why: what is missing; empty where it runs.
        remedy: what to type; empty where it runs.
    """

    name: str
    why: str
    remedy: str

    @property
    def runs(self) -> bool:
        """Return whether nothing is missing."""
        return not self.why


def precision_names(config_dir: Path | None = None) -> list[str]:
    """Return the names of the built-in precisions and of a config folder's, the widest first."""
    names = {path.stem for folder in _folders(config_dir) for path in folder.glob("*.yaml")}
    return sorted(names, key=lambda name: _sort_key(name, config_dir))


def _folders(config_dir: Path | None) -> list[Path]:
    """Return the folders that hold yamls. Hydra takes a built-in one of the same name first."""
    own = [] if config_dir is None else [config_dir / "precision"]
    return [PRECISION_CONFIGS, *own]


def _sort_key(name: str, config_dir: Path | None) -> tuple[bool, tuple[float, ...], str]:
    """Return a precision's place in lists, which its class decides."""
    # A yaml that does not load is listed, last: the caller that loads it reports the error.
    try:
        return False, load_precision(name, config_dir).sort_key, name
    except Exception:
        return True, (), name


def precision_config(name: str, config_dir: Path | None = None) -> dict[str, Any]:
    """Return a precision's yaml as keywords and `_target_`, with the yamls of the same folder that
    its `defaults` name below it.

    Raises:
        ConfigError: no folder has it.
    """
    path = _yaml_path(name, config_dir)
    node = _load_yaml(path, path.stat().st_mtime_ns)
    names = [base for base in node.get("defaults", ()) if isinstance(base, str)]
    bases = [precision_config(base, config_dir) for base in names if base != "_self_"]
    merged = OmegaConf.to_container(OmegaConf.merge(*bases, node))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items() if key != "defaults"}


@cache
def _load_yaml(path: Path, modified_ns: int) -> Any:
    """Return a yaml as a config; it is read again after a change."""
    return OmegaConf.load(path)


def _yaml_path(name: str, config_dir: Path | None) -> Path:
    for folder in _folders(config_dir):
        path = folder / f"{name}.yaml"
        if path.is_file():
            return path
    raise ConfigError(
        f"precision={name} is not known. Allowed: {', '.join(precision_names(config_dir))}."
    )


def yaml_header(name: str, config_dir: Path | None = None) -> tuple[str, str]:
    """Return the two comments that a precision's yaml opens with: what it is, and why to use it.
    One that a user's yaml lacks is empty."""
    lines = _yaml_path(name, config_dir).read_text().splitlines()[:2]
    comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
    description, reason = [*comments, "", ""][:2]
    return description, reason.removeprefix("Why: ")


def load_precision(name: str, config_dir: Path | None = None, **changes: Any) -> Precision:
    """Return a precision made from its yaml, with some keywords changed.

    Raises:
        ConfigError: there is no such yaml, its target does not import, or refuses a value.
        TypeError: its target has no such keyword.
    """
    node = precision_config(name, config_dir)
    if "_target_" not in node:
        raise ConfigError(f"{_yaml_path(name, config_dir)} has no _target_. Name a class there.")
    return targets.instantiate({**node, **changes})


def supported_precisions(
    device: torch.device, config_dir: Path | None = None, names: Sequence[str] | None = None
) -> list[PrecisionSupport]:
    """Return what require() says of precisions on a device.

    Args:
        device: where they would run.
        config_dir: the user's configs, among them further precisions.
        names: the precisions; every one by default, the widest first.
    """
    rows = []
    for name in precision_names(config_dir) if names is None else names:
        why = remedy = ""
        try:
            load_precision(name, config_dir).require(device)
        except Unavailable as error:
            why, remedy = error.what, error.remedy
        # A user's yaml or class that does not load.
        except (ConfigError, TypeError) as error:
            why, remedy = str(error), f"Correct {_yaml_path(name, config_dir)}."
        rows.append(PrecisionSupport(name, why, remedy))
    return rows


def build_precision(spec: RunSpec, device: torch.device, strategy: Strategy) -> Precision:
    """Build the precision of a run that can do in it what its settings ask for.

    Args:
        spec: its precision node is called; its mode and its adapter must suit the precision.
        device: that the run computes on.
        strategy: how the processes of the run share the model.

    Raises:
        ConfigError: a value is not allowed, packed weights would train, gradients would be rounded,
            or the adapter cannot be added in the precision.
        Unavailable: this machine or the strategy lacks what the precision needs.
    """
    precision: Precision = targets.build_group("precision", spec.precision)
    precision = precision.substitute(device)
    precision.require(device)
    precision.require_strategy(strategy)
    adapter_node = spec.adapter if spec.adapter.get("_target_") else None
    if spec.trains and precision.trained_in and adapter_node is None:
        raise ConfigError(
            f"mode=train with precision={precision.name}: its weights are packed and do not train. "
            f"Type precision={precision.trained_in} to train weights for it, mode=evaluate "
            "checkpoint=<run> to evaluate trained ones, or adapter=lora init.weights=<run> to tune "
            "an adapter."
        )
    if strategy.reduce_dtype is not None and precision.storage is torch.float64:
        raise ConfigError(
            f"strategy.reduce_dtype={strategy.reduce_dtype} would round the float64 gradients of "
            f"precision={precision.name}. Allowed here: null. Type strategy.reduce_dtype=null."
        )
    # Other modes add nothing: they load a run's adapter, or merge it where it does not fit.
    if adapter_node is not None and Mode.named(spec.mode).adapts:
        adapter = targets.build_group("adapter", adapter_node)
        # An adapter of the user's own may lack it.
        if hasattr(adapter, "check_precision"):
            adapter.check_precision(precision)
    return precision
