"""Find the precisions by their yamls, load them, and ask each whether it runs on a device.

There is no table to keep: a yaml in conf/precision/, or in the folder `precision` of a
`--config-dir`, is a precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from runner.config.targets import instantiate
from runner.precision.contract import Precision
from runner.utils.errors import ConfigError, Unavailable

PRECISION_CONFIGS = Path(str(files("runner.conf"))) / "precision"


@dataclass(frozen=True)
class PrecisionSupport:
    """A precision's answer whether it runs on a device.

    Attributes:
        name: of its yaml.
        device: as torch writes it, for example "cuda:0".
        why: what is missing; empty where it runs.
        remedy: what to type; empty where it runs.
    """

    name: str
    device: str
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
    return (
        [PRECISION_CONFIGS] if config_dir is None else [PRECISION_CONFIGS, config_dir / "precision"]
    )


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
    return instantiate({**node, **changes})


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
        try:
            load_precision(name, config_dir).require(device)
        except Unavailable as error:
            rows.append(PrecisionSupport(name, str(device), error.what, error.remedy))
        # A user's yaml or class that does not load.
        except (ConfigError, TypeError) as error:
            remedy = f"Correct {_yaml_path(name, config_dir)}."
            rows.append(PrecisionSupport(name, str(device), str(error), remedy))
        else:
            rows.append(PrecisionSupport(name, str(device), "", ""))
    return rows
