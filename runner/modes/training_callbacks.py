"""A training run under way: who reads its records, and what is saved of it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.checkpoint import checkpoint_file
from runner.checkpoint.async_writer import AsyncCheckpointWriter
from runner.checkpoint.sharded_writer import ShardedCheckpointWriter
from runner.data.loader import Loader
from runner.diagnostics.numerics.callback import NumericsCallback
from runner.modes.failures import last_checkpoint_hint, make_guard, weights_are_finite
from runner.training import state_dict
from runner.training.callbacks.callback import Callback
from runner.training.callbacks.checkpointing import Checkpointing
from runner.training.callbacks.early_stopping import EarlyStopping
from runner.training.callbacks.metric_logger import MetricLogger
from runner.training.callbacks.profiler import Profiler
from runner.training.callbacks.progress import progress
from runner.training.callbacks.summary import RunSummary
from runner.training.loop import is_evaluation_step, total_steps
from runner.training.state import TrainState
from runner.training.state_dict import checkpoint_state_dict

if TYPE_CHECKING:
    from runner.modes.context import RunContext


def _saver(this: "RunContext") -> AsyncCheckpointWriter | ShardedCheckpointWriter:
    folder, keep, strategy = this.checkpoints, this.spec.checkpoint.keep, this.strategy
    if strategy.shards or not strategy.place.is_main:
        return ShardedCheckpointWriter(folder, keep, this.say, strategy)
    return AsyncCheckpointWriter(folder, keep, this.say)


class TrainingCallbacks:
    """The observers of a run, and its checkpoints, which hold what the observers remember."""

    def __init__(self, this: "RunContext", state: TrainState, loader: Loader) -> None:
        self.this, self.state = this, state
        self.saver = _saver(this)
        state.before_update = self.saver.wait_for_copy
        self.tally = RunSummary(this.task.quality, this.task.direction)
        self.guard = make_guard(this, loader)
        every, first = this.spec.numerics.every, this.strategy.place.is_main
        self.looks = NumericsCallback(this, state, every) if every and first else None
        self.observers = [*self._readers(loader), *self._savers(loader)]

    def _readers(self, loader: Loader) -> list[Callback]:
        this, task = self.this, self.this.task
        found: list[Callback] = [
            self.tally,
            MetricLogger(this.tracker, self.state, this.accelerator),
            progress(this.console, total_steps(this.spec.train, loader), this.label),
            self.guard,
        ]
        if self.looks:
            found.append(self.looks)
        if this.spec.train.early_stop:
            found.append(EarlyStopping(task.quality, task.direction, this.spec.train.early_stop))
        if this.spec.debug.profile:
            found.append(Profiler(this.out, this.spec.debug.profile, this.write))
        return found

    def _savers(self, loader: Loader) -> list[Callback]:
        """Last, when the others have read: what the guard refuses is not saved."""
        wanted, task = self.this.spec.checkpoint, self.this.task
        if not (wanted.every_steps or wanted.best):
            return []
        due = partial(is_evaluation_step, self.this.spec.train, loader)
        quality = task.quality if wanted.best else None
        return [Checkpointing(self._save, wanted.every_steps, due, quality, task.direction)]

    @property
    def over(self) -> bool:
        """Whether an observer has seen enough."""
        return any(
            o.reached for o in self.observers if isinstance(o, EarlyStopping | type(self.guard))
        )

    @property
    def trouble(self) -> str:
        """What a guard stopped it for."""
        return (
            self.guard.message
            and f"{self.guard.message}{last_checkpoint_hint(self.this.checkpoints)}"
        )

    def restore(self, saved: checkpoint_file.LoadedCheckpoint) -> list[str]:
        """Continue from a checkpoint whose weights are in the model; what could not come back as it
        was, one sentence each."""
        typed = [text.lstrip("+~").partition("=")[0] for text in self.this.origin.overrides]
        told = state_dict.restore(self.state, saved, self.this.spec, self.observers, typed)
        if self.this.strategy.place.is_main:
            checkpoint_file.set_aside_newer(self.this.checkpoints, self.state.step)
        return told

    def sound(self) -> bool:
        """Whether the weights are worth keeping."""
        good = self.guard.sound and weights_are_finite(self.this, self.state)
        return not self.this.strategy.all_reduce_max(not good)

    def _content(self) -> dict[str, Any]:
        found = self.tally.metrics if self.tally.evaluated == self.state.step else {}
        rest = state_dict.state_dict(self.state, self.observers)
        origin = self.this.origin
        return checkpoint_state_dict(
            self.state, self.this.spec, origin.choices, found, rest, origin.own
        )

    def _save(self, best: bool) -> None:
        if self.sound():
            late = [*self.state.trainable, *self.state.optimizer_tensors()]
            self.saver.save(self._content(), best, late)

    def save_last(self) -> Path | None:
        """Waits for the file; None where the weights are not sound."""
        return self.saver.finish(self._content() if self.sound() else None)

    def close(self) -> None:
        """However the run ends."""
        for observer in self.observers:
            observer.close()
        self.saver.finish()
