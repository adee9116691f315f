"""The body of a training run, between the tracker's open and close."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

from runner.data.build import build_loaders, build_splits
from runner.data.loader import Loader
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.diagnostics.memory.limits import limit
from runner.modes.context import Run, prepare, result_of
from runner.modes.failures import alone_only, check_data, diverged, mishaps, try_batch
from runner.modes.model_summary import describe
from runner.modes.result import RunResult
from runner.modes.run_artifacts import (
    leave_dtypes,
    leave_loss_scale,
    leave_model,
    leave_processes,
    leave_weights,
    tell_inputs,
    tell_workers,
    unsaved,
)
from runner.modes.training_callbacks import Course
from runner.modes.trial_forward import first_step, prove
from runner.training.callbacks.callback import tell
from runner.training.callbacks.summary import Tally
from runner.training.compile import check_shape, shape
from runner.training.loop import fit, total_steps
from runner.training.model import build_model, start
from runner.training.optimizers import build_driven
from runner.training.state import TrainState
from runner.utils.errors import CheckpointError
from runner.utils.reproducibility import seed_all
from runner.utils.tensors import MIB, stored_bytes, tensor_bytes
from runner.utils.terminal import typed

_UNWATCHED = nullcontext()


def train(this: Run) -> RunResult:
    """Data, model, optimizer, then the loop. Raises ConfigError where they do not fit together."""
    spec, strategy, started = this.spec, this.strategy, perf_counter()
    with this.signals.at_once():
        loaders = _loaders(this)
        make = partial(
            build_model, spec, this.precision, this.device, start=this.resumed or start(spec),
            whole=this.resumed is not None,
        )  # fmt: skip
        built = prove(this, make, loaders[1])
        check_shape(spec, this.precision, this.device, built.model)
    with this.precision.session(built.model, this.device):
        with this.signals.at_once():
            sizes = describe(this, built)
            steps = total_steps(spec.train, loaders[0])
            model = strategy.wrap(built.model, this.device)
            state = TrainState(
                model, this.precision, this.task, this.precision.scale(this.device),
                build_driven(spec, built.model, this.precision, steps), this.device,
                spec.train.clip_norm, strategy,
            )  # fmt: skip
            alone_only(state, spec.train)
            _part_streams(this)
            this.state, this.loader = state, loaders[0]
            this.other = limit(this.device)[0] - stored_bytes(state.model)
            try_batch(this, state, loaders[1])
        tally = _loop(this, state, loaders, steps)
        sizes["peak_memory_mib"] = leave_processes(this, tally.summary())  # the export has its own
        if not this.trouble:
            leave_model(this, state, loaders[1])
        sizes["planned_steps"] = steps
        sizes |= this.report.tags()  # the first step may have proven more layers
        sizes["optimizer_mib"] = tensor_bytes(*state.state_tensors()) / MIB
    result = result_of(this, sizes | tally.summary(), perf_counter() - started)
    if this.trouble:
        diverged(this, result)
    if this.lost:
        unsaved(this, result)
    return result


def _loaders(this: Run) -> tuple[Loader, Loader]:
    """Training and validation batches; told, looked at, and the seed set for the model."""
    prepare(this)
    splits = build_splits(this.spec)
    place = this.strategy.place
    loaders = build_loaders(this.spec, splits, this.device, place)
    if place.world == 1:  # else the others would not know that a wait was cut
        for loader in loaders:
            loader.waiting = this.signals.at_once
    tell_inputs(this, splits)
    tell_workers(this, loaders[0])
    check_data(this, loaders)
    seed_all(this.spec.seed)
    return loaders


def _loop(this: Run, state: TrainState, loaders: tuple[Loader, Loader], steps: int) -> Tally:
    """Train, with every observer reading along; leaves a checkpoint however it ends."""
    spec, probe = this.spec, DtypeProbe(state.model)
    if spec.train.compile:  # what is compiled shows nothing
        with this.signals.at_once(), probe:
            try_batch(this, state, loaders[1])
    shape(spec, this.precision, this.device, state.plain_model)
    course = Course(this, state, loaders[0])
    if this.resumed is not None:
        told = course.restore(this.resumed)
        this.say(f"resumed at step {state.step} of {steps}: {this.resumed.path}")
        for line in told:
            this.say(line)
    records = fit(
        state, *loaders, spec.train, around=_around(this, course, probe),
        flush_every=spec.checkpoint.every_steps, stopped=this.stopping,
    )  # fmt: skip
    try:
        with mishaps(this, state, loaders):
            for record in records:
                tell(course.observers, record)
                if course.over:
                    break
    finally:
        course.close()
        for loader in loaders:
            loader.close()
    this.signals.adopt(this.strategy.agreed(this.signals.number or 0))
    if spec.checkpoint.final or this.signals.requested():
        path = _save_last(this, course)
        if this.signals.requested() and path:
            this.say(f"checkpoint: {path}")
            if this.origin.sweep is None:  # a sweep goes on as a whole
                this.say(f"to go on: {typed(this.origin.resuming(this.out))}")
    if spec.checkpoint.safetensors and course.sound():
        leave_weights(this, state)
    this.trouble = course.trouble
    leave_dtypes(this, probe)
    leave_loss_scale(this, course.tally, state.step)
    return course.tally


def _save_last(this: Run, course: Course) -> Path | None:
    """The last checkpoint; None where there is none, and this.lost says why it was not written."""
    try:
        return course.save_last()
    except CheckpointError as error:
        this.lost.append(str(error))
        return None


def _part_streams(this: Run) -> None:
    """What the processes draw at random from here on differs; their weights are alike."""
    if not this.strategy.place.first:
        seed_all(this.spec.seed + this.strategy.place.rank * 2**40)


def _around(
    this: Run, course: Course, probe: DtypeProbe
) -> Callable[[int], AbstractContextManager[object]]:
    """The context around each step: the first one is watched, and those that numbers are due of."""
    first, looks = course.state.step + 1, course.looks

    def around(step: int) -> AbstractContextManager[object]:
        due = looks.at(step) if looks else _UNWATCHED
        return _first(this, course, probe, due) if step == first else due

    return around


@contextmanager
def _first(
    this: Run, course: Course, probe: DtypeProbe, due: AbstractContextManager[object]
) -> Iterator[None]:
    """Context around the first step, which may compile for minutes and has nothing to save."""
    with this.signals.at_once(), probe, first_step(this, course.state.plain_model), due:
        yield
