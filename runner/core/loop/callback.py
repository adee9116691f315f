"""The contract of callbacks: they read the records of a training, and may ask it to stop.

RunCallback is the base class of the runner's own callbacks and of the user's, which are nodes of
the config group `callbacks`. How the user's are built and called is in user_callbacks.py.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from torch import Tensor, nn

from runner.core.base.files import write_text
from runner.core.base.fmt import now_ms
from runner.core.base.layout import CALLBACK_FILES
from runner.core.base.tensor_facts import as_number
from runner.core.loop.step_records import EvalRecord, StepRecord, TrainingEnd
from runner.core.loop.train_state import TrainState
from runner.core.record.metric_names import METRIC_NAME, RESERVED_PREFIXES
from runner.core.record.tracker import RunOutput


class RunCallback:
    """Base class of callbacks: override the hooks of interest; the defaults ignore the record.

    A callback reads and records, and never steers the loop: one that wants the run to end says so
    in `stop_reason`, a callback of the user's by run.stop(). The user's are called without
    gradients, in the main process only; random generators and the model's modes are as before after
    each hook, so that the training is the same with and without the callback.

    Attributes:
        key: name of the state of a callback of the runner's in checkpoints. It must not change when
            the class is renamed: old checkpoints would lose the state.
        is_in_every_run: whether each training run has one, so that a checkpoint without its state
            is incomplete. A checkpoint lacks the state of any other callback if the run before
            had none.
        stop_reason: why a callback of the runner's ends the training, equal in all processes; empty
            where it does not.
    """

    key: ClassVar[str] = ""
    is_in_every_run: ClassVar[bool] = False
    stop_reason: str = ""

    def dispatch(self, record: Sequence[StepRecord] | EvalRecord, run: "RunHandle") -> None:
        """Call the hook of a record."""
        if isinstance(record, EvalRecord):
            self.on_evaluation(record, run)
        else:
            self.on_steps(record, run)

    def around_step(self, step: int) -> AbstractContextManager[object] | None:
        """Return a context for an optimizer step that begins; None for none. Not asked of the
        user's callbacks."""

    def on_steps(self, records: Sequence[StepRecord], run: "RunHandle") -> None:
        """Read the records of steps that have reached the host, in order.

        Called at each multiple of train.log_every, before each evaluation, each checkpoint and the
        end; on a GPU one interval later.
        """

    def on_evaluation(self, record: EvalRecord, run: "RunHandle") -> None:
        """Read the metrics of an evaluation; the records up to its step came before."""

    def on_end(self, end: TrainingEnd, run: "RunHandle") -> None:
        """Read how the training ended.

        Not called where a signal, a guard or an error ended it: a resumed run calls it at its end.
        """

    def close(self) -> None:
        """Finish; the run is over, however it ended. Not called for the user's callbacks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the callback needs after a resume: numbers, texts, tensors, lists, dicts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what state_dict returned.

        Where a checkpoint holds no state of it, a callback of the user's is not called, and one of
        the runner's gets an empty mapping.
        """


class RunHandle:
    """What a callback may do in a run: log metrics, save files, read the model, ask to stop.

    Args:
        name: of the callback in the config; empty for the runner's own callbacks.
        state: of the training.
        output: the run's folder and tracker.

    Attributes:
        name: of the callback.
        precision: name of the run's precision.
        folder: of the callback's files.
        step: the step that the hook is called for.
        stop_reason: why the callback asked the run to stop; empty where it did not.
    """

    def __init__(self, name: str, state: TrainState, output: RunOutput) -> None:
        self.name = name
        self.precision = state.precision.name
        self.folder = output.out / CALLBACK_FILES / name
        self.step = state.step
        self.stop_reason = ""
        self._state = state
        self._output = output
        # The modes of modules and the versions of tensors of a model before a hook reads it.
        self._modes: list[tuple[nn.Module, bool]] = []
        self._versions: list[tuple[Tensor, int]] = []

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers as metrics of the run.

        Args:
            values: numbers, or tensors of one number, by name. A name without a prefix gets the
                callback's: `gap` is recorded as `<callback>/gap`.
            step: from 0 to the run's present step; the hook's own by default.

        Raises:
            ValueError: a name is the runner's or holds other characters, a value is no number, or
                the step is not one of the run.
        """
        at = self.step if step is None else step
        if not isinstance(at, int) or not 0 <= at <= self._state.step:
            raise ValueError(f"step={at} is not one of this run, which is at {self._state.step}")
        numbers = {}
        for name, value in values.items():
            metric = self._metric_name(name)
            number = as_number(value)
            if number is None:
                raise ValueError(f"{name!r} is a {type(value).__name__}, not a number")
            numbers[metric] = number
        self._output.tracker.log_metrics([(at, now_ms(), numbers)])

    def save(self, name: str, content: str | bytes | Callable[[Path], object]) -> Path:
        """Write a file into the callback's folder, upload it, and return its path.

        A file that cannot be written is reported and does not end the run.

        Args:
            name: of the file, or a path below the callback's folder.
            content: text, bytes, or a function that writes the file at a path, as Figure.savefig.

        Raises:
            ValueError: the name leads out of the folder.
        """
        relative = PurePosixPath(name)
        if not name or relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"{name!r} is no path below the callback's folder {self.folder}")
        path = self.folder / relative

        def write(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                write_text(path, content)
            elif isinstance(content, bytes):
                path.write_bytes(content)
            else:
                content(path)

        folder = PurePosixPath(CALLBACK_FILES, self.name, relative).parent
        self._output.save_artifact(path, write, str(folder))
        return path

    def stop(self, reason: str) -> None:
        """Ask the run to stop: it evaluates, unless it just has, and ends as finished.

        Args:
            reason: a sentence for the terminal and the run's tag `stopped_by`.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError("stop() needs a reason, a text that is not empty")
        self.stop_reason = self.stop_reason or " ".join(reason.split())

    @property
    def model(self) -> nn.Module:
        """Return the model of the run, to be read; without the strategy's wrappers.

        Raises:
            ValueError: its weights are sharded among processes.
        """
        if self._state.strategy.shards:
            raise ValueError(
                "the model's weights are sharded among processes and cannot be read in one of "
                "them; type strategy=ddp"
            )
        model = self._state.plain_model
        if not self._modes:
            self._modes = [(module, module.training) for module in model.modules()]
            # torch counts the changes of a tensor in its version; one of an inference has none.
            tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_inference()]
            self._versions = [(tensor, tensor._version) for tensor in tensors]
        return model

    def close_hook(self) -> None:
        """Restore the model's modes after a hook.

        Raises:
            ValueError: the hook changed a parameter or a buffer in place.
        """
        for module, training in self._modes:
            module.training = training
        changed = sum(tensor._version != version for tensor, version in self._versions)
        self._modes = []
        self._versions = []
        if changed:
            raise ValueError(
                f"it changed {changed} parameters or buffers of the model; callbacks read only. A "
                "forward in training mode changes the statistics of batch norms: call "
                "run.model.eval() before it"
            )

    def _metric_name(self, name: Any) -> str:
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is no name of a metric. Allowed: text of one line, with slashes between"
            )
        if "/" not in name:
            return f"{self.name}/{name}"
        prefix = name.partition("/")[0]
        if prefix in RESERVED_PREFIXES:
            raise ValueError(
                f"{name!r} begins as the runner's own metrics do ({', '.join(RESERVED_PREFIXES)}). "
                "Take another prefix, or none"
            )
        return name
