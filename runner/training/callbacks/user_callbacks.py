"""The user's callbacks, nodes of the config group `callbacks`: check, build and call them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from runner.core import (
    ConfigError,
    RunCallback,
    RunHandle,
    RunOutput,
    TrainState,
    errors,
    fmt,
    metric_names,
    random_streams,
    refuse,
    step_records,
    stop_signals,
    targets,
)
from runner.data.collate import error_with_line

HOOKS = ("on_steps", "on_evaluation", "on_end")
"""Methods of a user's RunCallback that the run calls."""
STOPPED_BY = "stopped_by"
"""Tag of a run that a callback stopped."""

_NAME = re.compile(r"[A-Za-z]\w*")
# What the main process sends to the others; the highest one counts.
_CONTINUE, _STOP, _FAILED = range(3)
# Python's own type for each kind of value: those of NumPy would have to be unpickled.
_PLAIN_TYPES: Sequence[tuple[Any, Any]] = ((str, str), (Integral, int), (Real, float))


def callback_problems(nodes: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each name, node and class that is no callback; arguments are checked with
    those of all targets."""
    for name, node in nodes.items():
        key = f"callbacks.{name}"
        if not _NAME.fullmatch(str(name)) or name in metric_names.RESERVED_PREFIXES:
            reserved = ", ".join(metric_names.RESERVED_PREFIXES)
            yield (
                f"{key}: {name} cannot name a callback, whose metrics it begins. Allowed: letters, "
                f"digits and underscores, a letter first, but not {reserved}."
            )
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            yield (
                f"{key}={fmt.typed_value(node)} does not fit. Allowed: a node with _target_ and "
                "keywords, under a name: type callbacks.<name>._target_=package.module.Name."
            )
            continue
        try:
            target = targets.locate(node["_target_"])
        except ConfigError:
            continue  # reported with those of all targets
        if isinstance(target, type):
            yield from class_problems(f"{key}._target_={node['_target_']}", target)


def class_problems(subject: str, kind: type) -> Iterator[str]:
    """Yield a message for each reason why objects of a class are no callbacks.

    Args:
        subject: what the messages are about.
        kind: the class.
    """
    if not issubclass(kind, RunCallback):
        yield f"{subject} is no callback. Derive it from runner.RunCallback."
        return
    for name in dir(kind):
        if not name.startswith("on_"):
            continue
        if name not in HOOKS:
            similar = get_close_matches(name, HOOKS, n=1)
            hint = f" Write {similar[0]}." if similar else ""
            yield f"{subject} has {name}, which is no hook. Hooks: {', '.join(HOOKS)}.{hint}"
            continue
        try:
            signature(getattr(kind, name)).bind("self", "record", "run")
        except TypeError:
            parameters = ", ".join(signature(getattr(RunCallback, name)).parameters)
            hook = f"{name}{signature(getattr(kind, name))}"
            yield f"{subject} has {hook}. Write {name}({parameters})."
    if all(getattr(kind, name) is getattr(RunCallback, name) for name in HOOKS):
        yield f"{subject} has no hook of its own. Define one of: {', '.join(HOOKS)}."


def build_user_callbacks(nodes: Mapping[str, Any]) -> dict[str, RunCallback]:
    """Build the callbacks of a run, by their names.

    Args:
        nodes: the group `callbacks`; the target of each node returns a RunCallback.

    Raises:
        ConfigError: a target refuses its arguments, or returns something else.
    """
    built = {}
    problems = []
    for name, node in nodes.items():
        key = f"callbacks.{name}"
        built[name] = targets.build_group(key, node)
        problems += class_problems(f"{key}: what {node['_target_']} returns", type(built[name]))
    refuse(problems)
    return built


@dataclass(eq=False)
class UserCode:
    """Calls functions of the user's, whose failures end the run in all processes together.

    Args:
        device: of the training, whose random generators the functions must not change.
        save_traceback: writes the traceback of the error being handled, and returns a sentence
            that names the file.

    Attributes:
        problem: the first failure, a sentence; empty where there was none.
    """

    device: torch.device
    save_traceback: Callable[[], str]
    problem: str = ""

    def call(self, title: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return what a function returns; None where it fails, which is noted in `problem`.

        Args:
            title: names the function in the sentence about a failure.
            function: the user's.
            args: passed to it.
        """
        # The training draws the numbers that it would draw without the call.
        random_state = random_streams.rng_state(self.device)
        try:
            return function(*args)
        except stop_signals.Stopped:
            raise  # a signal, which is no failure of the user's code
        except errors.HookError as error:
            self.problem = self.problem or str(error)
        except Exception as error:  # of whatever type the user's code raises
            if not self.problem:
                traceback = f" {self.save_traceback()}".rstrip()
                self.problem = f"{title} fails: {error_with_line(error)}.{traceback}"
        finally:
            random_streams.set_rng_state(random_state, self.device)
        return None


@dataclass(eq=False)
class UserCallbacks(RunCallback):
    """Calls the hooks of the user's callbacks in the main process; the others take its answer.

    A hook that fails ends no dispatch of records: agree() raises its error in all processes, so
    that none waits for another one.

    Args:
        callbacks: by their names; empty in other processes than the main one.
        state: of the training.
        output: where metrics and files go.
    """

    key = "own_callbacks"

    callbacks: Mapping[str, RunCallback]
    state: TrainState
    output: RunOutput

    def __post_init__(self) -> None:
        self._code = UserCode(self.state.device, self.output.save_traceback)
        self._handles = {n: RunHandle(n, self.state, self.output) for n in self.callbacks}
        self._agreed_reason = ""

    def on_steps(self, records: Sequence[step_records.StepRecord], run: RunHandle) -> None:
        self._call("on_steps", records[-1].step, records)

    def on_evaluation(self, record: step_records.EvalRecord, run: RunHandle) -> None:
        self._call("on_evaluation", record.step, record)

    def on_end(self, end: step_records.TrainingEnd, run: RunHandle) -> None:
        """Call the hooks on the end of the training; all processes must call it.

        Raises:
            HookError: a callback fails.
        """
        self._call("on_end", end.step, end)
        # The last checkpoint follows, and what fails there would be reported too late.
        self.state_dict()
        self.agree()

    @property
    def is_stopping(self) -> bool:
        """Return whether the processes have agreed to stop."""
        return bool(self._agreed_reason)

    @property
    def stop_reason(self) -> str:  # type: ignore[override]
        """Return which callback ends the training and why; empty where none does.

        A callback that asks for it ends the training after an evaluation.
        """
        is_evaluated = self.state.last_evaluation_step == self.state.step
        return self._agreed_reason if is_evaluated else ""

    def agree(self) -> None:
        """Have the processes agree whether the run stops; all of them must call it.

        Raises:
            HookError: a callback failed.
        """
        reasons = (
            f"callbacks.{name}: {handle.stop_reason}"
            for name, handle in self._handles.items()
            if handle.stop_reason
        )
        reason = next(reasons, "")
        request = _STOP if reason else _CONTINUE
        problem = self._code.problem
        agreed = self.state.strategy.all_reduce_max(_FAILED if problem else request)
        if agreed == _FAILED:
            raise errors.HookError(problem or "A callback fails in the main process.")
        if agreed == _CONTINUE or self.is_stopping:
            return
        self._agreed_reason = reason or "a callback in the main process"
        if reason:
            self.output.say(f"stopping, as asked at step {self.state.step} by {reason}")
            self.output.tracker.tags({STOPPED_BY: reason})

    def _call(self, hook: str, step: int, record: Any) -> None:
        """Call a hook of every callback, until one fails."""
        for name, callback in self.callbacks.items():
            if self._code.problem:
                return
            handle = self._handles[name]
            handle.step = step
            title = f"callbacks.{name}.{hook}, called at step {step},"
            self._code.call(title, _call_hook, getattr(callback, hook), record, handle)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback by its name: copies, in plain containers.

        The state of a callback that fails is left out, and agree() reports the error.
        """
        states = {}
        for name, callback in self.callbacks.items():
            earlier_problem = self._code.problem
            state = self._code.call(f"callbacks.{name}.state_dict", _plain_state, callback)
            if state is not None:
                states[name] = state
            elif not earlier_problem:
                self.output.say(f"warning: {self._code.problem} Checkpoints hold no state of it.")
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each callback that a checkpoint holds; agree() reports errors."""
        for name, saved in state.items():
            if name in self.callbacks:
                load = self.callbacks[name].load_state_dict
                self._code.call(f"callbacks.{name}.load_state_dict", load, saved)


@torch.no_grad()
def _call_hook(hook: Callable[..., object], record: Any, handle: RunHandle) -> None:
    hook(record, handle)
    handle.close_hook()


def _plain_state(callback: RunCallback) -> dict[str, Any]:
    """Return a copy of a callback's state that a checkpoint can hold.

    Raises:
        TypeError: it is no dict, or holds what is not allowed.
    """
    state = callback.state_dict()
    if not isinstance(state, dict):
        raise TypeError(f"it returned a {type(state).__name__}, not a dict")
    return plain_copy(state)


def plain_copy(value: Any) -> Any:
    """Return a copy of a state that a checkpoint can hold: it is read without unpickling.

    Raises:
        TypeError: a value is none of what is allowed.
    """
    if isinstance(value, bool | None):
        return value
    for kind, plain in _PLAIN_TYPES:
        if isinstance(value, kind):
            return plain(value)
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
