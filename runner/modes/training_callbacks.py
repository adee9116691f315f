"""A training run under way: who reads its records, and what is saved of it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.checkpoint import checkpoint_file
from runner.checkpoint.async_writer import Saver
from runner.checkpoint.sharded_writer import PartSaver
from runner.data.loader import Loader
from runner.diagnostics.numerics.callback import Looks
from runner.modes.failures import finite, last_good, make_guard
from runner.training import state_dict
from runner.training.callbacks.callback import Observer
from runner.training.callbacks.checkpointing import Checkpoints
from runner.training.callbacks.early_stopping import EarlyStop
from runner.training.callbacks.metric_logger import Recorder
from runner.training.callbacks.profiler import Profile
from runner.training.callbacks.progress import progress
from runner.training.callbacks.summary import Tally
from runner.training.loop import evaluates, total_steps
from runner.training.state import TrainState
from runner.training.state_dict import checkpoint_state_dict

if TYPE_CHECKING:
    from runner.modes.context import Run


def _saver(this: "Run") -> Saver | PartSaver:
    folder, keep, strategy = this.checkpoints, this.spec.checkpoint.keep, this.strategy
    if strategy.shards or not strategy.place.first:
        return PartSaver(folder, keep, this.say, strategy)
    return Saver(folder, keep, this.say)


class Course:
    """The observers of a run, and its checkpoints, which hold what the observers remember."""

    def __init__(self, this: "Run", state: TrainState, loader: Loader) -> None:
        self.this, self.state = this, state
        self.saver = _saver(this)
        state.before_update = self.saver.settle
        self.tally = Tally(this.task.quality, this.task.direction)
        self.guard = make_guard(this, loader)
        every, first = this.spec.numerics.every, this.strategy.place.first
        self.looks = Looks(this, state, every) if every and first else None
        self.observers = [*self._readers(loader), *self._savers(loader)]

    def _readers(self, loader: Loader) -> list[Observer]:
        this, task = self.this, self.this.task
        found: list[Observer] = [
            self.tally,
            Recorder(this.tracker, self.state, this.accelerator),
            progress(this.console, total_steps(this.spec.train, loader), this.label),
            self.guard,
        ]
        if self.looks:
            found.append(self.looks)
        if this.spec.train.early_stop:
            found.append(EarlyStop(task.quality, task.direction, this.spec.train.early_stop))
        if this.spec.debug.profile:
            found.append(Profile(this.out, this.spec.debug.profile, this.write))
        return found

    def _savers(self, loader: Loader) -> list[Observer]:
        """Last, when the others have read: what the guard refuses is not saved."""
        wanted, task = self.this.spec.checkpoint, self.this.task
        if not (wanted.every_steps or wanted.best):
            return []
        due = partial(evaluates, self.this.spec.train, loader)
        quality = task.quality if wanted.best else None
        return [Checkpoints(self._save, wanted.every_steps, due, quality, task.direction)]

    @property
    def over(self) -> bool:
        """Whether an observer has seen enough."""
        return any(o.reached for o in self.observers if isinstance(o, EarlyStop | type(self.guard)))

    @property
    def trouble(self) -> str:
        """What a guard stopped it for."""
        return self.guard.message and f"{self.guard.message}{last_good(self.this.checkpoints)}"

    def restore(self, saved: checkpoint_file.Saved) -> list[str]:
        """Continue from a checkpoint whose weights are in the model; what could not come back as it
        was, one sentence each."""
        typed = [text.lstrip("+~").partition("=")[0] for text in self.this.origin.overrides]
        told = state_dict.restore(self.state, saved, self.this.spec, self.observers, typed)
        if self.this.strategy.place.first:
            checkpoint_file.set_aside(self.this.checkpoints, self.state.step)
        return told

    def sound(self) -> bool:
        """Whether the weights are worth keeping."""
        good = self.guard.sound and finite(self.this, self.state)
        return not self.this.strategy.agreed(not good)

    def _content(self) -> dict[str, Any]:
        found = self.tally.metrics if self.tally.evaluated == self.state.step else {}
        rest = state_dict.capture(self.state, self.observers)
        origin = self.this.origin
        return checkpoint_state_dict(
            self.state, self.this.spec, origin.choices, found, rest, origin.own
        )

    def _save(self, best: bool) -> None:
        if self.sound():
            late = [*self.state.trainable, *self.state.state_tensors()]
            self.saver.save(self._content(), best, late)

    def save_last(self) -> Path | None:
        """Waits for the file; None where the weights are not sound."""
        return self.saver.finish(self._content() if self.sound() else None)

    def close(self) -> None:
        """However the run ends."""
        for observer in self.observers:
            observer.close()
        self.saver.finish()
