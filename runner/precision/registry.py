"""Every precision that is built, and whether it runs on a device: read from conf/precision/ and
asked of require(), never kept by hand."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from runner.config.targets import instantiate
from runner.precision.precision import Precision
from runner.utils.errors import Unavailable

CONF = Path(str(files("runner.conf"))) / "precision"


@dataclass(frozen=True)
class PrecisionSupport:
    """A precision on a device: why is empty where it runs."""

    name: str
    device: str
    why: str
    remedy: str

    @property
    def runs(self) -> bool:
        return not self.why


def precision_names() -> list[str]:
    """Names of the precisions, by width and then by name."""
    return sorted((path.stem for path in CONF.glob("*.yaml")), key=_order)


def _order(name: str) -> tuple[int, str]:
    widths = (
        "64-true",
        "32-true",
        "tf32",
        "bf16-mixed",
        "16-mixed",
        "bf16-true",
        "16-true",
        "transformer-engine",
        "float8",
        "bnb-int8",
        "bnb",
    )
    places = [i for i, width in enumerate(widths) if name == width or name.startswith(f"{width}-")]
    return (min(places, default=len(widths)), name)


def yaml_header(name: str) -> tuple[str, str]:
    """The two comments that a precision's yaml opens with: what it is, and why to use it."""
    what, why = (CONF / f"{name}.yaml").read_text().splitlines()[:2]
    return what.lstrip("# "), why.removeprefix("# Why: ")


def load_precision(name: str, **changes: Any) -> Precision:
    """A precision from its yaml, with some keywords changed."""
    node = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(node, dict)
    return instantiate({**node, **changes})  # type: ignore[arg-type]


def supported_precisions(device: torch.device) -> list[PrecisionSupport]:
    """What require() says of every precision on a device."""
    rows = []
    for name in precision_names():
        try:
            load_precision(name).require(device)
        except Unavailable as error:
            rows.append(PrecisionSupport(name, str(device), error.what, error.remedy))
        else:
            rows.append(PrecisionSupport(name, str(device), "", ""))
    return rows
