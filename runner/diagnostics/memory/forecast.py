"""Predict the peak memory of training, by kind, before anything is trained.

The run's own step (runner.core.loop.step) and an evaluation are rehearsed on fake tensors, which
have shapes and no memory, and runner.diagnostics.memory.memory_tracker adds up the storages that
every operator makes and drops. Left out are a data set held in memory, a checkpoint's copy, and
what a compiler or a GPU's libraries take. bench/memory_plan.py compares the predictions with the
allocator's peak.

torch's MemTracker (torch.distributed._tools) adds up the same. It keeps alive what an
autograd.Function saves for its backward (bnb-int8-training: a fifth too much), sees no workspace of
kernels, and knows the peak alone, not the moments that lead to it.

Where operators need values or addresses (some optimizers and experts), two real steps are run,
one on two examples and one on twice as many. They show what an example adds to each
moment of a step, and the peak is that of the extrapolated moments. To extrapolate the two peaks
would mislead: with few examples another moment is the highest. A forecast says when it was made in
this way.

A run that finds no memory rehearses its own step afterwards, on shapes of its own data, and takes
the real steps with its own model, because a second one would find no memory either.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from runner.core import (
    ConversionPlan,
    Precision,
    RunnerError,
    RunSpec,
    TrainState,
    accelerators,
    model_call,
    module_tree,
    run_context,
    targets,
    tensor_facts,
    terminal,
    train_step,
    training_loop,
)
from runner.data.loader import Batch
from runner.data.task_target import build_task
from runner.diagnostics.memory.limits import USABLE_MEMORY_SHARE, free_memory
from runner.diagnostics.memory.memory_tracker import (
    ACTIVATIONS,
    OPTIMIZER,
    WEIGHTS,
    MemoryBreakdown,
    MemoryTracker,
)
from runner.precision.forward_watch import ForwardWatch
from runner.precision.layers.experts import own_stacks, possible_stacks
from runner.training.compile import prepare_model
from runner.training.example_batch import ForecastUnavailable, example_batch
from runner.training.model import META_DEVICE, ModelBuilder, lazy_layers, materialize_lazy_layers
from runner.training.setup import build_state

MAX_FORECAST_BATCH_SIZE = 2**16
"""Largest batch size that mode=plan tries."""

_REAL = nullcontext()


@dataclass(eq=False)
class Rehearsal:
    """Steps of a training state on any batch size, in which all that they hold is tracked.

    Args:
        state: the state of its optimizers is made already.
        micro_batches: makes the micro-batches of a step, of so many examples each.
        tensors: the context of fake tensors; none for real ones.
        making: what was held while the model was made.
        tracker: makes what tracks a step.
        evaluates: whether an evaluation follows, for which a step of 16-bit weights copies them.
    """

    state: TrainState
    micro_batches: Callable[[int], list[Batch]]
    tensors: AbstractContextManager[object] = _REAL
    making: Sequence[MemoryBreakdown] = ()
    tracker: Callable[..., MemoryTracker] = MemoryTracker
    evaluates: bool = True

    def __post_init__(self) -> None:
        self.peak = cache(lambda size: max(self.timeline(size), key=sum))

    def timeline(self, size: int) -> list[MemoryBreakdown]:
        """Return what is held while the model is made and after each operator of a step.

        Args:
            size: examples of a micro-batch.
        """
        return [*self.making, *self.track(size).timeline]

    def track(self, size: int) -> MemoryTracker:
        """Return the tracker of a step and an evaluation on micro-batches of so many examples."""
        state = self.state
        precision = state.precision
        with self.tensors, precision.session(state.model, state.device):
            batches = self.micro_batches(size)
            kernels = precision.kernels(state.model, state.device)
            tracker = self.tracker(accumulates=kernels == "float32_accumulate")
            tracker.add(WEIGHTS, *state.model.parameters(), *state.model.buffers())
            tracker.add(OPTIMIZER, *state.optimizer_tensors())
            if state.evaluated is not None:
                tracker.add(OPTIMIZER, *state.evaluated.tensors())
            tracker.add(ACTIVATIONS, *tree_leaves(batches))
            module_tree.set_training(state.model)
            with tracker.gradients_of(state.trainable_parameters), tracker:
                # An evaluation's step compares half-precision weights before and after it.
                watch = training_loop.Stagnation(state) if self.evaluates else None
                update = state.hooks.call_before_update(tracker.begin_update)
                train_step(state, batches[:2])  # further micro-batches hold what the second does
                state.hooks.remove(update)
                tracker.end_step()
                if watch is None:
                    return tracker
                watch.close()
                # Its copies of the weights are freed before the evaluation.
                del watch
                # What an evaluation computes with a batch. Generators have no state on fake tensors
                # that could be saved.
                inputs, target = batches[0]
                training_loop.set_evaluation_mode(state.model, state.task)
                with torch.no_grad(), precision.eval_context(state.plain_model):
                    output = state.call(inputs)
                    state.task.evaluation_totals(*precision.loss_pair(output, target))
        return tracker


def build_rehearsal(
    spec: RunSpec,
    precision: Precision,
    device: torch.device,
    plan: ConversionPlan,
    micro_batches: Callable[[int], list[Batch]],
    fake: bool,
) -> Rehearsal:
    """Build a run's model with its optimizers, on fake tensors or in memory."""
    # Tensors that a module holds apart from its parameters and buffers stay real.
    tensors = FakeTensorMode(allow_non_fake_inputs=True) if fake else _REAL
    # In float32 before it is converted, and on the CPU: for another device it does not count.
    making = MemoryTracker(kind=WEIGHTS)
    builder = ModelBuilder(spec, precision)
    with making if device.type == "cpu" else nullcontext():
        if fake:
            built = builder.build_on_meta(plan)
        else:
            built = builder.build(device, plan)
    model = built.model
    with tensors:
        if fake:
            _replace_by_fakes(model, device)
        # A schedule needs the number of steps of a run, and changes no tensor's size.
        without_schedule = replace(spec, scheduler={})
        task = build_task(spec.task)
        setup = run_context.TrainingSetup(without_schedule, precision, task, device)
        state = build_state(setup, model, total_steps=1, plan=plan)
        # A fake found-inf has no value that could decide about the update.
        state.scale.step = lambda optimizer, found_inf: optimizer.step()
        # What a compiler holds is not predicted.
        eager = replace(spec, train=replace(spec.train, compile=False))
        prepare_model(eager, precision, device, model)
        make_optimizer_state(state)
    return Rehearsal(state, micro_batches, tensors, making.timeline)


def make_optimizer_state(state: TrainState) -> None:
    """Step once with gradients of zero: optimizers make their state in the first step."""
    for p in state.trainable_parameters:
        p.grad = torch.zeros_like(p)
    for scheduled in state.optimizers:
        scheduled.optimizer.step()
    for p in state.trainable_parameters:
        p.grad = None


def _replace_by_fakes(model: nn.Module, device: torch.device) -> None:
    """Put fake tensors in the place of a model's own; tied ones stay tied.

    Raises:
        NotImplementedError: the model holds tensors of a library's class other than packed weights.
    """
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        scales = getattr(tensor, "quant_state", None)
        # A fake of the plain class would hide what a library's class packs.
        if type(tensor) not in (Tensor, nn.Parameter) and scales is None:
            raise NotImplementedError(type(tensor).__name__)
        if id(tensor) not in fakes:
            empty = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
            )
            is_parameter = isinstance(tensor, nn.Parameter)
            made: Any = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            if scales is not None:
                scales.to(device)  # replaces the tensors in it, here by fakes
                made.quant_state = scales
            fakes[id(tensor)] = made
        return fakes[id(tensor)]

    for module in model.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):
            held |= {name: fake(t) for name, t in held.items() if t is not None}


REAL_STEP_EXAMPLES = (2, 8, 32)
"""Examples of the smaller of two real steps: batch normalisation refuses a single one, and among
few some experts of a mixture have no token, and so no operators."""


def largest_fitting_batch(
    peak: Callable[[int], MemoryBreakdown], configured: int, room: float
) -> int | None:
    """Return the largest batch size whose predicted peak is within `room` bytes.

    Args:
        peak: a forecast.
        configured: a size to try in addition to the powers of two.
        room: bytes.

    Returns:
        The size; None where a single example is too much.
    """
    powers = [2**power for power in range(MAX_FORECAST_BATCH_SIZE.bit_length())]
    return largest_fitting(sorted({configured, *powers}), lambda size: peak(size).total <= room)


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that fits, by bisection: a forecast costs about as long as a step.

    Args:
        sizes: in ascending order.
        fits: whether a size fits; an error means that the model refuses the size.
    """

    def is_fitting(size: int) -> bool:
        try:
            return fits(size)
        except (RuntimeError, ValueError):  # for example, batch normalisation of a single example
            return False

    count = bisect_left(sizes, True, key=lambda size: not is_fitting(size))
    return sizes[count - 1] if count else None


def find_experts(spec: RunSpec, precision: Precision, device: torch.device) -> ConversionPlan:
    """Return a plan that names the stacked weights that a forward multiplies expert by expert.

    A model that may hold such weights is built in memory, for a forward on random numbers in the
    shapes of data.meta. Where that fails they stay unknown.

    Args:
        spec: its model is looked at.
        precision: as for a run, which finds them by its first batch.
        device: where the run computes.
    """
    # An adapter adds to them in every precision.
    if not precision.converts_layers and not spec.adapter.get("_target_"):
        return ConversionPlan()
    with suppress(Exception), torch.no_grad():
        with META_DEVICE:
            model = targets.build_group("model", spec.model)
        candidates = [m for m in model.modules() if possible_stacks(m) and not own_stacks(m)]
        fits = tensor_facts.float32_bytes(model) < USABLE_MEMORY_SHARE * free_memory(device)
        if candidates and fits:
            inputs, _ = example_batch(spec, 2, device)
            finding = ConversionPlan(finds_experts=True)
            model = ModelBuilder(spec, precision).build(device, finding).model.eval()
            session = precision.session(model, device)
            with session, precision.forward(device), ForwardWatch(model, {}) as watch:
                model_call.call_model(model, precision.cast(inputs))
            return ConversionPlan(expert_layouts=watch.experts())
    return ConversionPlan()


@dataclass(frozen=True)
class PeakForecast:
    """The predicted peak of a training step.

    Attributes:
        peak: returns the peak of a step with micro-batches of so many examples.
        fallback: why the step was run on real tensors; empty where fake tensors were enough.
    """

    peak: Callable[[int], MemoryBreakdown]
    fallback: str = ""


def peak_forecast(
    spec: RunSpec, precision: Precision, device: torch.device, plan: ConversionPlan | None = None
) -> PeakForecast:
    """Rehearse a training step, on fake tensors where its operators allow it.

    Args:
        spec: data.meta gives the shape of an example.
        precision: of the spec, for this device.
        device: where the run computes.
        plan: by which the model is converted; by default what find_experts returns.

    Raises:
        ForecastUnavailable: no shape is given, or the step runs neither on fake tensors nor on few
            examples.
    """
    found = find_experts(spec, precision, device) if plan is None else plan

    def micro_batches(size: int) -> list[Batch]:
        return [example_batch(spec, size, device) for _ in range(spec.train.accumulate)]

    def check_room() -> None:
        size = 0
        room = USABLE_MEMORY_SHARE * free_memory(device)
        # A model that reads its own values cannot be built without memory: it is not refused.
        with suppress(NotImplementedError, RuntimeError), META_DEVICE:
            model = targets.build_group("model", spec.model)
            if lazy_layers(model):
                inputs, _ = example_batch(spec, 2, META_DEVICE)
                materialize_lazy_layers(model, META_DEVICE, inputs)
            size = tensor_facts.float32_bytes(model)
        # Weights, gradients and two averages in float32; where most weights are frozen, the weights
        # alone, before they are packed.
        needs = size * (1.5 if precision.freezes else 4)
        if needs > room:
            raise ForecastUnavailable(
                "its operators want real numbers, and steps on a few take about "
                f"{needs / tensor_facts.GIB:.1f} of the {room / tensor_facts.GIB:.1f} GiB that "
                "may be used."
            )

    def build(fake: bool) -> Rehearsal:
        if not fake:
            check_room()
        return build_rehearsal(spec, precision, device, found, micro_batches, fake)

    return _forecast(spec, device, build)


def failed_step_forecast(spec: RunSpec, state: TrainState, sample: Batch) -> PeakForecast:
    """Rehearse the step of a run that found no memory, whose state is of no more use.

    The examples of a step stay the same: smaller micro-batches are more of them.

    Args:
        spec: of the run.
        state: of the run; it takes the real steps where fake tensors are not enough.
        sample: one of the run's micro-batches.

    Raises:
        ForecastUnavailable: weights are sharded, or the step runs neither on fake tensors nor on
            few examples.
    """
    rank = state.strategy.rank

    def micro_batches(size: int) -> list[Batch]:
        share = max(1, rank.batch_share(size))

        def resized(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim == 0:
                return value
            return value[torch.arange(share, device=value.device) % len(value)]

        # Two at least: the second finds the gradients of the first.
        count = max(2, spec.train.batch_size * spec.train.accumulate // size)
        return [tree_map(resized, sample) for _ in range(count)]

    def build(fake: bool) -> Rehearsal:
        if fake:
            precision, device = state.precision, state.device
            return build_rehearsal(spec, precision, device, state.plan, micro_batches, fake)
        if rank.world_size > 1:
            raise ForecastUnavailable("a step of one process would wait for the others.")
        make_optimizer_state(state)
        return Rehearsal(state, micro_batches)

    if state.strategy.shards:
        raise ForecastUnavailable("what a process gathers of sharded weights is not predicted.")
    return _forecast(spec, state.device, build)


def _forecast(
    spec: RunSpec, device: torch.device, build: Callable[[bool], Rehearsal]
) -> PeakForecast:
    """Return the forecast of a rehearsal on fake tensors, or else on real ones.

    The latter is an extrapolation from two steps on few examples.

    Args:
        spec: of the run.
        device: of the run.
        build: builds the rehearsal; whether on fake tensors.

    Raises:
        ForecastUnavailable: a rehearsal would not show the peak, or the step runs on neither.
    """
    if accelerators.is_tpu(device):
        raise ForecastUnavailable("a TPU's compiler decides what a step holds.")
    if spec.optimizer.get("_target_") == "torch.optim.LBFGS":
        raise ForecastUnavailable("optimizer=lbfgs keeps more each step, up to its history_size.")
    try:
        # Fake tensors would log a traceback for each operator that has no rule for them.
        with terminal.suppress_warnings(logging.ERROR):
            rehearsal = build(True)
            # This size at least must run.
            rehearsal.peak(spec.train.batch_size)
            return PeakForecast(rehearsal.peak)
    except RunnerError:
        raise
    # Whatever fails on fake tensors may work on real ones; the forecast says so (`fallback`).
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        fallback = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    try:
        examples, less, more = _paired_timelines(build(False))
    except RunnerError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ForecastUnavailable(f"its step does not run on random inputs: {reason}") from error

    def peak(size: int) -> MemoryBreakdown:
        share = (size - examples) / examples
        moments = []
        for smaller, larger in zip(less, more, strict=True):
            pairs = zip(smaller, larger, strict=True)
            moments.append(MemoryBreakdown(*(round(a + (b - a) * share) for a, b in pairs)))
        return max(moments, key=sum)

    return PeakForecast(peak, fallback)


def _paired_timelines(
    rehearsal: Rehearsal,
) -> tuple[int, list[MemoryBreakdown], list[MemoryBreakdown]]:
    """Return a number of examples, and the moments of steps on so many and on twice as many.

    Raises:
        ForecastUnavailable: the steps differ in their operators.
    """
    for examples in REAL_STEP_EXAMPLES:
        less = rehearsal.timeline(examples)
        more = rehearsal.timeline(2 * examples)
        # Moments are paired by their operators; with others, none of one step belongs to the
        # other's.
        if len(less) == len(more):
            return examples, less, more
    raise ForecastUnavailable("steps of batches of two sizes differ in their operators.")
