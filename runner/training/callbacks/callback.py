"""Observers read records and never steer the loop."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from runner.training.records import EvalRecord, Record, Steps


class Callback:
    """Override what is of interest; the defaults ignore it.

    Attributes:
        key: name of the observer's state in checkpoints. It stays as it is when the class is
            renamed, or old checkpoints lose the state.
        is_in_every_run: whether each training run has one, so that a checkpoint without its state
            is incomplete. Without the state of any other observer, the first run had none.
    """

    key: ClassVar[str]
    is_in_every_run: ClassVar[bool] = False

    def steps(self, block: Steps) -> None:
        """Step records that have reached the host, in order."""

    def evaluation(self, record: EvalRecord) -> None:
        """An evaluation, after the block that ends at its step."""

    def close(self) -> None:
        """The run is over, however it ended."""

    def state_dict(self) -> dict[str, Any]:
        """What it must remember when the run goes on, in plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave; nothing where it is new to the run."""


def dispatch(observers: Sequence[Callback], record: Record) -> None:
    """Hand a record to every observer."""
    for observer in observers:
        if isinstance(record, EvalRecord):
            observer.evaluation(record)
        else:
            observer.steps(record)
