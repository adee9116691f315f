"""The training loop: a generator of records. Only its caller can end it early."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from math import inf
from time import perf_counter, time

from runner.config.schema import TrainSpec
from runner.data.loader import Batch, Loader
from runner.training.evaluation import Stagnation, evaluate
from runner.training.record_buffer import RecordBuffer
from runner.training.records import EvalRecord, Record
from runner.training.state import TrainState
from runner.training.step import train_step
from runner.utils.reproducibility import host_rng_state, set_host_rng_state
from runner.utils.stop_signals import until_interrupted

_UNWATCHED = nullcontext()


def total_steps(train: TrainSpec, loader: Loader) -> int:
    """Return the optimizer steps of a run; an epoch's last step may have fewer micro-batches."""
    per_epoch = -(-len(loader) // train.accumulate)
    return train.max_steps or train.epochs * per_epoch


def is_evaluation_step(train: TrainSpec, loader: Loader, step: int) -> bool:
    """Return whether an evaluation follows this step: at an interval, and after the last one."""
    every = train.eval_every or -(-len(loader) // train.accumulate)
    return step % every == 0 or step == total_steps(train, loader)


def accumulation_batches(
    state: TrainState, loader: Loader, size: int
) -> Iterator[tuple[list[Batch], list[int]]]:
    """Yield the micro-batches of each step and their examples in all processes.

    It starts at state.position and goes through epoch after epoch without end.
    """
    while True:
        if state.position == 0:
            state.epoch += 1
        batches = loader.epoch(state.epoch, state.position)
        while group := list(islice(batches, size)):
            first, state.position = state.position, state.position + len(group)
            yield group, [loader.examples_in(i) for i in range(first, state.position)]
        state.position = 0


# What trains, on what, how long, and three hooks for the caller: each is used on its own.
def fit(  # noqa: PLR0913
    state: TrainState,
    loader: Loader,
    validation: Loader,
    train: TrainSpec,
    *,
    flush_every: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    around: Callable[[int], AbstractContextManager[object]] = lambda step: _UNWATCHED,
) -> Iterator[Record]:
    """Train, yielding a block of step records whenever they reach the host, and an evaluation at
    each boundary and at the end.

    Where a device computes beside the host, a block is yielded when the one after it has set out:
    so the host waits for nothing that is still being computed, and is two blocks ahead at most.
    Before an evaluation, at flush_every and at the end the records end at state.step, also where
    an exception ends it.

    Args:
        state: changed in place.
        loader: training micro-batches.
        validation: batches for the evaluations.
        train: lengths and intervals.
        flush_every: an interval at which every record must have arrived (checkpoints).
        stopped: asked after each step and between the batches of an evaluation; True ends the
            loop after a last block.
        around: called with a step's number, the context around it (probes).
    """
    blocks = RecordBuffer(state)
    try:
        yield from _steps(state, blocks, loader, validation, train, flush_every, stopped, around)
    except (Exception, KeyboardInterrupt):
        if state.strategy.place.world_size == 1:  # else the others would have to take part
            with suppress(Exception):  # what ended the loop must not be hidden by its last records
                yield from blocks.flush()
        raise


def _steps(  # noqa: PLR0913 - those of fit, and its buffer
    state: TrainState,
    blocks: RecordBuffer,
    loader: Loader,
    validation: Loader,
    train: TrainSpec,
    flush_every: int | None,
    stopped: Callable[[], bool],
    around: Callable[[int], AbstractContextManager[object]],
) -> Iterator[Record]:
    last = total_steps(train, loader)
    until = perf_counter() + (train.max_seconds or inf)
    state.model.train()
    if (
        state.step
        and state.last_evaluation_step < state.step
        and is_evaluation_step(train, loader, state.step)
    ):
        yield from _evaluation(state, validation, stopped)  # the run was stopped before it
        blocks.started = perf_counter()
    if state.step >= last:
        return
    for micros, sizes in until_interrupted(accumulation_batches(state, loader, train.accumulate)):
        step = state.step + 1
        over = step >= last or perf_counter() >= until
        at_eval = over or is_evaluation_step(train, loader, step)
        watch = Stagnation(state) if at_eval and state.precision.storage.itemsize == 2 else None
        with around(step):
            blocks.add(train_step(state, micros, sizes))
        state.stagnant_share = None if watch is None else watch.share()
        stop = stopped()
        if at_eval or stop or (flush_every and step % flush_every == 0):
            yield from blocks.flush()
        elif step % train.log_every == 0:
            blocks.send()
            yield from blocks.ready_records()
        if at_eval and not stop:
            yield from _evaluation(state, validation, stopped)
            blocks.started = perf_counter()
        if stop or over or (at_eval and stopped()):
            return
    yield from blocks.flush()


def _evaluation(
    state: TrainState, validation: Loader, stopped: Callable[[], bool]
) -> Iterator[EvalRecord]:
    """Yield one record; none if stopped, as if it had not begun, for the resumed run evaluates."""
    drawn = host_rng_state()
    metrics = evaluate(state, validation, stopped)
    if metrics is None:
        set_host_rng_state(drawn)
        return
    state.last_evaluation_step = state.step
    yield EvalRecord(state.step, int(time() * 1000), state.epoch, metrics, state.stagnant_share)
