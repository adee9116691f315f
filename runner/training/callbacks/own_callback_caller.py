"""Call the callbacks of one's own, and have all processes agree on what they ask for."""

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from runner.training.callbacks.callback import Callback
from runner.training.callbacks.own_callback import (
    CallbackOutput,
    RunCallback,
    RunHandle,
    TrainingEnd,
)
from runner.training.evaluation_hook import describe_error
from runner.training.records import EvalRecord, Steps
from runner.training.state import TrainState
from runner.utils.errors import HookError
from runner.utils.reproducibility import rng_state, set_rng_state
from runner.utils.stop_signals import Stopped

STOPPED_BY = "stopped_by"
"""Tag of a run that a callback stopped."""

# What the main process tells the others; the highest one counts.
_CONTINUE, _STOP, _FAILED = range(3)


class OwnCallbackCaller(Callback):
    """Calls the hooks of the user's callbacks in the main process; the others take its answer.

    A hook that fails ends no dispatch of records: agree() raises its error in all processes, so
    that none waits for another one.

    Args:
        callbacks: by their names; empty in other processes than the main one.
        state: of the training.
        output: where metrics and files go.
    """

    key = "own_callbacks"

    def __init__(
        self, callbacks: Mapping[str, RunCallback], state: TrainState, output: CallbackOutput
    ) -> None:
        self.callbacks = callbacks
        self.state = state
        self.output = output
        self._handles = {name: RunHandle(name, state, output) for name in callbacks}
        self._problem = ""
        self._is_stopping = False

    def steps(self, block: Steps) -> None:
        self._call("on_steps", block[-1].step, block)

    def evaluation(self, record: EvalRecord) -> None:
        self._call("on_evaluation", record.step, record)

    def end(self, end: TrainingEnd) -> None:
        """Tell the callbacks that the training has ended; all processes must call it.

        Raises:
            HookError: a callback fails.
        """
        self._call("on_end", end.step, end)
        # The last checkpoint follows, and what fails there would be reported too late.
        self.state_dict()
        self.agree()

    @property
    def stop_reason(self) -> str:
        """Return which callback asked the run to stop and why; empty where none did."""
        for name, handle in self._handles.items():
            if handle.stop_reason:
                return f"callbacks.{name}: {handle.stop_reason}"
        return ""

    @property
    def is_stopping(self) -> bool:
        """Return whether the processes have agreed to stop."""
        return self._is_stopping

    def agree(self) -> bool:
        """Return whether a callback asks the run to stop; all processes must ask, and agree.

        Raises:
            HookError: a callback failed.
        """
        wish = _STOP if self.stop_reason else _CONTINUE
        agreed = self.state.strategy.all_reduce_max(_FAILED if self._problem else wish)
        if agreed == _FAILED:
            raise HookError(self._problem or "A callback fails in the main process.")
        if agreed == _STOP and not self._is_stopping:
            self._is_stopping = True
            self._announce_stop()
        return self._is_stopping

    def _announce_stop(self) -> None:
        reason = self.stop_reason
        if reason:
            self.output.say(f"stopping, as asked at step {self.state.step} by {reason}")
            self.output.tracker.tags({STOPPED_BY: reason})

    def _call(self, hook: str, step: int, record: Any) -> None:
        """Call a hook of every callback, until one fails."""
        for name, callback in self.callbacks.items():
            if self._problem:
                return
            handle = self._handles[name]
            handle.step = step
            # The training draws the numbers that it would draw without the callbacks.
            random_state = rng_state(self.state.device)
            try:
                with torch.no_grad():
                    getattr(callback, hook)(record, handle)
                handle.close_hook()
            except Stopped:
                raise  # a signal, which is no failure of the callback
            except Exception as error:  # of whatever type the user's code raises
                self._note_failure(f"{name}.{hook}, called at step {step},", error)
            finally:
                set_rng_state(random_state, self.state.device)

    def _note_failure(self, what: str, error: Exception) -> None:
        sentence = self.output.save_traceback()
        traceback = f" {sentence}" if sentence else ""
        self._problem = f"callbacks.{what} fails: {describe_error(error)}{traceback}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback by its name: copies, in plain containers."""
        states = {}
        for name, callback in self.callbacks.items():
            states[name] = self._state_of(name, callback.state_dict)
        return {name: state for name, state in states.items() if state is not None}

    def _state_of(self, name: str, state_dict: Callable[[], Any]) -> dict[str, Any] | None:
        """Return a callback's state, None where it fails, which agree() reports."""
        try:
            state = state_dict()
            if not isinstance(state, dict):
                raise TypeError(f"it returned a {type(state).__name__}, not a dict")
            return plain_copy(state)
        except Exception as error:
            if not self._problem:
                self._note_failure(f"{name}.state_dict", error)
                self.output.say(f"warning: {self._problem} Checkpoints hold no state of it.")
            return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each callback that a checkpoint holds; agree() reports errors."""
        for name, saved in state.items():
            if name not in self.callbacks:
                continue
            try:
                self.callbacks[name].load_state_dict(saved)
            except Exception as error:  # agree() raises it
                self._note_failure(f"{name}.load_state_dict", error)


def plain_copy(value: Any) -> Any:
    """Return a copy of a state that a checkpoint can hold: it is read without unpickling.

    Raises:
        TypeError: a value is none of what is allowed.
    """
    if value is None or isinstance(value, bool):
        return value
    # As Python's own: those of NumPy would have to be unpickled.
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(plain_copy(item) for item in value)
    if isinstance(value, dict):
        if not all(type(key) in (str, int) for key in value):
            raise TypeError("its state has a key that is neither a text nor a whole number")
        return {key: plain_copy(item) for key, item in value.items()}
    raise TypeError(
        f"its state holds a {type(value).__name__}; allowed: numbers, texts, tensors, and lists, "
        "tuples and dicts of them"
    )
