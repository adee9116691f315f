"""The callback contract: callbacks read records and never steer the loop.

A callback that wants the run to end sets a property, which the loop's caller reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from runner.training.records import EvalRecord, Record, Steps


class Callback:
    """Base class of callbacks: override the methods of interest; the defaults ignore the record.

    Attributes:
        key: name of the callback's state in checkpoints. It must not change when the class is
            renamed: old checkpoints would lose the state.
        is_in_every_run: whether each training run has one, so that a checkpoint without its state
            is incomplete. A checkpoint lacks the state of any other callback if the run before
            had none.
    """

    key: ClassVar[str]
    is_in_every_run: ClassVar[bool] = False

    def steps(self, block: Steps) -> None:
        """Read a block of step records that have reached the host, in order."""

    def evaluation(self, record: EvalRecord) -> None:
        """Read an evaluation; the block of records that ends at its step came before."""

    def close(self) -> None:
        """Finish; the run is over, however it ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the callback needs after a resume, in plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what state_dict returned; an empty mapping if the callback is new to the run."""


def dispatch(callbacks: Sequence[Callback], record: Record) -> None:
    """Pass a record to every callback, in order."""
    for callback in callbacks:
        if isinstance(record, EvalRecord):
            callback.evaluation(record)
        else:
            callback.steps(record)
