"""Saves the state at an interval. A block of records ends at each boundary, so the state that
is saved is the one after the block's last step."""

from collections.abc import Callable

from runner.observers.base import Observer
from runner.records import Steps


class Checkpoints(Observer):
    """Calls `save` after each block that ends at a multiple of `every_steps`."""

    def __init__(self, save: Callable[[], object], every_steps: int) -> None:
        self.save, self.every_steps = save, every_steps

    def steps(self, block: Steps) -> None:
        if block[-1].step % self.every_steps == 0:
            self.save()
