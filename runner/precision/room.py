"""The precision of a run."""

from typing import TYPE_CHECKING, Any

from runner.core.config.room import Room
from runner.core.config.schema import RunSpec

if TYPE_CHECKING:
    from runner.core.loop.strategy import Strategy
    from runner.core.policy.precision import Precision


def _precision(spec: RunSpec, strategy: "Strategy", device: Any) -> "Precision":
    from runner.precision.registry import build_precision

    return build_precision(spec, device, strategy)


ROOM = Room(parts={"precision": _precision})
