"""The hook of task.after_evaluation: the user's function, called after each evaluation."""

import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from runner.training.state import TrainState
from runner.utils.errors import HookError
from runner.utils.reproducibility import rng_state, set_rng_state
from runner.utils.stop_signals import Stopped

SAMPLES = "samples"
"""Folder of the files that hooks write, in the run's folder and among its artifacts."""

_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)*")


@dataclass(frozen=True)
class EvaluationInfo:
    """What a hook of task.after_evaluation is told about an evaluation.

    Attributes:
        step: optimizer step after which it ran.
        label: the set that was evaluated: val, val/<name>, test or test/<name>.
        metrics: its metrics, named <label>/<metric>.
        batch: inputs and target of the set's first batch, as the model and the task take them, on
            the device.
        folder: for files, which are uploaded as artifacts of the same folder, samples/step-<step>.
    """

    step: int
    label: str
    metrics: Mapping[str, float]
    batch: tuple[Any, Any]
    folder: Path


@dataclass(frozen=True)
class HookOutput:
    """Where the files and the tracebacks of a hook go.

    Attributes:
        folder: the run's folder of this process.
        upload: uploads a folder as the artifacts of another one.
        save_traceback: writes the traceback of the error being handled, and returns a sentence
            that names the file.
    """

    folder: Path
    upload: Callable[[Path, str], None]
    save_traceback: Callable[[], str]


class EvaluationHook:
    """Calls a run's hook after each evaluation of a data set.

    Args:
        state: its task has the hook, and its model is passed.
        output: where files go.
        step: returns the step that the weights are of.

    Attributes:
        seconds: that the calls have taken.
    """

    def __init__(
        self, state: TrainState, output: HookOutput, step: Callable[[], int] | None = None
    ) -> None:
        self.state = state
        self.output = output
        self.step = step or (lambda: state.step)
        self.seconds = 0.0

    def on_trial(self, folder: Path) -> "EvaluationHook":
        """Return a hook that is called the same way, and whose files stay in another folder."""
        output = replace(self.output, folder=folder, upload=lambda path, name: None)
        return EvaluationHook(self.state, output, self.step)

    def __call__(
        self, label: str, metrics: Mapping[str, float], batch: tuple[Any, Any]
    ) -> dict[str, float]:
        """Return the numbers that the hook returns, named val/<name>, in all processes.

        The main process calls the hook; where weights are sharded, all processes do, since each
        forward needs all of them. The model is in evaluation mode.

        Args:
            label: of the set.
            metrics: of the evaluation, named val/<metric>.
            batch: inputs and target of its first batch, before the precision's cast.

        Raises:
            HookError: the hook raised, or returned something else than numbers by name.
        """
        strategy = self.state.strategy
        start = perf_counter()
        values: dict[str, float] = {}
        problem = ""
        if strategy.place.is_main or strategy.shards:
            try:
                values = self._checked(self._call(label, metrics, batch), metrics)
            except Stopped:
                raise  # a signal, which is no failure of the hook
            except HookError as error:
                problem = str(error)
            except Exception as error:  # of whatever type the user's code raises
                problem = f"{self._title} fails: {describe_error(error)}{self._traceback()}"
        # All processes raise, so that none waits for another one.
        has_failed = strategy.all_reduce_max(bool(problem))
        values, first_problem = strategy.broadcast_object((values, problem))
        self.seconds += perf_counter() - start
        if has_failed:
            raise HookError(problem or first_problem or f"{self._title} fails in another process.")
        return values

    @property
    def _title(self) -> str:
        name = self.state.task.additions.hook_name
        return f"task.after_evaluation={name}, called after the evaluation at step {self.step()},"

    def _traceback(self) -> str:
        sentence = self.output.save_traceback()
        return f" {sentence}" if sentence else ""

    def _call(self, label: str, metrics: Mapping[str, float], batch: tuple[Any, Any]) -> Any:
        """Return what the hook returns; upload what it wrote."""
        state = self.state
        precision = state.precision
        inputs, target = batch
        name = f"{SAMPLES}/step-{self.step():08d}{_subfolder(label)}"
        folder = self.output.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        named = {key.replace("val", label, 1): value for key, value in metrics.items()}
        info = EvaluationInfo(self.step(), label, named, (precision.cast(inputs), target), folder)
        hook = state.task.additions.hook
        assert hook is not None
        # The training draws the numbers that it would draw without the hook.
        random_state = rng_state(state.device)
        try:
            with precision.forward(state.device):
                returned = hook(state.plain_model, info)
        finally:
            set_rng_state(random_state, state.device)
            with suppress(OSError):  # raised for a folder that holds files
                folder.rmdir()
        if folder.exists():
            self.output.upload(folder, name)
        return returned

    def _checked(self, returned: Any, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers by their names in the record."""
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            raise HookError(
                f"{self._title} returns a {type(returned).__name__}. Return a mapping of names to "
                "numbers, which are recorded as val/<name>, or nothing."
            )
        values = {}
        for name, value in returned.items():
            number = as_number(value)
            recorded = f"val/{name}"
            if number is None or not isinstance(name, str) or not _NAME.fullmatch(name):
                raise HookError(
                    f"{self._title} returns {name!r}: {type(value).__name__}. Return numbers by "
                    "names of letters, digits, underscores, dots and dashes."
                )
            if recorded in metrics:
                raise HookError(
                    f"{self._title} returns {name}, and {recorded} is a metric of the evaluation. "
                    "Give it another name."
                )
            values[recorded] = number
        return values


def _subfolder(label: str) -> str:
    """Return the folder of a set's files below that of the step; that of an only one is empty."""
    name = label.removeprefix("val").lstrip("/")
    return f"/{name}" if name else ""


def as_number(value: Any) -> float | None:
    """Return a number, or a tensor of one number, as a float; None for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, Real) else None


def describe_error(error: Exception) -> str:
    """Return an error's type and text, and the innermost line of the user's code, as a sentence."""
    text = " ".join(str(error).split()).rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1])
    others = [f for f in frames if "site-packages" not in f.filename]
    own = [frame for frame in others if not frame.filename.startswith(package)]
    place = (own or others or frames)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"{type(error).__name__}: {text} ({where})."
