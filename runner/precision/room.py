"""The precision of a run."""

from typing import TYPE_CHECKING, Any

from runner.core import Room, RunSpec

if TYPE_CHECKING:
    from runner.core import Precision, Strategy


def _precision(spec: RunSpec, strategy: "Strategy", device: Any) -> "Precision":
    from runner.precision.registry import build_precision

    return build_precision(spec, device, strategy)


ROOM = Room(parts={"precision": _precision})
