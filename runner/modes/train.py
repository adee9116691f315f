"""mode=train: load the data, build the model and its optimizers, train, and save the model.

The tracker is open already; run.py closes it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import torch

from runner.config.python_objects import current_objects
from runner.core import (
    ConfigError,
    LoadedCheckpoint,
    RunContext,
    RunResult,
    TrainState,
    errors,
    fmt,
    layout,
    random_streams,
    run_context,
    run_result,
    tensor_facts,
    training_loop,
)
from runner.data.build import RunLoaders
from runner.data.splits import set_labels
from runner.diagnostics.data_checks import checked_losses
from runner.modes.execution import build_proven_model, build_result, starting_model
from runner.modes.startup import (
    check_evaluation,
    check_strategy,
    describe_model,
    describe_optimizers,
    prepare_loaders,
    try_batch,
    watched_casts,
)
from runner.modes.training_callbacks import TrainingCallbacks
from runner.modes.training_errors import TrainingErrors
from runner.modes.training_outputs import (
    FirstStep,
    check_model_folders,
    make_evaluation_hook,
    save_dtypes,
    save_loss_scale,
    save_model,
    save_processes,
    save_weights,
    wants_weights,
)
from runner.precision.gradient_hooks import watch_gradient_calls
from runner.tracking.result_table import print_result
from runner.training.compile import check_compile_options, prepare_model
from runner.training.setup import build_state
from runner.training.state_dict import starting_point

if TYPE_CHECKING:
    from runner.training.evaluation_hook import EvaluationHook

_UNMEASURED = nullcontext()


def train(run: RunContext, resumed: LoadedCheckpoint | None) -> run_context.RunOutcome:
    """Train a run from its start or from a checkpoint.

    Args:
        run: its parts.
        resumed: the checkpoint to continue from; None for a run that starts.

    Raises:
        ConfigError: data, model, optimizer and task do not fit together.
        Diverged: a guard stopped the run.
        CheckpointError: the run finished, and its weights could not be written.
    """
    spec = run.spec
    start = perf_counter()
    # Until the loop runs there is nothing to save, so a signal ends the set-up at once.
    with run.signals.interruptible():
        loaders = prepare_loaders(run, resumed)
        loaders.train.start = starting_point(resumed)
        make = starting_model(run.setup, resumed, loaders)
        built = build_proven_model(run.setup, make, lambda: next(loaders.val.epoch(0))[0])
        check_compile_options(spec, run.precision, run.device, built.model)
        check_model_folders(run, built.model)
    with run.precision.session(built.model, run.device):
        with run.signals.interruptible():
            sizes = describe_model(run, built)
            steps = training_loop.total_steps(spec.train, loaders.train)
            state = build_state(run.setup, built.model, steps, built.plan)
            check_strategy(state, spec)
            describe_optimizers(run, state, steps)
            if not run.strategy.rank.is_main:
                # The weights are equal in all processes, dropout must not be. 2**40 apart: no seed
                # that somebody types for another run is a process's seed of this one.
                random_streams.seed_all(spec.seed + run.strategy.rank.index * 2**40)
            run.begin_steps(state, lambda: next(loaders.train.epoch(0)))
            try_batch(run, state, loaders.val)
            hook = make_evaluation_hook(run, state)
            check_evaluation(run, state, loaders.validation, hook)
        first_step = FirstStep(run, state, built.report)
        callbacks = _train_loop(run, state, loaders, resumed, first_step, hook)
        unsaved = _save_weights(run, callbacks)
        # After the last checkpoint: the message names the newest one.
        failure = callbacks.failure_message
        report = first_step.report  # the first step may have proven more layers
        save_dtypes(run, first_step.probe, report)
        save_loss_scale(run, callbacks.summary, state.step)
        summary = callbacks.summary.result_values()
        if not failure:
            summary["metrics"] = summary["metrics"] | _test_metrics(run, state, loaders, hook)
        # Taken before the export, which has a peak of its own.
        sizes["peak_memory_mib"] = save_processes(run, summary)
        if not failure:
            save_model(run, state, loaders.val)
        # The step for whose numbers a guard stopped the run; None where the hardware is at fault.
        stopped_step = callbacks.guard.stopped_step if failure else None
        stopped_by = "" if failure else callbacks.early_end
        if resumed or stopped_by:
            run.tracker.tags({"stopped_by": stopped_by})
        optimizer_bytes = tensor_facts.tensor_bytes(*state.optimizer_tensors())
        sizes |= report.tags() | first_step.computation
        sizes |= {
            "diverged": stopped_step is not None,
            "diverged_step": stopped_step,
            "planned_steps": steps,
            "stopped_by": stopped_by,
            "optimizer_mib": optimizer_bytes / tensor_facts.MIB,
        }
    result = build_result(run, sizes | summary, perf_counter() - start)
    _check_end(run, result, failure, unsaved)
    return run_context.RunOutcome(result, report)


def _check_end(run: RunContext, result: RunResult, failure: str, unsaved: list[str]) -> None:
    """Write the result of a run that a guard stopped, or whose weights could not be written.

    Raises:
        Diverged: a guard stopped the run.
        CheckpointError: weights were not written; the run's table is printed first.
    """
    if not (failure or unsaved):
        return
    kind = errors.Diverged if failure else errors.CheckpointError
    error = kind("\n".join(filter(None, [failure, *unsaved])))
    failed = replace(result, status="failed", error=str(error))
    run.save_artifact(run.out / layout.RESULT, lambda _: failed.write(run.out))
    if isinstance(error, errors.CheckpointError):
        print_result(run.console, failed)
        error.finished = True
    raise error


def _train_loop(
    run: RunContext,
    state: TrainState,
    loaders: RunLoaders,
    resumed: LoadedCheckpoint | None,
    first_step: FirstStep,
    evaluation: "EvaluationHook | None",
) -> TrainingCallbacks:
    """Train with every callback reading the records; return the callbacks."""
    spec = run.spec
    if spec.train.compile:  # compiled modules do not show their dtypes to the probe
        with run.signals.interruptible(), first_step.probe:
            try_batch(run, state, loaders.val, says_layout=False)
    prepare_model(spec, run.precision, run.device, state.plain_model)
    start_step = resumed.content["step"] if resumed else 0
    callbacks = TrainingCallbacks(run, state, loaders.train, start_step)
    if resumed is not None:
        messages = callbacks.restore(resumed)
        planned = callbacks.planned_steps
        run.say(f"resumed at step {state.step} of {planned}: {resumed.path}")
        for line in messages:
            run.say(line)
    hooks = training_loop.LoopHooks(
        flush_every=spec.checkpoint.every_steps,
        should_stop=run.stop_requested,
        should_finish=callbacks.should_finish,
        step_context=_step_contexts(run, callbacks, first_step),
        evaluation=evaluation,
        gauges=first_step.loads.gauges,
    )
    records = training_loop.fit(state, loaders.train, loaders.validation, spec.train, hooks)
    hook_error = None
    try:
        evaluated = set_labels("val", loaders.validation)
        with TrainingErrors(run, state, loaders.train, evaluated).explain():
            for record in records:
                callbacks.dispatch(record)
                if callbacks.should_stop():
                    break
            callbacks.end()
    except errors.HookError as error:
        hook_error = error
    finally:
        callbacks.close()
        loaders.close()
        first_step.loads.close()
    if hook_error is not None:
        _raise_with_checkpoint(run, callbacks, hook_error)
    # A signal that reached one process stops all of them.
    run.signals.record_remote_signal(run.strategy.all_reduce_max(run.signals.number or 0))
    return callbacks


def _test_metrics(
    run: RunContext, state: TrainState, loaders: RunLoaders, hook: "EvaluationHook | None"
) -> dict[str, float]:
    """Evaluate the test sets on the weights as they are, and log their metrics.

    Returns:
        The metrics; empty without a test set, and where the run is asked to stop, for a resumed run
        evaluates them at its end.
    """
    if not loaders.test or run.stop_requested():
        return {}
    evaluated = set_labels("test", loaders.test)
    try:
        with TrainingErrors(run, state, loaders.train, evaluated).explain():
            metrics = training_loop.evaluate_sets(
                "test", state, loaders.test, run.stop_requested, hook
            )
    finally:
        loaders.close()
    if metrics is None:
        return {}
    run.tracker.log_metrics([(state.step, fmt.now_ms(), metrics)])
    shown = [f"{name} {fmt.format_number(value)}" for name, value in metrics.items()]
    run.say("  ".join(["test", *shown]))
    return metrics


def _save_weights(run: RunContext, callbacks: TrainingCallbacks) -> list[str]:
    """Write the last checkpoint and the safetensors file; return why one was not written."""
    spec = run.spec
    unsaved: list[str] = []
    if spec.checkpoint.final or run.signals.is_stop_requested():
        path = None
        try:
            path = callbacks.save_last()
        except errors.CheckpointError as error:
            unsaved.append(str(error))
        is_out_of_time = callbacks.early_end == run_result.TIME_LIMIT
        if path and (is_out_of_time or run.signals.is_stop_requested()):
            run.say(f"checkpoint: {path}")
            if run.invocation.sweep is None:  # a sweep is resumed as a whole
                run.say(f"Resume with: {run.invocation.resume_text(run.out)}")
    # All processes ask, and agree.
    if wants_weights(run, callbacks.state) and callbacks.weights_are_valid():
        unsaved += save_weights(run, callbacks.state)
    return unsaved


def _raise_with_checkpoint(
    run: RunContext, callbacks: TrainingCallbacks, error: errors.HookError
) -> NoReturn:
    """End a run whose hook failed, after a checkpoint from which it can be resumed.

    Raises:
        HookError: with the command that resumes.
    """
    message = str(error)
    try:
        path = callbacks.save_last()
    except errors.CheckpointError as unsaved:
        raise errors.HookError(f"{message} {unsaved}") from error
    if path is not None:
        message += f" The state is in {fmt.relative_path(path)}."
        if run.invocation.sweep is None:  # a sweep is resumed as a whole
            message += f" Resume with: {run.invocation.resume_text(run.out)}"
    raise errors.HookError(message) from error


def _refuse_gradients_of_original() -> AbstractContextManager[object]:
    """Return the context of a step of a model that may be a copy of a module that was given.

    A backward within the context raises a ConfigError where it reaches the module that was given.
    """
    given = current_objects().by_role.get("model")

    def refuse(_: torch.Tensor) -> NoReturn:
        raise ConfigError(
            f"model={type(given).__name__} cannot be copied: a forward, a hook or the loss uses "
            "the module that was given, by a global or another object. Give a function that "
            "builds it, as in model=lambda: Net()."
        )

    weights = given.parameters() if isinstance(given, torch.nn.Module) else ()
    weights = [p for p in weights if not torch.nn.parameter.is_lazy(p)]
    return torch.autograd.graph.register_multi_grad_hook(weights, refuse, mode="any")


@contextmanager
def _together(contexts: list[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def _step_contexts(
    run: RunContext, callbacks: TrainingCallbacks, first_step: FirstStep
) -> Callable[[int], AbstractContextManager[object]]:
    """Return the function that makes the context around a step.

    The first step is watched, and every step for which a callback has a context.
    """
    spec = run.spec
    first = callbacks.state.step + 1
    state = callbacks.state
    own_state = callbacks.own_state
    # What is compiled does not run a mode of torch's.
    compiles = spec.train.compile

    @contextmanager
    def around_first(measured: AbstractContextManager[object]) -> Iterator[None]:
        # A signal ends it at once: it may compile for minutes, with nothing to save before it.
        watches: list[AbstractContextManager[object]] = []
        if not compiles:
            if state.scale.value is not None:
                watches.append(watch_gradient_calls(run.say))
            watches.append(watched_casts(run, state))
        given = _refuse_gradients_of_original()
        with (
            run.signals.interruptible(),
            given,
            checked_losses(run.task),
            first_step.probe,
            first_step.watch(),
            _together([*watches, measured]),
        ):
            yield
        # The step shows what has a gradient, and what a model returns in training mode alone.
        for loss, weight in state.loss_weights.items():
            run.say(
                f"training adds {weight:g} times the {loss} that the model returns to the task's "
                "loss; val/loss is without it"
            )
        own_state.end_first_step()
        callbacks.name_untrained()
        first_step.describe()

    @contextmanager
    def around_second(measured: AbstractContextManager[object]) -> Iterator[None]:
        with _UNMEASURED if compiles else own_state.watched_reads(), measured:
            yield
        remedy = "" if compiles else run.precision.update_remedy
        warning = own_state.end_second_step(remedy)
        if warning:
            run.say(warning)

    contexts = {first: around_first, first + 1: around_second}

    def around(step: int) -> AbstractContextManager[object]:
        every = callbacks.callbacks
        found = [made for each in every if (made := each.around_step(step)) is not None]
        measured = _together(found) if found else _UNMEASURED
        return contexts[step](measured) if step in contexts else measured

    return around
