"""Record a loop that its author writes with the help of a library (Accelerate, Fabric).

The loop calls the library's `backward`, which is watched, and names the end of each step.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from runner.core import ConfigError
from runner.integrations.recorder import Recorder
from runner.integrations.training_source import RecordSettings, TrainingSource, watch_method


@dataclass(eq=False)
class LoopRecord:
    """A context around a training loop that records its steps as a run of this runner.

    Args:
        owner: the library's object whose `backward` the loop calls.
        optimizer: the library's, whose `step` the loop calls.
        source: the training.
        settings: where and how it is recorded.
        is_recording: False in the processes that leave the record to the first one.

    Attributes:
        backward_call: how the loop calls backward, for messages.
        recorder: of the run; None before the context is entered, and in other processes.
    """

    backward_call: ClassVar[str]
    _active_owners: ClassVar[list[Any]] = []

    owner: Any
    optimizer: Any
    source: TrainingSource
    settings: RecordSettings
    is_recording: bool
    recorder: Recorder | None = field(default=None, init=False)
    _is_entered: bool = field(default=False, init=False)
    _has_stepped: bool = field(default=False, init=False)
    _watches: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        self._step = self.source.start_step

    def __enter__(self) -> Self:
        """Begin the run.

        Raises:
            ConfigError: the context was entered before, another record of this loop is active, or
                the run's folder cannot be used.
        """
        name = type(self).__name__
        if self._is_entered:
            raise ConfigError(
                f"This {name} has recorded a loop already. Make a new one for each training."
            )
        if any(owner is self.owner for owner in self._active_owners):
            raise ConfigError(
                f"Another {name} is active, and both would record each {self.backward_call}. "
                "Record one optimizer of a training."
            )
        self._is_entered = True
        if self.is_recording:
            self.recorder = Recorder(self.source, self.settings)
            self.recorder.begin_trace()
            self._active_owners.append(self.owner)
            self._watches.callback(self._active_owners.remove, self.owner)
            self._watches.callback(watch_method(self.owner, "backward", self._around_backward))
            self._watches.callback(watch_method(self.optimizer, "step", self._around_step))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._watches.close()
        if self.recorder is None:
            return
        self.recorder.end_trace()
        if error is None and self.recorder.reader.is_step_read and not self._step:
            print("warning: nothing is recorded. Call record.step() in each step.", file=sys.stderr)
        try:
            self.recorder.finish(error)
        except Exception as record_error:  # an error of the record must not hide the loop's
            if error is None:
                raise
            print(f"warning: the record was not ended: {record_error}", file=sys.stderr)

    def _around_backward(
        self, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the library's backward, and read what it computed."""
        assert self.recorder is not None
        result = backward(loss, *args, **kwargs)
        self.recorder.end_trace()
        self.recorder.reader.add_loss(loss, self.micro_batch)
        if self.is_step_complete:
            self.recorder.reader.read_gradients(self.source.optimizer)
        return result

    def _around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's step, which may skip its update."""
        self._has_stepped = True
        return step(*args, **kwargs)

    @property
    def micro_batch(self) -> int | None:
        """Return the number of the micro-batch that backward was called for; None where the losses
        of the loop are shares of the step's loss."""
        return None

    @property
    def is_step_complete(self) -> bool:
        """Return whether the optimizer steps after this micro-batch, as far as is known."""
        return True

    def step(self, examples: int = 0) -> None:
        """Record a step; call it after optimizer.step().

        Args:
            examples: in this batch, for the rate; 0 records no rate.

        Raises:
            ConfigError: the loop is not in the context, or there was no backward of a loss or no
                step of the optimizer since the last step.
        """
        if not self._is_entered:
            name = type(self).__name__
            raise ConfigError(f"step() was called outside of the record. Type with {name}(...):.")
        if self.recorder is None:
            return
        self.recorder.reader.add_examples(examples)
        if not self.is_step_complete:
            return
        if not self.recorder.reader.is_step_read:
            raise ConfigError(
                f"step() was called and {self.backward_call} was not since the last step. Call "
                "both in each step inside the record, in place of loss.backward()."
            )
        if not self._has_stepped:
            raise ConfigError(
                "step() was called before optimizer.step(), which decides whether the step is "
                "skipped. Call record.step() after it, with the optimizer that the record has."
            )
        self._has_stepped = False
        self._step += 1
        self.recorder.end_step(self._step, 1)

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record an evaluation at the present step.

        Args:
            metrics: numbers by name; `loss` is recorded as `val/loss`.
        """
        if self.recorder is None:
            return
        named = {f"val/{name.removeprefix('val/')}": float(v) for name, v in metrics.items()}
        self.recorder.add_evaluation(self._step, 1, named)
