"""mode=train: load the data, build the model and its optimizers, train, and save the model.

The tracker is open already; run.py closes it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import NamedTuple, NoReturn

from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.data.build import RunLoaders, build_data, build_run_loaders
from runner.data.splits import set_labels
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.diagnostics.memory.out_of_memory import MemoryWatch
from runner.modes.context import RunContext, RunOutcome, build_result, prepare_process
from runner.modes.model_folders import (
    check_model_folders,
    save_model_folders,
    wants_model_folders,
)
from runner.modes.startup_checks import (
    check_data,
    check_evaluation,
    check_strategy,
    check_stream,
    try_batch,
)
from runner.modes.startup_report import (
    describe_model,
    describe_optimizers,
    log_data_sets,
    log_loading,
)
from runner.modes.training_callbacks import TrainingCallbacks
from runner.modes.training_errors import explain_training_errors, raise_diverged
from runner.modes.training_outputs import (
    raise_unsaved_weights,
    save_dtypes,
    save_loss_scale,
    save_model,
    save_processes,
    save_weights,
    set_evaluation_hook,
)
from runner.modes.trial_forward import FirstStepProof, prove_conversion
from runner.precision.conversion import ConversionReport
from runner.training.callbacks.callback import dispatch
from runner.training.callbacks.own_callback import RunCallback
from runner.training.callbacks.summary import RunSummary
from runner.training.compile import check_compile_options, prepare_model
from runner.training.evaluation import evaluate_test
from runner.training.loop import fit, total_steps
from runner.training.records import Record
from runner.training.setup import TrainingSetup, build_state, model_builder
from runner.training.state import TrainState
from runner.utils.errors import CheckpointError, HookError
from runner.utils.formatting import format_number, now_ms, relative_path
from runner.utils.reproducibility import seed_all
from runner.utils.tensors import MIB, tensor_bytes

_UNMEASURED = nullcontext()


class LoopOutcome(NamedTuple):
    """What the training loop returns.

    Attributes:
        summary: best, last and speed of the training.
        report: the conversion, with the layers that the first step proved.
        failure: why a guard stopped the training; empty where none did.
        diverged_step: the step for whose numbers it did; None where it did not.
        unsaved: why files with weights could not be written, a sentence each.
    """

    summary: RunSummary
    report: ConversionReport
    failure: str
    diverged_step: int | None
    unsaved: list[str]


def train(
    run: RunContext,
    resumed: LoadedCheckpoint | None,
    memory: MemoryWatch,
    own_callbacks: Mapping[str, RunCallback] = {},
) -> RunOutcome:
    """Train a run from its start or from a checkpoint.

    Args:
        run: its parts.
        resumed: the checkpoint to continue from; None for a run that starts.
        memory: explains an allocator's error; it is given the state before the first step.
        own_callbacks: the user's, by their names; empty in other processes than the main one.

    Raises:
        ConfigError: data, model, optimizer and task do not fit together.
        Diverged: a guard stopped the run.
        CheckpointError: the run finished, and its weights could not be written.
    """
    spec = run.spec
    start = perf_counter()
    # Until the loop runs there is nothing to save, so a signal ends the set-up at once.
    with run.signals.interruptible():
        loaders = _loaders(run)
        make = model_builder(spec, run.precision, run.device, resumed, run.strategy)
        built = prove_conversion(run, make, loaders.val)
        check_compile_options(spec, run.precision, run.device, built.model)
        check_model_folders(run, built.model)
    with run.precision.session(built.model, run.device):
        with run.signals.interruptible():
            sizes = describe_model(run, built)
            steps = total_steps(spec.train, loaders.train)
            setup = TrainingSetup(spec, run.precision, run.task, run.device, run.strategy)
            state = build_state(setup, built.model, steps)
            check_strategy(state, spec.train)
            describe_optimizers(run, state, steps)
            _separate_random_streams(run)
            memory.begin_steps(state, loaders.train)
            try_batch(run, state, loaders.val)
            hook = set_evaluation_hook(run, state)
            check_evaluation(run, state, loaders.validation, hook)
        proof = FirstStepProof(run, state, built.report)
        outcome = _train_loop(run, state, loaders, resumed, proof, own_callbacks)
        summary = outcome.summary.result_values()
        if not outcome.failure:
            summary["metrics"] = summary["metrics"] | _test_metrics(run, state, loaders)
        # Taken before the export, which has a peak of its own.
        sizes["peak_memory_mib"] = save_processes(run, summary)
        if not outcome.failure:
            save_model(run, state, loaders.val)
        sizes["planned_steps"] = steps
        sizes |= outcome.report.tags()  # the first step may have proven more layers
        sizes["optimizer_mib"] = tensor_bytes(*state.optimizer_tensors()) / MIB
    result = build_result(run, sizes | summary, perf_counter() - start)
    if outcome.failure:
        raise_diverged(run, result, outcome.diverged_step, [outcome.failure, *outcome.unsaved])
    if outcome.unsaved:
        raise_unsaved_weights(run, result, outcome.unsaved)
    return RunOutcome(result, outcome.report)


def _loaders(run: RunContext) -> RunLoaders:
    """Build and check the loaders of all data sets; seed the generators for the model."""
    prepare_process(run)
    data = build_data(run.spec)
    place = run.strategy.place
    loaders = build_run_loaders(run.spec, data, run.device, place, run.task)
    if place.world_size == 1:  # else the others would not know that a wait was interrupted
        for loader in loaders.labelled.values():
            loader.wait_context = run.signals.interruptible
    log_data_sets(run, data)
    for label, loader in loaders.labelled.items():
        check_stream(run, label, loader)
    log_loading(run, loaders.train)
    check_data(run, loaders.labelled)
    # Again, after the data: the weights follow from the seed, whatever numbers a data set draws.
    seed_all(run.spec.seed)
    return loaders


def _train_loop(
    run: RunContext,
    state: TrainState,
    loaders: RunLoaders,
    resumed: LoadedCheckpoint | None,
    proof: FirstStepProof,
    own_callbacks: Mapping[str, RunCallback],
) -> LoopOutcome:
    """Train with every callback reading the records, and save the weights however it ends."""
    spec = run.spec
    probe = DtypeProbe(state.model)
    if spec.train.compile:  # compiled modules do not show their dtypes to the probe
        with run.signals.interruptible(), probe:
            try_batch(run, state, loaders.val, says_layout=False)
    prepare_model(spec, run.precision, run.device, state.plain_model)
    start_step = resumed.content["step"] if resumed else 0
    callbacks = TrainingCallbacks(run, state, loaders.train, start_step, own_callbacks)
    if resumed is not None:
        _restore(run, callbacks, resumed, total_steps(spec.train, loaders.train))
    records = fit(
        state,
        loaders.train,
        loaders.validation,
        spec.train,
        step_context=_step_contexts(run, callbacks, probe, proof),
        flush_every=spec.checkpoint.every_steps,
        should_stop=run.stop_requested,
        should_finish=callbacks.should_finish,
    )
    hook_error = None
    try:
        evaluated = set_labels("val", loaders.validation)
        with explain_training_errors(run, state, (loaders.train, evaluated)):
            _dispatch_records(records, callbacks)
    except HookError as error:
        hook_error = error
    finally:
        callbacks.close()
        loaders.close()
    if hook_error is not None:
        _raise_with_checkpoint(run, callbacks, hook_error)
    # A signal that reached one process stops all of them.
    run.signals.record_remote_signal(run.strategy.all_reduce_max(run.signals.number or 0))
    unsaved = _save_weights(run, callbacks)
    # After the last checkpoint: the message names the newest one.
    failure = callbacks.failure_message
    save_dtypes(run, probe, proof.report)
    save_loss_scale(run, callbacks.summary, state.step)
    return LoopOutcome(
        callbacks.summary, proof.report, failure, callbacks.guard.stopped_step, unsaved
    )


def _dispatch_records(records: Iterator[Record], callbacks: TrainingCallbacks) -> None:
    """Have every callback read the records, until the loop or a callback ends the training."""
    for record in records:
        dispatch(callbacks.callbacks, record)
        if callbacks.should_stop():
            break
    callbacks.end()


def _test_metrics(run: RunContext, state: TrainState, loaders: RunLoaders) -> dict[str, float]:
    """Evaluate the test sets on the weights as they are, and log their metrics.

    Returns:
        The metrics; empty without a test set, and where the run is asked to stop, for a resumed run
        evaluates them at its end.
    """
    if not loaders.test or run.stop_requested():
        return {}
    evaluated = set_labels("test", loaders.test)
    try:
        with explain_training_errors(run, state, (loaders.train, evaluated)):
            metrics = evaluate_test(state, loaders.test, run.stop_requested)
    finally:
        loaders.close()
    if metrics is None:
        return {}
    run.tracker.log_metrics([(state.step, now_ms(), metrics)])
    shown = [f"{name} {format_number(value)}" for name, value in metrics.items()]
    run.say("  ".join(["test", *shown]))
    return metrics


def _restore(
    run: RunContext, callbacks: TrainingCallbacks, resumed: LoadedCheckpoint, steps: int
) -> None:
    """Restore a checkpoint's state, and say from which step the run continues."""
    messages = callbacks.restore(resumed)
    run.say(f"resumed at step {callbacks.state.step} of {steps}: {resumed.path}")
    for line in messages:
        run.say(line)


def _save_weights(run: RunContext, callbacks: TrainingCallbacks) -> list[str]:
    """Write the last checkpoint and the safetensors file; return why one was not written."""
    spec = run.spec
    unsaved: list[str] = []
    if spec.checkpoint.final or run.signals.is_stop_requested():
        path = None
        try:
            path = callbacks.save_last()
        except CheckpointError as error:
            unsaved.append(str(error))
        if run.signals.is_stop_requested() and path:
            run.say(f"checkpoint: {path}")
            if run.origin.sweep is None:  # a sweep is resumed as a whole
                run.say(f"Resume with: {run.origin.resume_text(run.out)}")
    wants_folders = wants_model_folders(run, callbacks.state)
    wants_weights = spec.checkpoint.safetensors or wants_folders
    # All processes ask, and agree.
    if not wants_weights or not callbacks.weights_are_valid():
        return unsaved
    if spec.checkpoint.safetensors:
        problem = save_weights(run, callbacks.state)
        if problem:
            unsaved.append(problem)
    if wants_folders:
        unsaved += save_model_folders(run, callbacks.state)
    return unsaved


def _raise_with_checkpoint(
    run: RunContext, callbacks: TrainingCallbacks, error: HookError
) -> NoReturn:
    """End a run whose hook failed, after a checkpoint from which it can be resumed.

    Raises:
        HookError: with the command that resumes.
    """
    message = str(error)
    try:
        path = callbacks.save_last()
    except CheckpointError as unsaved:
        raise HookError(f"{message} {unsaved}") from error
    if path is not None:
        message += f" The state is in {relative_path(path)}."
        if run.origin.sweep is None:  # a sweep is resumed as a whole
            message += f" Resume with: {run.origin.resume_text(run.out)}"
    raise HookError(message) from error


def _separate_random_streams(run: RunContext) -> None:
    """Seed each process but the first anew: the weights are equal, dropout must not be."""
    if not run.strategy.place.is_main:
        # 2**40 apart: no seed that somebody types for another run is a process's seed of this one.
        seed_all(run.spec.seed + run.strategy.place.rank * 2**40)


def _step_contexts(
    run: RunContext, callbacks: TrainingCallbacks, probe: DtypeProbe, proof: FirstStepProof
) -> Callable[[int], AbstractContextManager[object]]:
    """Return the function that makes the context around a step.

    The first step is watched, and every step in which the tensors are to be measured.
    """
    first = callbacks.state.step + 1
    numerics = callbacks.numerics

    def around(step: int) -> AbstractContextManager[object]:
        measured = numerics.around_step(step) if numerics else _UNMEASURED
        return _first_step(run, probe, proof, measured) if step == first else measured

    return around


@contextmanager
def _first_step(
    run: RunContext,
    probe: DtypeProbe,
    proof: FirstStepProof,
    measured: AbstractContextManager[object],
) -> Iterator[None]:
    """Return the context around the first step, which a signal ends at once.

    It may compile for minutes, and there is nothing to save before it.
    """
    with run.signals.interruptible(), probe, proof.watch(), measured:
        yield
