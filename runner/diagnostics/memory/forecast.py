"""Predict the peak memory of training, by kind, before anything is trained.

The run's own step (runner.training.step) and an evaluation are rehearsed on fake tensors, which
have shapes and no memory, and runner.diagnostics.memory.memory_tracker adds up the storages that
every operator makes and drops. Left out are a data set held in memory, a checkpoint's copy, and
what a compiler or a GPU's libraries take. bench/memory_plan.py compares the predictions with the
allocator's peak.

torch's MemTracker (torch.distributed._tools) adds up the same. It keeps alive what an
autograd.Function saves for its backward (bnb-int8-training: a fifth too much), sees no workspace of
kernels, and knows the peak alone, not the moments that lead to it.

Where operators need values or addresses (4-bit weights, some optimizers), two real steps are run,
one on REAL_STEP_EXAMPLES examples and one on twice as many. They show what an example adds to each
moment of a step, and the peak is that of the extrapolated moments. To extrapolate the two peaks
would mislead: with few examples another moment is the highest. A forecast says when it was made in
this way.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from runner.config.schema import MAX_FORECAST_BATCH_SIZE, RunSpec
from runner.config.targets import build_group
from runner.diagnostics.memory.limits import USABLE_MEMORY_SHARE, free_memory
from runner.diagnostics.memory.memory_tracker import (
    ACTIVATIONS,
    OPTIMIZER,
    WEIGHTS,
    MemoryBreakdown,
    MemoryTracker,
)
from runner.precision.casting import cast_nest
from runner.precision.precision import Precision
from runner.training.compile import prepare_model
from runner.training.evaluation import Stagnation
from runner.training.example_batch import ForecastUnavailable, example_batch
from runner.training.lazy_layers import materialize_lazy_layers
from runner.training.model import BuiltModel, build_model
from runner.training.setup import TrainingSetup, build_state
from runner.training.step import train_step
from runner.utils.errors import RunnerError
from runner.utils.tensors import GIB, float32_bytes
from runner.utils.tpu import is_tpu

META_DEVICE = torch.device("meta")
REAL_STEP_EXAMPLES = 2
"""Examples of the smaller of two real steps: batch normalisation refuses a single one."""


def predict_peak(
    spec: RunSpec, precision: Precision, device: torch.device, batch_size: int | None = None
) -> MemoryBreakdown:
    """Predict the peak of a training step.

    Args:
        spec: data.meta gives the shape of an example.
        precision: of the spec, for this device.
        device: where the run computes.
        batch_size: examples of a micro-batch; None takes train.batch_size.

    Raises:
        ForecastUnavailable: no shape is given, or the step runs neither on fake tensors nor on few
            examples.
    """
    return peak_forecast(spec, precision, device)(batch_size or spec.train.batch_size)


def largest_batch(
    spec: RunSpec, precision: Precision, device: torch.device, room: float
) -> int | None:
    """Return the largest batch size whose predicted peak is within `room` bytes.

    Args:
        spec: data.meta gives the shape of an example; train.batch_size is tried, too.
        precision: of the spec, for this device.
        device: where the run computes.
        room: bytes.

    Returns:
        train.batch_size or a power of two up to MAX_FORECAST_BATCH_SIZE; None where a single
        example is too much.

    Raises:
        ForecastUnavailable: see `predict_peak`.
    """
    return largest_fitting_batch(
        peak_forecast(spec, precision, device), spec.train.batch_size, room
    )


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
    sizes = sorted({configured, *powers})
    # By bisection: a forecast costs about as long as a step.
    fits = None
    low = 0
    high = len(sizes)
    while low < high:
        middle = (low + high) // 2
        if _fits(peak, sizes[middle], room):
            fits = sizes[middle]
            low = middle + 1
        else:
            high = middle
    return fits


def _fits(peak: Callable[[int], MemoryBreakdown], size: int, room: float) -> bool:
    """Return whether a batch size is within `room` bytes; False where the model refuses it."""
    try:
        return peak(size).total <= room
    except (RuntimeError, ValueError):  # for example, batch normalisation of a single example
        return False


@dataclass(frozen=True)
class PeakForecast:
    """The predicted peak of a training step, as a function of the batch size.

    Attributes:
        peak: returns the peak of a step with micro-batches of so many examples.
        fallback: why the step was run on real tensors; empty where fake tensors were enough.
    """

    peak: Callable[[int], MemoryBreakdown]
    fallback: str = ""

    def __call__(self, batch_size: int) -> MemoryBreakdown:
        """Return the peak of a step with micro-batches of so many examples."""
        return self.peak(batch_size)


def peak_forecast(spec: RunSpec, precision: Precision, device: torch.device) -> PeakForecast:
    """Rehearse a training step, on fake tensors where its operators allow it.

    Raises:
        ForecastUnavailable: no shape is given, or the step runs neither on fake tensors nor on few
            examples.
    """
    _refuse(spec, device)
    try:
        rehearsal = _Rehearsal(spec, precision, device, fake=True)
        rehearsal.peak(spec.train.batch_size)
    except RunnerError:
        raise
    # Whatever fails on fake tensors may work on real ones; the forecast says so (`fallback`).
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        fallback = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        return PeakForecast(_extrapolated(spec, precision, device), fallback)
    return PeakForecast(rehearsal.peak)


def _refuse(spec: RunSpec, device: torch.device) -> None:
    """Raise ForecastUnavailable where a rehearsal would not show the peak."""
    if is_tpu(device):
        raise ForecastUnavailable("a TPU's compiler decides what a step holds.")
    if spec.optimizer.get("_target_") == "torch.optim.LBFGS":
        raise ForecastUnavailable(
            "optimizer=lbfgs keeps more with every step, up to its history_size."
        )


def _refuse_too_large(spec: RunSpec, precision: Precision, device: torch.device) -> None:
    """Raise ForecastUnavailable where even a real step on few examples does not fit into memory."""
    size = 0
    room = USABLE_MEMORY_SHARE * free_memory(device)
    # A model that reads its own values cannot be built without memory: it is not refused.
    with suppress(NotImplementedError, RuntimeError), META_DEVICE:
        model = build_group("model", spec.model)
        materialize_lazy_layers(spec, model, META_DEVICE)
        size = float32_bytes(model)
    # Weights, gradients and two averages in float32; where most weights are frozen, the weights
    # alone, before they are packed.
    needs = size * (1.5 if precision.freezes else 4)
    if needs > room:
        raise ForecastUnavailable(
            f"its operators want real numbers, and steps on a few take about {needs / GIB:.1f} of "
            f"the {room / GIB:.1f} GiB that may be used."
        )


def _extrapolated(
    spec: RunSpec, precision: Precision, device: torch.device
) -> Callable[[int], MemoryBreakdown]:
    """Return the peak as a function of the batch size, by extrapolation from two real steps."""
    _refuse_too_large(spec, precision, device)
    try:
        rehearsal = _Rehearsal(spec, precision, device, fake=False)
        less = rehearsal.timeline(REAL_STEP_EXAMPLES)
        more = rehearsal.timeline(2 * REAL_STEP_EXAMPLES)
    except RunnerError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ForecastUnavailable(f"its step does not run on random inputs: {reason}") from error
    # Moments are paired by their operators; with others, none of one step belongs to the other's.
    if len(less) != len(more):
        raise ForecastUnavailable(
            f"steps of {REAL_STEP_EXAMPLES} and of {2 * REAL_STEP_EXAMPLES} examples differ in "
            "their operators."
        )

    def peak(size: int) -> MemoryBreakdown:
        share = (size - REAL_STEP_EXAMPLES) / REAL_STEP_EXAMPLES
        moments = [_extrapolate(*pair, share) for pair in zip(less, more, strict=True)]
        return max(moments, key=sum)

    return peak


def _extrapolate(less: MemoryBreakdown, more: MemoryBreakdown, share: float) -> MemoryBreakdown:
    """Return the first breakdown plus a share of the difference to the second."""
    pairs = zip(less, more, strict=True)
    return MemoryBreakdown(*(round(a + (b - a) * share) for a, b in pairs))


def build_fake_model(spec: RunSpec, precision: Precision) -> BuiltModel:
    """Build and convert the model on the meta device, which takes no memory.

    Where the model's code reads values, it is built on the CPU.
    """
    try:
        return build_model(spec, precision, META_DEVICE, made_on=META_DEVICE)
    except RunnerError:
        raise
    except (NotImplementedError, RuntimeError):
        return build_model(spec, precision, torch.device("cpu"))


class _Rehearsal:
    """A run's model with its optimizers, whose state is made, ready for steps on any batch size."""

    def __init__(
        self, spec: RunSpec, precision: Precision, device: torch.device, fake: bool
    ) -> None:
        self.spec = spec
        self.device = device
        self.peak = cache(lambda size: max(self.timeline(size), key=sum))
        # Tensors that a module holds apart from its parameters and buffers stay real.
        self.tensors = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
        # In float32 before it is converted, and on the CPU: for another device it does not count.
        making = MemoryTracker(kind=WEIGHTS)
        with making if device.type == "cpu" else nullcontext():
            if fake:
                built = build_fake_model(spec, precision)
            else:
                built = build_model(spec, precision, device)
        self.making = making.timeline
        model = built.model
        with self.tensors:
            if fake:
                _replace_by_fakes(model, device)
            # A schedule needs the number of steps of a run, and changes no tensor's size.
            without_schedule = replace(spec, scheduler={})
            task = build_group("task", spec.task)
            setup = TrainingSetup(without_schedule, precision, task, device)
            self.state = build_state(setup, model, total_steps=1)
            # A fake found-inf has no value that could decide about the update.
            self.state.scale.step = lambda optimizer, found_inf: optimizer.step()
            # What a compiler holds is not predicted.
            eager = replace(spec, train=replace(spec.train, compile=False))
            prepare_model(eager, precision, device, model)
            model.train()
            self._make_optimizer_state()

    def _make_optimizer_state(self) -> None:
        """Step once with gradients of zero: optimizers make their state in the first step."""
        for p in self.state.trainable_parameters:
            p.grad = torch.zeros_like(p)
        for scheduled in self.state.optimizers:
            scheduled.optimizer.step()
        for p in self.state.trainable_parameters:
            p.grad = None

    def timeline(self, size: int) -> list[MemoryBreakdown]:
        """Return what is held while the model is made and after each operator of a step.

        Args:
            size: examples of a micro-batch.
        """
        state = self.state
        train = self.spec.train
        precision = state.precision
        with self.tensors, precision.session(state.model, self.device):
            batches = [example_batch(self.spec, size, self.device) for _ in range(train.accumulate)]
            tracker = MemoryTracker(accumulates=precision.kernels() == "float32_accumulate")
            tracker.add(WEIGHTS, *state.model.parameters(), *state.model.buffers())
            tracker.add(OPTIMIZER, *state.optimizer_tensors())
            tracker.add(ACTIVATIONS, *tree_leaves(batches))
            with tracker.gradients_of(state.trainable_parameters), tracker:
                # An evaluation's step compares half-precision weights before and after it.
                watch = Stagnation(state) if precision.storage.itemsize == 2 else None
                state.set_update_hook(tracker.begin_update)
                train_step(state, batches[:2])  # further micro-batches hold what the second does
                if watch is not None:
                    watch.close()
                # Its copies of the weights are freed before the evaluation.
                del watch
                self._evaluate(*batches[0])
        return [*self.making, *tracker.timeline]

    @torch.no_grad()
    def _evaluate(self, inputs: Any, target: Any) -> None:
        """Compute what an evaluation computes with a batch."""
        state = self.state
        precision = state.precision
        state.model.eval()
        with precision.eval_context(state.plain_model), precision.forward(self.device):
            output = state.model(precision.cast(inputs))
        dtype = precision.loss_dtype
        state.task.totals(cast_nest(output, dtype), cast_nest(target, dtype))
        state.model.train()


def _replace_by_fakes(model: nn.Module, device: torch.device) -> None:
    """Put fake tensors in the place of a model's own; tied ones stay tied.

    Raises:
        NotImplementedError: the model holds tensors of a library's class.
    """
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        # A fake of the plain class would hide what a library's class packs.
        if type(tensor) not in (Tensor, nn.Parameter):
            raise NotImplementedError(type(tensor).__name__)
        if id(tensor) not in fakes:
            empty = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
            )
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return fakes[id(tensor)]

    for module in model.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):
            held |= {name: fake(t) for name, t in held.items() if t is not None}
