"""The body of a training run, between the tracker's open and close."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter

from runner.data.build import build_loaders, build_splits
from runner.data.loader import Loader
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.diagnostics.memory.limits import memory_limit
from runner.modes.context import RunContext, build_result, prepare_process
from runner.modes.failures import (
    check_data,
    explain_data_errors,
    raise_diverged,
    require_single_process,
    try_batch,
)
from runner.modes.model_summary import describe_model
from runner.modes.result import RunResult
from runner.modes.run_artifacts import (
    log_data_sets,
    log_workers,
    raise_unsaved_weights,
    save_dtypes,
    save_loss_scale,
    save_model,
    save_processes,
    save_weights,
)
from runner.modes.training_callbacks import TrainingCallbacks
from runner.modes.trial_forward import first_step, prove_conversion
from runner.training.callbacks.callback import dispatch
from runner.training.callbacks.summary import RunSummary
from runner.training.compile import check_compile_options, prepare_model
from runner.training.loop import fit, total_steps
from runner.training.setup import TrainingSetup, build_state, model_builder
from runner.training.state import TrainState
from runner.utils.errors import CheckpointError
from runner.utils.reproducibility import seed_all
from runner.utils.tensors import MIB, stored_bytes, tensor_bytes
from runner.utils.terminal import quote_command

_UNWATCHED = nullcontext()


def train(this: RunContext) -> RunResult:
    """Data, model, optimizer, then the loop. Raises ConfigError where they do not fit together."""
    spec, strategy, started = this.spec, this.strategy, perf_counter()
    with this.signals.at_once():
        loaders = _loaders(this)
        make = model_builder(spec, this.precision, this.device, this.resumed)
        built = prove_conversion(this, make, loaders[1])
        check_compile_options(spec, this.precision, this.device, built.model)
    with this.precision.session(built.model, this.device):
        with this.signals.at_once():
            sizes = describe_model(this, built)
            steps = total_steps(spec.train, loaders[0])
            setup = TrainingSetup(spec, this.precision, this.task, this.device, strategy)
            state = build_state(setup, built.model, steps)
            require_single_process(state, spec.train)
            _part_streams(this)
            this.state, this.loader = state, loaders[0]
            this.other = memory_limit(this.device)[0] - stored_bytes(state.model)
            try_batch(this, state, loaders[1])
        tally = _loop(this, state, loaders, steps)
        sizes["peak_memory_mib"] = save_processes(this, tally.summary())  # the export has its own
        if not this.trouble:
            save_model(this, state, loaders[1])
        sizes["planned_steps"] = steps
        sizes |= this.report.tags()  # the first step may have proven more layers
        sizes["optimizer_mib"] = tensor_bytes(*state.optimizer_tensors()) / MIB
    result = build_result(this, sizes | tally.summary(), perf_counter() - started)
    if this.trouble:
        raise_diverged(this, result)
    if this.lost:
        raise_unsaved_weights(this, result)
    return result


def _loaders(this: RunContext) -> tuple[Loader, Loader]:
    """Training and validation batches; told, looked at, and the seed set for the model."""
    prepare_process(this)
    splits = build_splits(this.spec)
    place = this.strategy.place
    loaders = build_loaders(this.spec, splits, this.device, place)
    if place.world_size == 1:  # else the others would not know that a wait was cut
        for loader in loaders:
            loader.wait_context = this.signals.at_once
    log_data_sets(this, splits)
    log_workers(this, loaders[0])
    check_data(this, loaders)
    seed_all(this.spec.seed)
    return loaders


def _loop(
    this: RunContext, state: TrainState, loaders: tuple[Loader, Loader], steps: int
) -> RunSummary:
    """Train, with every observer reading along; leaves a checkpoint however it ends."""
    spec, probe = this.spec, DtypeProbe(state.model)
    if spec.train.compile:  # what is compiled shows nothing
        with this.signals.at_once(), probe:
            try_batch(this, state, loaders[1])
    prepare_model(spec, this.precision, this.device, state.plain_model)
    course = TrainingCallbacks(this, state, loaders[0])
    if this.resumed is not None:
        told = course.restore(this.resumed)
        this.say(f"resumed at step {state.step} of {steps}: {this.resumed.path}")
        for line in told:
            this.say(line)
    records = fit(
        state,
        *loaders,
        spec.train,
        around=_around(this, course, probe),
        flush_every=spec.checkpoint.every_steps,
        stopped=this.stopping,
    )
    try:
        with explain_data_errors(this, state, loaders):
            for record in records:
                dispatch(course.observers, record)
                if course.over:
                    break
    finally:
        course.close()
        for loader in loaders:
            loader.close()
    this.signals.adopt(this.strategy.all_reduce_max(this.signals.number or 0))
    if spec.checkpoint.final or this.signals.requested():
        path = _save_last(this, course)
        if this.signals.requested() and path:
            this.say(f"checkpoint: {path}")
            if this.origin.sweep is None:  # a sweep goes on as a whole
                this.say(f"to go on: {quote_command(this.origin.resume_command(this.out))}")
    if spec.checkpoint.safetensors and course.sound():
        save_weights(this, state)
    this.trouble = course.trouble
    save_dtypes(this, probe)
    save_loss_scale(this, course.tally, state.step)
    return course.tally


def _save_last(this: RunContext, course: TrainingCallbacks) -> Path | None:
    """The last checkpoint; None where there is none, and this.lost says why it was not written."""
    try:
        return course.save_last()
    except CheckpointError as error:
        this.lost.append(str(error))
        return None


def _part_streams(this: RunContext) -> None:
    """What the processes draw at random from here on differs; their weights are alike."""
    if not this.strategy.place.is_main:
        seed_all(this.spec.seed + this.strategy.place.rank * 2**40)


def _around(
    this: RunContext, course: TrainingCallbacks, probe: DtypeProbe
) -> Callable[[int], AbstractContextManager[object]]:
    """The context around each step: the first one is watched, and those that numbers are due of."""
    first, looks = course.state.step + 1, course.looks

    def around(step: int) -> AbstractContextManager[object]:
        due = looks.at(step) if looks else _UNWATCHED
        return _first(this, course, probe, due) if step == first else due

    return around


@contextmanager
def _first(
    this: RunContext,
    course: TrainingCallbacks,
    probe: DtypeProbe,
    due: AbstractContextManager[object],
) -> Iterator[None]:
    """Context around the first step, which may compile for minutes and has nothing to save."""
    with this.signals.at_once(), probe, first_step(this, course.state.plain_model), due:
        yield
