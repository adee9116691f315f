"""How a run's guards act: the data checks, what is kept, how a failure is told. What they watch
for in the records is in observers/guard.py."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from runner.config.schema import TrainSpec
from runner.data.loader import Loader
from runner.data.step_samples import samples_of_step, targets_of_samples
from runner.data.workers import PREFETCH, is_dataset_error, worker_failure
from runner.diagnostics.data_checks import data_problems, explain_uncounted_labels, label_problem
from runner.diagnostics.memory.out_of_memory import is_out_of_memory
from runner.diagnostics.saved_batch import save_batch
from runner.modes import batch_errors
from runner.modes.precision_errors import precision_advice
from runner.modes.result import RunResult
from runner.training.callbacks.guard import Guard
from runner.training.records import StepRecord
from runner.training.state import TrainState
from runner.training.step import loss_of
from runner.utils.errors import ConfigError, DataError, Diverged, ModelError, RunnerError
from runner.utils.formatting import relative_path
from runner.utils.layout import RESULT
from runner.utils.reproducibility import host_rng_state, set_host_rng_state

if TYPE_CHECKING:
    from runner.modes.context import RunContext

_LABEL = re.compile(r"Target -?\d+ is out of bounds")
_INDEX = "index out of range in self"
_ASSERT = "device-side assert"


def make_guard(this: "RunContext", loader: Loader) -> Guard:
    """The observer that judges the records, saving samples of this loader."""

    def kept(record: StepRecord, why: str) -> str:
        begun = this.resumed.content["step"] if this.resumed else 0
        return save_batch(this, loader, record.step, why, record.loss_scale, begun=begun)

    def cause(record: StepRecord) -> str | None:
        samples = samples_of_step(loader, _accumulate(this), record.step).indices
        drawn = host_rng_state()
        try:
            return explain_uncounted_labels(loader, samples, this.task)
        except Exception:  # what explains an error must not hide it
            return None
        finally:
            set_host_rng_state(drawn)  # a data set may draw random numbers for its samples

    return Guard(this.spec, this.precision.name, this.say, kept, cause)


def check_data(this: "RunContext", loaders: tuple[Loader | None, Loader]) -> None:
    """Look at the sets before anything is computed from them, as guard.data says.

    Raises:
        DataError: with every problem found.
    """
    action, found = this.spec.guard.data, []
    if action == "ignore":
        return
    classes = (this.spec.data.get("meta") or {}).get("classes")
    for split, loader in zip(("train", "val"), loaders, strict=True):
        if loader is not None:
            with _loading(this, split):
                found += data_problems(loader, split, this.task, classes)
    if action == "stop" and found:
        raise DataError("\n".join([*found, "To train on them all the same: guard.data=warn."]))
    for problem in found:
        this.say(f"warning: {problem}")


def require_single_process(state: TrainState, train: TrainSpec) -> None:
    """Raise ConfigError for what one process can do only."""
    if state.strategy.place.world_size > 1 and train.max_seconds is not None:
        raise ConfigError(
            f"train.max_seconds={train.max_seconds} ends a run of one process. Type "
            "train.max_steps=<steps>, or leave torchrun and strategy= out."
        )
    if state.strategy.place.world_size > 1 and state.takes_closure:
        raise ConfigError(
            "optimizer=lbfgs searches along a line by itself, in one process only. Type another "
            "optimizer, or leave torchrun and strategy= out."
        )
    if not state.strategy.shards:
        return
    what = "complex weights" if state.complex else "sparse gradients" if state.sparse else ""
    for scheduled in state.optimizers:
        if hasattr(scheduled.optimizer, "wide_embeddings"):
            what = f"the low-bit state of {type(scheduled.optimizer).__name__}"
    if what:
        name = state.strategy.name
        raise ConfigError(f"strategy={name} cannot part {what}. Type strategy=ddp.")


def try_batch(this: "RunContext", state: TrainState, loader: Loader) -> None:
    """One forward and loss in evaluation mode, which changes nothing, so that a model that does
    not fit its data or task is told from a run that fails."""
    inputs, target = next(loader.epoch(0))
    names = {
        key: this.origin.option_name(key, getattr(this.spec, key))
        for key in ("model", "data", "task")
    }
    names["precision"] = this.precision.name
    state.model.eval()
    with batch_errors.outputs_of(state.plain_model) as outputs:
        try:
            with torch.no_grad(), this.precision.evaluating(state.plain_model):
                loss = loss_of(state, inputs, target)
        except RunnerError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = batch_errors.BatchFailure(
                error, state.plain_model, this.task, this.precision, names, inputs, target, outputs
            )
            raise ConfigError(
                f"{batch_errors.explain_batch_error(failure)} {this.traceback()}"
            ) from error
    if problem := batch_errors.loss_problem(loss, names["task"]):
        raise ConfigError(problem)


def weights_are_finite(this: "RunContext", state: TrainState) -> bool:
    """Whether the weights may be saved; those that are not finite must not replace good ones."""
    every = [p.detach() for p in state.plain_model.parameters()]  # a mask may hold infinities
    params = state.strategy.local_shards(every)
    floats = [p for p in params if p.itemsize > 1 and (p.is_floating_point() or p.is_complex())]
    if not floats or bool(torch.stack([t.isfinite().all().cpu() for t in floats]).all()):
        return True
    this.say(f"warning: the weights of step {state.step} are not finite and are not saved.")
    return False


def last_checkpoint_hint(folder: Path) -> str:
    """A line that names the newest checkpoint, empty without one."""
    found = sorted(folder.glob("step-*.pt"))
    return f"\nThe last good weights: init.weights={relative_path(found[-1])}" if found else ""


def raise_diverged(this: "RunContext", result: RunResult) -> NoReturn:
    """End a run that a guard stopped: its result is what it reached until then."""
    trouble = "\n".join([this.trouble, *this.lost])
    failed = replace(result, status="failed", error=trouble, diverged=True)
    this.leave(this.out / RESULT, lambda _: failed.write(this.out))
    raise Diverged(trouble)


@contextmanager
def explain_data_errors(
    this: "RunContext", state: TrainState, loaders: tuple[Loader, Loader]
) -> Iterator[None]:
    """Context around the loop: labels that are no class, processes that die and operations that
    the precision lacks are told with the step. The traceback is in error.txt.

    Raises:
        DataError: in place of what the data causes.
        ConfigError: in place of what the precision or a missing gradient causes; ModelError where
            steps have been trained before.
    """
    begun = state.step
    try:
        yield
    except RunnerError:
        raise
    except Exception as error:
        this.signals.check()  # an interrupt reaches the processes that load data, too
        if batch_errors.is_loss_independent_of_weights(error):
            raise ConfigError(f"{_no_gradient(state, loaders[1])} {this.traceback()}") from error
        if advice := precision_advice(error, state.plain_model, this.precision):
            kind = ConfigError if state.step <= begun + 1 else ModelError
            raise kind(
                f"{_failing_step(this, state, error)} {advice} {this.traceback()}"
            ) from error
        told = _told(this, state, loaders, error)
        if told is None:
            raise
        raise DataError(f"{told}\n{this.traceback()}".rstrip()) from error


def _failing_step(this: "RunContext", state: TrainState, error: Exception) -> str:
    """What failed when, and the error's own text."""
    model = this.origin.option_name("model", this.spec.model)
    when = "step" if state.model.training else "the evaluation after step"
    text = str(error).strip().rstrip(".")
    return (
        f"model={model} fails in {when} {state.step} with precision={this.precision.name}: "
        f"{type(error).__name__}: {text}."
    )


def _no_gradient(state: TrainState, loader: Loader) -> str:
    """Why the loss has no gradient, from one more forward that changes nothing."""
    inputs, _ = next(loader.epoch(0))
    state.model.eval()

    def call() -> Any:
        with state.precision.forward(state.device):
            return state.plain_model(state.precision.cast(inputs))

    return batch_errors.gradient_problem(state.plain_model, call)


@contextmanager
def _loading(this: "RunContext", split: str) -> Iterator[None]:
    """Context around a look at a set."""
    try:
        yield
    except Exception as error:
        if (reason := worker_failure(error)) is None:
            raise
        told = _death(reason, f"the {split} set's first batches")
        raise DataError(f"{told}\n{this.traceback()}".rstrip()) from error


def _told(
    this: "RunContext", state: TrainState, loaders: tuple[Loader, Loader], error: Exception
) -> str | None:
    """What an error of the loop means; None for one that is not the data's."""
    training, step, text = state.model.training, state.step, str(error)
    if reason := worker_failure(error):
        if not training:
            return _death(reason, "the val set")
        ahead = (
            1 if is_dataset_error(error) else -(-PREFETCH * loaders[0].workers // _accumulate(this))
        )
        steps = f"step {step + 1}" if ahead == 1 else f"steps {step + 1} to {step + ahead}"
        told = _death(reason, f"the train set for {steps}")
        return f"{told}\n{save_batch(this, loaders[0], step + 1, reason, count=ahead)}"
    if _LABEL.search(text) or _INDEX in text:
        return _outside(this, loaders[not training], text, [step] if training else None)
    if _ASSERT in text:  # it comes late: records are two blocks behind the device at most
        first = max(1, step - 2 * this.spec.train.log_every)
        return _outside(this, loaders[0], text, range(first, step + 1))
    return None


def _accumulate(this: "RunContext") -> int:
    return this.spec.train.accumulate


def _death(reason: str, what: str) -> str:
    """A process that loads data died, or raised."""
    return (
        f"A process that loads {what} failed: {reason}.\n"
        "Try train.num_workers=0 to see it in the main process, or fewer processes where memory "
        "ran out."
    )


def _outside(this: "RunContext", loader: Loader, text: str, steps: Sequence[int] | None) -> str:
    """A label or token beyond what the model knows; steps of the training, None in evaluation."""
    reason = text.splitlines()[0].rstrip(".")
    if steps is None:
        return f"In the evaluation: {reason}.{_culprit(this, loader, range(loader.examples))}"
    accumulate = this.spec.train.accumulate
    samples = [i for step in steps for i in samples_of_step(loader, accumulate, step).indices]
    at = f"step {steps[0]}" if len(steps) == 1 else f"one of steps {steps[0]} to {steps[-1]}"
    told = f"At {at}: {reason}.{_culprit(this, loader, samples)}"
    return f"{told}\n{save_batch(this, loader, steps[0], told, count=len(steps))}"


def _culprit(this: "RunContext", loader: Loader, samples: Sequence[int]) -> str:
    """The first of these samples whose label is no class, where that can be told."""
    classes = (this.spec.data.get("meta") or {}).get("classes")
    if not classes:
        return " Labels go from 0 to the number of the model's outputs less one."
    with suppress(Exception):  # what is told of the error must not hide it
        for part in torch.tensor(samples).split(loader.batch_size):
            target = targets_of_samples(loader.dataset, part.tolist())
            wrong = this.task.misplaced(target, classes)
            if wrong is not None and wrong.any():
                first = int(wrong.nonzero()[0])
                return f" Sample {int(part[first])}: {label_problem(target[first], classes)}"
    return ""
