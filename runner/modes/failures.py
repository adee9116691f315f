"""Check data, first batch and settings before training, and explain errors of the training loop.

The guard that judges the records of a training is in training/callbacks/guard.py; here it is given
what it saves and how it says so.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from runner.config.schema import TrainSpec
from runner.data.loader import Loader
from runner.data.step_samples import samples_of_step, targets_of_samples
from runner.data.workers import PREFETCH, is_dataset_error, worker_failure
from runner.diagnostics.data_checks import data_problems, explain_uncounted_labels, label_problem
from runner.diagnostics.memory.out_of_memory import is_out_of_memory
from runner.diagnostics.saved_batch import BatchSaver
from runner.modes import batch_errors
from runner.modes.context import RunContext
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

_LABEL = re.compile(r"Target -?\d+ is out of bounds")
_INDEX = "index out of range in self"
_ASSERT = "device-side assert"


def make_guard(run: RunContext, loader: Loader, begun: int) -> Guard:
    """Return the callback that judges the records.

    Args:
        run: the run.
        loader: yields the training batches, whose samples the guard saves.
        begun: the step that the run started or was resumed at.
    """
    saver = _batch_saver(run, loader)

    def save(record: StepRecord, why: str) -> str:
        return saver.save(record.step, why, record.loss_scale, begun=begun)

    def cause(record: StepRecord) -> str | None:
        samples = samples_of_step(loader, run.spec.train.accumulate, record.step).indices
        drawn = host_rng_state()
        try:
            return explain_uncounted_labels(loader, samples, run.task)
        except Exception:  # what explains an error must not hide it
            return None
        finally:
            set_host_rng_state(drawn)  # a data set may draw random numbers for its samples

    return Guard(run.spec, run.precision, run.say, save, cause)


def check_data(run: RunContext, loaders: tuple[Loader | None, Loader]) -> None:
    """Check the data sets before anything is computed from them, and act as guard.data says.

    Raises:
        DataError: with every problem.
    """
    action = run.spec.guard.data
    problems: list[str] = []
    if action == "ignore":
        return
    classes = (run.spec.data.get("meta") or {}).get("classes")
    for split, loader in zip(("train", "val"), loaders, strict=True):
        if loader is not None:
            with _explain_dead_workers(run, split):
                problems += data_problems(loader, split, run.task, classes)
    if action == "stop" and problems:
        raise DataError("\n".join([*problems, "To train on them all the same: guard.data=warn."]))
    for problem in problems:
        run.say(f"warning: {problem}")


def require_single_process(state: TrainState, train: TrainSpec) -> None:
    """Raise ConfigError for settings that several processes cannot run."""
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
        raise ConfigError(f"strategy={name} cannot shard {what}. Type strategy=ddp.")


def try_batch(run: RunContext, state: TrainState, loader: Loader) -> None:
    """Compute one forward and loss in evaluation mode, which changes nothing.

    So an error here means that model, data and task do not fit, not that the training failed.

    Raises:
        ConfigError: they do not fit; the message says what to change.
    """
    inputs, target = next(loader.epoch(0))
    names = {
        key: run.origin.option_name(key, getattr(run.spec, key))
        for key in ("model", "data", "task")
    }
    names["precision"] = run.precision.name
    state.model.eval()
    with batch_errors.outputs_of(state.plain_model) as outputs:
        try:
            with torch.no_grad(), run.precision.eval_context(state.plain_model):
                loss = loss_of(state, inputs, target)
        except RunnerError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = batch_errors.BatchFailure(
                error, state.plain_model, run.task, run.precision, names, inputs, target, outputs
            )
            raise ConfigError(
                f"{batch_errors.explain_batch_error(failure)} {run.save_traceback()}"
            ) from error
    if problem := batch_errors.loss_problem(loss, names["task"]):
        raise ConfigError(problem)


def weights_are_finite(run: RunContext, state: TrainState) -> bool:
    """Return whether all weights are finite; others must not replace a good checkpoint."""
    # Parameters only: a buffer may be a mask, which holds infinities.
    every = [p.detach() for p in state.plain_model.parameters()]
    params = state.strategy.local_shards(every)
    floats = [p for p in params if p.itemsize > 1 and (p.is_floating_point() or p.is_complex())]
    if not floats or bool(torch.stack([t.isfinite().all().cpu() for t in floats]).all()):
        return True
    run.say(f"warning: the weights of step {state.step} are not finite and are not saved.")
    return False


def last_checkpoint_hint(folder: Path) -> str:
    """Return a line that names the newest checkpoint; empty without one."""
    paths = sorted(folder.glob("step-*.pt"))
    return f"\nThe last good weights: init.weights={relative_path(paths[-1])}" if paths else ""


def raise_diverged(run: RunContext, result: RunResult, problems: Sequence[str]) -> NoReturn:
    """End a run that a guard stopped; its result holds what it reached until then.

    Args:
        run: the run.
        result: of the run.
        problems: the guard's message, and files that could not be written.

    Raises:
        Diverged: with the problems.
    """
    message = "\n".join(problems)
    failed = replace(result, status="failed", error=message, diverged=True)
    run.save_artifact(run.out / RESULT, lambda _: failed.write(run.out))
    raise Diverged(message)


@contextmanager
def explain_data_errors(
    run: RunContext, state: TrainState, loaders: tuple[Loader, Loader]
) -> Iterator[None]:
    """Return the context around the training loop, which explains errors that it knows.

    These are labels outside the classes, loading processes that die, operations that the precision
    lacks and losses without a gradient. The traceback goes to error.txt.

    Raises:
        DataError: in place of what the data causes.
        ConfigError: in place of what the precision or a missing gradient causes in the first step.
        ModelError: in place of what the precision causes after steps have been trained.
    """
    begun = state.step
    try:
        yield
    except RunnerError:
        raise
    except Exception as error:
        run.signals.check()  # an interrupt reaches the processes that load data, too
        if batch_errors.is_loss_independent_of_weights(error):
            reason = _no_gradient(state, loaders[1])
            raise ConfigError(f"{reason} {run.save_traceback()}") from error
        if advice := precision_advice(error, state.plain_model, run.precision):
            kind = ConfigError if state.step <= begun + 1 else ModelError
            reason = _failing_step(run, state, error)
            raise kind(f"{reason} {advice} {run.save_traceback()}") from error
        explanation = _explain(run, state, loaders, error)
        if explanation is None:
            raise
        raise DataError(f"{explanation}\n{run.save_traceback()}".rstrip()) from error


def _failing_step(run: RunContext, state: TrainState, error: Exception) -> str:
    """Return a sentence with the step that failed and the error's own text."""
    model = run.origin.option_name("model", run.spec.model)
    when = "step" if state.model.training else "the evaluation after step"
    text = str(error).strip().rstrip(".")
    return (
        f"model={model} fails in {when} {state.step} with precision={run.precision.name}: "
        f"{type(error).__name__}: {text}."
    )


def _no_gradient(state: TrainState, loader: Loader) -> str:
    """Return why the loss has no gradient, from one more forward that changes nothing."""
    inputs, _ = next(loader.epoch(0))
    state.model.eval()

    def call() -> Any:
        with state.precision.forward(state.device):
            return state.plain_model(state.precision.cast(inputs))

    return batch_errors.gradient_problem(state.plain_model, call)


@contextmanager
def _explain_dead_workers(run: RunContext, split: str) -> Iterator[None]:
    """Return the context around a check of a split, in which a dead worker is a DataError."""
    try:
        yield
    except Exception as error:
        reason = worker_failure(error)
        if reason is None:
            raise
        text = _worker_message(reason, f"the {split} set's first batches")
        raise DataError(f"{text}\n{run.save_traceback()}".rstrip()) from error


def _explain(
    run: RunContext, state: TrainState, loaders: tuple[Loader, Loader], error: Exception
) -> str | None:
    """Return what an error of the loop means; None for one that the data does not cause."""
    training, step, text = state.model.training, state.step, str(error)
    if reason := worker_failure(error):
        if not training:
            return _worker_message(reason, "the val set")
        return _explain_dead_worker(run, loaders[0], step, reason, error)
    if _LABEL.search(text) or _INDEX in text:
        steps = [step] if training else None
        return _label_out_of_range(run, loaders[not training], text, steps)
    if _ASSERT in text:
        # A GPU reports it late, and the host reads records at most two blocks after the device.
        first = max(1, step - 2 * run.spec.train.log_every)
        return _label_out_of_range(run, loaders[0], text, range(first, step + 1))
    return None


def _explain_dead_worker(
    run: RunContext, loader: Loader, step: int, reason: str, error: Exception
) -> str:
    """Return which steps a training worker may have been loading, and save their samples."""
    if is_dataset_error(error):
        ahead = 1  # it raised: the batch is the next one
    else:
        # It was killed: any batch that the workers load in advance may be the cause.
        ahead = -(-PREFETCH * loader.workers // run.spec.train.accumulate)
    steps = f"step {step + 1}" if ahead == 1 else f"steps {step + 1} to {step + ahead}"
    text = _worker_message(reason, f"the train set for {steps}")
    return f"{text}\n{_batch_saver(run, loader).save(step + 1, reason, count=ahead)}"


def _worker_message(reason: str, what: str) -> str:
    """Return a message for a process that loads data and died or raised."""
    return (
        f"A process that loads {what} failed: {reason}.\n"
        "Try train.num_workers=0 to see it in the main process, or fewer processes where memory "
        "ran out."
    )


def _label_out_of_range(
    run: RunContext, loader: Loader, text: str, steps: Sequence[int] | None
) -> str:
    """Return a message for a label or token that the model has no output or embedding for.

    Args:
        run: the run.
        loader: whose samples hold it.
        text: of the error.
        steps: of the training that may hold it; None in the evaluation.
    """
    reason = text.splitlines()[0].rstrip(".")
    if steps is None:
        sample = _first_bad_sample(run, loader, range(loader.examples))
        return f"In the evaluation: {reason}.{sample}"
    accumulate = run.spec.train.accumulate
    samples = [i for step in steps for i in samples_of_step(loader, accumulate, step).indices]
    at = f"step {steps[0]}" if len(steps) == 1 else f"one of steps {steps[0]} to {steps[-1]}"
    message = f"At {at}: {reason}.{_first_bad_sample(run, loader, samples)}"
    return f"{message}\n{_batch_saver(run, loader).save(steps[0], message, count=len(steps))}"


def _first_bad_sample(run: RunContext, loader: Loader, samples: Sequence[int]) -> str:
    """Return a sentence with the first sample whose label is no class; empty for none."""
    classes = (run.spec.data.get("meta") or {}).get("classes")
    if not classes:
        return " Labels go from 0 to the number of the model's outputs less one."
    with suppress(Exception):  # an error of the explanation must not hide the one it explains
        for part in torch.tensor(samples).split(loader.batch_size):
            target = targets_of_samples(loader.dataset, part.tolist())
            wrong = run.task.misplaced(target, classes)
            if wrong is not None and wrong.any():
                first = int(wrong.nonzero()[0])
                return f" Sample {int(part[first])}: {label_problem(target[first], classes)}"
    return ""


def _batch_saver(run: RunContext, loader: Loader) -> BatchSaver:
    return BatchSaver(run.spec, run.origin, run.out, run.precision.name, loader, run.save_artifact)
