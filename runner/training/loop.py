"""The training loop: a generator of records. Only its caller can end it early."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from math import inf
from time import perf_counter

from runner.config.schema import TrainSpec
from runner.data.batch_layout import Batch
from runner.data.loader import Loader
from runner.data.step_samples import ends_epoch, steps_of_epoch
from runner.data.stream_loader import BatchLoader
from runner.training.evaluation import Stagnation, evaluate_sets
from runner.training.record_buffer import RecordBuffer
from runner.training.records import EvalRecord, Record
from runner.training.state import TrainState
from runner.training.step import train_step
from runner.utils.formatting import now_ms
from runner.utils.modules import set_training
from runner.utils.stop_signals import until_interrupted

_NO_CONTEXT = nullcontext()


def total_steps(train: TrainSpec, loader: BatchLoader) -> int:
    """Return the optimizer steps of a run; an epoch's last step may have fewer micro-batches."""
    if train.max_steps:
        return train.max_steps
    assert isinstance(loader, Loader)  # a stream is refused without train.max_steps
    start = loader.start
    rest = steps_of_epoch(loader, train.accumulate, start.examples)
    later = (train.epochs - start.epoch) * steps_of_epoch(loader, train.accumulate)
    return start.step + rest + later


def is_evaluation_step(train: TrainSpec, loader: BatchLoader, step: int) -> bool:
    """Return whether an evaluation follows this step: at an interval, and after the last one."""
    # Without an interval, an evaluation follows each epoch; on a stream the last step alone.
    if train.eval_every:
        is_due = step % train.eval_every == 0
    else:
        is_due = ends_epoch(loader, train.accumulate, step)
    return is_due or step == total_steps(train, loader)


def accumulation_batches(
    state: TrainState, loader: BatchLoader, size: int
) -> Iterator[tuple[list[Batch], list[int]]]:
    """Yield the micro-batches of each step and their examples in all processes.

    The first ones are those at state.position, and epoch follows epoch without end.

    Args:
        state: its epoch and position are advanced.
        loader: training micro-batches.
        size: micro-batches of a step; an epoch's last step may get fewer.
    """
    while True:
        # A resumed run that stands within an epoch has counted it already.
        if state.position == 0:
            state.epoch += 1
        batches = loader.epoch(state.epoch, state.position)
        group = list(islice(batches, size))
        while group:
            sizes: list[int] = []
            # The position moves before the step: a checkpoint after it resumes with the next group.
            for _ in group:
                sizes.append(loader.examples_in(state.position))
                state.position += sizes[-1]
            yield group, sizes
            group = list(islice(batches, size))
        state.position = 0


# What trains, on what, how long, and three hooks for the caller: each is used on its own.
def fit(  # noqa: PLR0913
    state: TrainState,
    loader: BatchLoader,
    validation: BatchLoader | Mapping[str, BatchLoader],
    train: TrainSpec,
    *,
    flush_every: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    should_finish: Callable[[], bool] = lambda: False,
    step_context: Callable[[int], AbstractContextManager[object]] = lambda step: _NO_CONTEXT,
) -> Iterator[Record]:
    """Train, and yield blocks of step records as they reach the host, and evaluations.

    A block is yielded at each multiple of train.log_every; on a device that computes while the host
    continues, it is yielded one interval later (see record_buffer.py). Before an evaluation, at
    flush_every and at the end the records reach up to state.step, also where an exception ends the
    loop.

    Args:
        state: changed in place.
        loader: training micro-batches.
        validation: batches for the evaluations; of several sets by their names, see
            evaluate_sets.
        train: lengths and intervals.
        flush_every: an interval at which every record must have arrived (checkpoints).
        should_stop: asked after each step and between the batches of an evaluation; True ends the
            loop after a last block.
        should_finish: asked before each step; True makes it the last one, which is evaluated.
        step_context: returns the context in which the step of a number runs (probes).
    """
    blocks = RecordBuffer(state)
    sets = validation if isinstance(validation, Mapping) else {"": validation}
    last = total_steps(train, loader)
    deadline = perf_counter() + (train.max_seconds or inf)
    set_training(state.model)
    try:
        # The run may have been stopped between a step and the evaluation that follows it.
        is_evaluated = state.last_evaluation_step >= state.step
        if not is_evaluated and is_evaluation_step(train, loader, state.step):
            yield from _evaluation(state, sets, should_stop)
            blocks.restart_clock()
        if state.step >= last:
            return
        batches = accumulation_batches(state, loader, train.accumulate)
        for micros, sizes in until_interrupted(batches):
            step = state.step + 1
            # Decided before the step: what an evaluation counts must be watched during the step.
            is_last = step >= last or perf_counter() >= deadline or should_finish()
            evaluates = is_last or is_evaluation_step(train, loader, step)
            counter = Stagnation(state) if evaluates or step == last // 3 else None
            with step_context(step):
                blocks.add(train_step(state, micros, sizes))
            state.stagnant_share = counter.stagnant_share() if counter else state.stagnant_share
            # All processes ask at the same points of the loop, so they agree, one question late.
            is_stopped = should_stop()
            # The caller acts on evaluations, checkpoints and the end, and needs every record by
            # then.
            if evaluates or is_stopped or (flush_every and step % flush_every == 0):
                yield from blocks.flush()
            elif step % train.log_every == 0:
                # The block is read one interval late: reading it now would drain the device's
                # queue.
                blocks.send()
                yield from blocks.ready_records()
            if evaluates and not is_stopped:
                yield from _evaluation(state, sets, should_stop)
                blocks.restart_clock()
            if is_stopped or is_last or (evaluates and should_stop()):
                return
        yield from blocks.flush()
    except (Exception, KeyboardInterrupt):
        # With several processes a flush reduces values over all of them, and the others may not
        # have failed: it would wait for them for ever.
        if state.strategy.rank.world_size == 1:
            with suppress(Exception):  # what ended the loop must not be hidden by its last records
                yield from blocks.flush()
        raise
    finally:
        blocks.close()


def _evaluation(
    state: TrainState, validation: Mapping[str, BatchLoader], should_stop: Callable[[], bool]
) -> Iterator[EvalRecord]:
    """Yield the record of an evaluation; nothing if the run is asked to stop meanwhile."""
    metrics = evaluate_sets("val", state, validation, should_stop)
    if metrics is not None:
        state.record_evaluation(metrics)
        yield EvalRecord(state.step, now_ms(), state.epoch, metrics, state.stagnant_share)
