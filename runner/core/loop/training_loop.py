"""The training loop: a generator of records. Only its caller can end it early.

Evaluations of a model on data sets, and the measurement of updates that leave weights unchanged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from runner.core.base.errors import ConfigError
from runner.core.base.fmt import now_ms
from runner.core.base.module_tree import set_training
from runner.core.base.random_streams import seeded
from runner.core.base.stop_signals import until_interrupted
from runner.core.config.schema import TrainSpec
from runner.core.loop.batch_layout import Batch, BatchLoader, batch_seed, ends_epoch, steps_of_epoch
from runner.core.loop.step import join_batch, train_step
from runner.core.loop.step_records import EvalRecord, RecordBuffer, StepRecord
from runner.core.loop.task import Task
from runner.core.loop.train_state import EvaluationCall, TrainState

_RANDOM_DEPTH = ("StochasticDepth", "DropPath")
"""Classes of torchvision and timm that leave out branches at random in training mode."""
MIN_RATE_SHARE = 0.25
"""Share of a group's full learning rate under which its parameters are not asked whether they move:
at the end of a schedule, or the beginning of a warm-up, no format is to blame."""
_SEED_USE = 2**16
"""Use of an evaluation's seed, see batch_seed: above those of loading processes."""


@torch.no_grad()
def evaluate(
    state: TrainState,
    validation: BatchLoader,
    should_stop: Callable[[], bool] = lambda: False,
    label: str = "val",
    batches: int | None = None,
    hook: EvaluationCall | None = None,
) -> dict[str, float] | None:
    """Return the task's metrics over a data set, computed in the run's precision.

    With train.ema they are those of the averaged weights. What data, model, loss, metrics and hook
    draw at random is the same in each evaluation.

    Args:
        state: its model is evaluated; schedules that wait for a found-inf flag are advanced.
        validation: the data set.
        should_stop: asked before each batch; once it returns True, the result is None.
        label: of the set, for the hook.
        batches: number of batches that are evaluated; None for all.
        hook: called with the metrics of the set; the numbers that it returns are added.

    Returns:
        The metrics by name, for example {"val/loss": 0.3}; None if stopped or without a batch.

    Raises:
        ConfigError: a metric of task.metrics has the name of one of the task's.
        ModelError: such a metric fails.
        HookError: the hook fails.
    """
    # The flags that the schedules wait for have long arrived: the records were flushed before.
    for scheduled in state.optimizers:
        scheduled.advance_schedule()
    first_batch: list[Batch] = []
    # The initial weights are drawn from the run's seed itself.
    seed = batch_seed(validation.seed, 0, 0, _SEED_USE + state.strategy.rank.index)
    with state.evaluated_weights(), evaluation_mode(state, seed):
        loaded = islice(validation.epoch(0), batches)
        noted = None if hook is None else first_batch
        totals = _totals(state, validation, loaded, should_stop, noted)
        metrics = None
        if not should_stop() and totals is not None:
            metrics = state.task.evaluation_metrics(state.strategy.sum(totals).tolist())
            values = state.task.added_metrics.values()
            for name in sorted(metrics.keys() & values.keys()):
                short = name.removeprefix("val/")
                raise ConfigError(
                    f"task.metrics: {short} has the name of a metric that the task records itself, "
                    f"{name}. Give it another one: task.metrics={{my_{short}: {{_target_: ...}}}}."
                )
            metrics |= values
            if hook is not None:
                state.model.eval()  # also of a task that evaluates losses
                with state.precision.eval_context(state.plain_model):
                    metrics |= hook(label, metrics, first_batch[0])
    # A forward without a backward leaves them, and a checkpoint must not see their dtype.
    state.strategy.drop_gathered_weights()
    set_training(state.model)
    return metrics


def _totals(
    state: TrainState,
    validation: BatchLoader,
    batches: Iterator[Batch],
    should_stop: Callable[[], bool],
    noted: list[Batch] | None,
) -> Tensor | None:
    """Return the task's totals over batches of a data set; None if stopped or without a batch.

    The metrics of task.metrics are updated, too, and the first batch is appended to `noted`.
    """
    precision = state.precision
    task = state.task
    strategy = state.strategy
    # Running statistics of each process come from its own examples; all must evaluate one model.
    strategy.broadcast_buffers(state.plain_model)
    task.added_metrics.begin(state.device, strategy.gather_tensors)
    totals: Tensor | None = None
    with precision.eval_context(state.plain_model):
        for i, (inputs, target) in enumerate(until_interrupted(batches)):
            if should_stop():
                return None
            if i == 0 and noted is not None:
                noted.append((inputs, target))
            output = state.call(inputs)
            # In the loss's dtype and outside autocast, so that no metric is computed in half
            # precision. The task adds up in the widest float of the device.
            output, target = precision.loss_pair(output, target)
            size = validation.examples_in(i * validation.batch_size)
            share = strategy.rank.batch_share(size)
            if share and task.additions.metrics:
                task.added_metrics.update(*task.metric_inputs(output, target))
            if task.whole_batch and strategy.rank.world_size > 1:
                output, target = join_batch(state, output, target, size)
                share = int(strategy.rank.is_main)  # all have the sums of the whole batch
            sums = task.evaluation_totals(output, target)
            # A process without an example of this batch has computed one of another process's:
            # all processes run every forward, since a strategy may exchange weights in it.
            if not share:
                sums = torch.zeros_like(sums)
            # Totals stay on the device; the only read of it is the one at the end.
            totals = sums if totals is None else totals + sums
    return totals


def evaluate_sets(
    split: Literal["val", "test"],
    state: TrainState,
    loaders: Mapping[str, BatchLoader],
    should_stop: Callable[[], bool] = lambda: False,
    hook: EvaluationCall | None = None,
) -> dict[str, float] | None:
    """Return the metrics of all validation sets, or of all test sets.

    Args:
        split: the kind of the sets.
        state: see evaluate.
        loaders: of the sets by name; that of an only one may be empty.
        should_stop: see evaluate.
        hook: called after the evaluation of each set, see evaluate.

    Returns:
        The metrics, named <split>/<name>/<metric>, without the name of an only set. Those of the
        first validation set are also named val/<metric>. Empty without a set, None if stopped.
    """
    metrics: dict[str, float] = {}
    for name, loader in loaders.items():
        label = f"{split}/{name}" if name else split
        values = evaluate(state, loader, should_stop, label, hook=hook)
        if values is None:
            return None
        if split == "val" and not metrics:
            metrics.update(values)
        if split == "test" or name:
            metrics |= {
                f"{label}/{key.removeprefix('val/')}": value for key, value in values.items()
            }
    return metrics


class Stagnation:
    """Counts the half-precision elements that had a gradient and that a step left unchanged.

    In bfloat16 and float16 an update below half a unit in the last place of a weight is rounded
    away: training stalls although the gradients are not zero. An instance is made before a step
    and asked after it for the share of such elements. Meanwhile hooks on the parameters note which
    elements have a gradient, because train_step drops the gradients. At the end of a schedule no
    weight moves in any format, so that a step after a third of the run is watched, too.

    Args:
        state: its trainable parameters of 2 bytes per element are compared, where its precision
            loses updates, of the groups whose learning rate is at least MIN_RATE_SHARE of the full
            one.
    """

    def __init__(self, state: TrainState) -> None:
        self.strategy = state.strategy
        self._earlier = state.stagnant_share
        self.params = []
        for part in state.optimizers if state.precision.loses_updates else ():
            groups = part.optimizer.param_groups
            for group, full_rate in zip(groups, part.full_rates(), strict=True):
                if 0 < MIN_RATE_SHARE * full_rate <= group["lr"]:
                    self.params += [p for p in group["params"] if p.dtype.itemsize == 2]
        self._weights_before = [shard.clone() for shard in self._local_shards(self.params)]
        self._has_gradient: dict[int, Tensor] = {}  # bool masks by the parameter's id
        self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in self.params]

    def _note(self, param: Tensor) -> None:
        assert param.grad is not None
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        # With several micro-batches the last call counts, when the gradients have been added up.
        self._has_gradient[id(param)] = self._local_shards([grad])[0] != 0

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _local_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.strategy.local_shards([t.detach() for t in tensors])

    def stagnant_share(self) -> float | None:
        """Remove the hooks and return the share of the elements with a gradient that did not move.

        The share is from 0 to 1, over all processes; the state's earlier one if no element of the
        compared parameters had a gradient.
        """
        self.close()
        weights = self._local_shards(self.params)
        with_gradient = 0
        unchanged = 0
        for param, after, before in zip(self.params, weights, self._weights_before, strict=True):
            mask = self._has_gradient.get(id(param))
            if mask is None:
                continue
            with_gradient += int(mask.count_nonzero())
            unchanged += int(((after == before) & mask).count_nonzero())
        # Only sharded weights differ between the processes; elsewhere each counts the whole model.
        if self.strategy.shards:
            counts = self.strategy.sum(torch.tensor([unchanged, with_gradient]))
            unchanged, with_gradient = counts.tolist()
        return unchanged / with_gradient if with_gradient else self._earlier


def set_evaluation_mode(model: nn.Module, task: Task) -> None:
    """Set a model to evaluation mode.

    For a task that evaluates losses, the modules are in training mode, in which detection models
    return losses. Those in which the mode decides about more are in evaluation mode: batch and
    instance normalisations, which neither use nor change the batch's statistics, and dropout.
    """
    model.eval()
    if not task.evaluates_losses:
        return
    set_training(model)
    for module in model.modules():
        is_random = isinstance(module, _DropoutNd) or type(module).__name__ in _RANDOM_DEPTH
        if is_random or isinstance(module, _NormBase):
            module.eval()


@contextmanager
def evaluation_mode(state: TrainState, seed: int = 0) -> Iterator[None]:
    """Set the model to evaluation mode and seed what is drawn at random.

    The caller sets the model back to training mode. On exit all generators are restored, so that an
    evaluation changes no training.

    Args:
        state: its model is changed in place, and its device's generator is seeded and restored,
            beside those of the host.
        seed: of the generators.
    """
    model, task = state.model, state.task
    set_evaluation_mode(model, task)
    # Those that a module, the task or its loss keeps, too.
    holders = [model, task, *vars(task).values()]
    # The task's loss holds the function or module that the user gave; no property is called.
    held = [getattr(part, "__dict__", {}) for part in vars(task).values()]
    holders += [attributes["loss"] for attributes in held if "loss" in attributes]
    parts = [[*h.modules()] if isinstance(h, nn.Module) else [h] for h in holders]
    attributes = [getattr(part, "__dict__", None) for part in chain(*parts)]
    with seeded(seed, state.device, tree_leaves(attributes)):
        yield


_NO_CONTEXT = nullcontext()


def total_steps(train: TrainSpec, loader: BatchLoader) -> int:
    """Return the optimizer steps of a run; an epoch's last step may have fewer micro-batches."""
    if train.max_steps:
        return train.max_steps
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


@dataclass(frozen=True)
class LoopHooks:
    """What the caller of the loop decides and adds.

    Attributes:
        flush_every: an interval at which every record must have arrived (checkpoints).
        should_stop: asked after each step and between the batches of an evaluation; True ends the
            loop after a last block.
        should_finish: asked before each step; True makes it the last one, which is evaluated.
        step_context: returns the context in which the step of a number runs (probes).
        evaluation: called after the evaluation of each set; None for nothing.
        gauges: returns what is recorded at the end of each block beside the precision's gauges, by
            metric name; scalars on the device.
    """

    flush_every: int | None = None
    should_stop: Callable[[], bool] = lambda: False
    should_finish: Callable[[], bool] = lambda: False
    step_context: Callable[[int], AbstractContextManager[object]] = lambda step: _NO_CONTEXT
    evaluation: EvaluationCall | None = None
    gauges: Callable[[], Mapping[str, Tensor]] = dict


NO_HOOKS = LoopHooks()


def fit(
    state: TrainState,
    loader: BatchLoader,
    validation: BatchLoader | Mapping[str, BatchLoader],
    train: TrainSpec,
    hooks: LoopHooks = NO_HOOKS,
) -> Iterator[Sequence[StepRecord] | EvalRecord]:
    """Train, and yield blocks of step records as they reach the host, and evaluations.

    A block is yielded at each multiple of train.log_every; on a device that computes while the host
    continues, it is yielded one interval later (see step_records.py). Before an evaluation, at
    flush_every and at the end the records reach up to state.step, also where an exception ends the
    loop.

    Args:
        state: changed in place.
        loader: training micro-batches.
        validation: batches for the evaluations; of several sets by their names, see
            evaluate_sets.
        train: lengths and intervals.
        hooks: what the caller decides and adds.
    """
    blocks = RecordBuffer(state, hooks.gauges)
    sets = validation if isinstance(validation, Mapping) else {"": validation}
    last = total_steps(train, loader)
    every = hooks.flush_every
    deadline = perf_counter() + (train.max_seconds or inf)
    set_training(state.model)
    try:
        # The run may have been stopped between a step and the evaluation that follows it.
        is_evaluated = state.last_evaluation_step >= state.step
        if not is_evaluated and is_evaluation_step(train, loader, state.step):
            yield from _evaluation(state, sets, hooks)
            blocks.restart_clock()
        if state.step >= last:
            return
        batches = accumulation_batches(state, loader, train.accumulate)
        for micros, sizes in until_interrupted(batches):
            step = state.step + 1
            # Decided before the step: what an evaluation counts must be watched during the step.
            is_last = step >= last or perf_counter() >= deadline or hooks.should_finish()
            evaluates = is_last or is_evaluation_step(train, loader, step)
            counter = Stagnation(state) if evaluates or step == last // 3 else None
            with hooks.step_context(step):
                blocks.add(train_step(state, micros, sizes))
            state.stagnant_share = counter.stagnant_share() if counter else state.stagnant_share
            # All processes ask at the same points of the loop, so they agree, one question late.
            is_stopped = hooks.should_stop()
            # The caller acts on evaluations, checkpoints and the end, and needs every record by
            # then.
            if evaluates or is_stopped or (every and step % every == 0):
                yield from blocks.flush()
            elif step % train.log_every == 0:
                # The block is read one interval late: reading it now would drain the device's
                # queue.
                blocks.send()
                yield from blocks.ready_records()
            if evaluates and not is_stopped:
                yield from _evaluation(state, sets, hooks)
                blocks.restart_clock()
            if is_stopped or is_last or (evaluates and hooks.should_stop()):
                return
        yield from blocks.flush()
    except (Exception, KeyboardInterrupt):
        # With several processes a flush reduces values over all of them, and the others may not
        # have failed: it would wait for them for ever.
        if state.strategy.rank.world_size == 1:
            with suppress(Exception):  # what ended the loop must not be hidden by its last records
                yield from blocks.flush()
        raise


def _evaluation(
    state: TrainState, validation: Mapping[str, BatchLoader], hooks: LoopHooks
) -> Iterator[EvalRecord]:
    """Yield the record of an evaluation; nothing if the run is asked to stop meanwhile."""
    metrics = evaluate_sets("val", state, validation, hooks.should_stop, hooks.evaluation)
    if metrics is not None:
        state.record_evaluation(metrics)
        yield EvalRecord(state.step, now_ms(), state.epoch, metrics, state.stagnant_share)
