"""The hook of task.after_evaluation: the user's function, called after each evaluation."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import Any

from runner.core import Tracker, TrainState, errors, layout, metric_names, tensor_facts
from runner.training.callbacks.user_callbacks import UserCode


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


class EvaluationHook:
    """Calls a run's hook after each evaluation of a data set.

    Args:
        state: its task has the hook, and its model is passed.
        folder: of its files.
        tracker: uploads the files; None where they stay in the folder.
        save_traceback: see UserCode.
        step: that the weights are of; None for the state's own.

    Attributes:
        seconds: that the calls have taken.
    """

    def __init__(
        self,
        state: TrainState,
        folder: Path,
        tracker: Tracker | None = None,
        save_traceback: Callable[[], str] = lambda: "",
        step: int | None = None,
    ) -> None:
        self.state = state
        self.folder = folder
        self.tracker = tracker
        self.seconds = 0.0
        self._fixed_step = step
        self._code = UserCode(state.device, save_traceback)

    @property
    def step(self) -> int:
        """Return the step that the weights are of."""
        return self.state.step if self._fixed_step is None else self._fixed_step

    def on_trial(self, folder: Path) -> "EvaluationHook":
        """Return a hook that is called the same way, and whose files stay in another folder."""
        save_traceback = self._code.save_traceback
        return EvaluationHook(self.state, folder, None, save_traceback, self._fixed_step)

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
        name = self.state.task.additions.hook_name
        title = f"task.after_evaluation={name}, called after the evaluation at step {self.step},"
        values = {}
        if strategy.rank.is_main or strategy.shards:
            values = self._code.call(title, self._values, title, label, metrics, batch) or {}
        problem = self._code.problem
        # All processes raise, so that none waits for another one.
        has_failed = strategy.all_reduce_max(bool(problem))
        values, first_problem = strategy.broadcast_object((values, problem))
        self.seconds += perf_counter() - start
        if has_failed:
            raise errors.HookError(problem or first_problem or f"{title} fails in another process.")
        return values

    def _values(
        self, title: str, label: str, metrics: Mapping[str, float], batch: tuple[Any, Any]
    ) -> dict[str, float]:
        """Return the numbers of the hook by their names in the record; upload what it wrote.

        Raises:
            HookError: it returned something else.
        """
        state = self.state
        inputs, target = batch
        # The files of an only set are in the folder of the step.
        name = label.removeprefix("val").lstrip("/")
        path = PurePosixPath(layout.SAMPLES, f"step-{self.step:08d}", name)
        folder = self.folder / path
        folder.mkdir(parents=True, exist_ok=True)
        named = {key.replace("val", label, 1): value for key, value in metrics.items()}
        info = EvaluationInfo(self.step, label, named, (state.cast(inputs), target), folder)
        hook = state.task.additions.hook
        assert hook is not None
        try:
            with state.forward_context():
                returned = hook(state.plain_model, info)
        finally:
            with suppress(OSError):  # raised for a folder that holds files
                folder.rmdir()
        # The files of other processes than the main one stay.
        if self.tracker and folder.exists() and state.strategy.rank.is_main:
            self.tracker.artifact(folder, str(path))
        return _checked_numbers(title, returned, metrics)


def _checked_numbers(title: str, returned: Any, metrics: Mapping[str, float]) -> dict[str, float]:
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise errors.HookError(
            f"{title} returns a {type(returned).__name__}. Return a mapping of names to numbers, "
            "which are recorded as val/<name>, or nothing."
        )
    values = {}
    for name, value in returned.items():
        number = tensor_facts.as_number(value)
        recorded = f"val/{name}"
        is_name = isinstance(name, str) and metric_names.METRIC_NAME.fullmatch(name)
        if number is None or not is_name or recorded in metrics:
            raise errors.HookError(
                f"{title} returns {name!r}: {type(value).__name__}. Return numbers by names, text "
                f"of one line, which are not those of the evaluation: {', '.join(metrics)}."
            )
        values[recorded] = number
    return values
