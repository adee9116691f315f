"""Predict the peak memory of training, by kind, before anything is trained.

The run's own step (runner.training.step) and an evaluation are rehearsed on fake tensors, which
have shapes and no memory, and runner.diagnostics.memory.memory_tracker adds up the storages that
every operator makes and drops. Left out are a data set held in memory, a checkpoint's copy, and
what a compiler or a GPU's libraries take.
bench/memory_plan.py holds it against the allocator.

torch's MemTracker (torch.distributed._tools) adds up the same. It keeps alive what an
autograd.Function keeps for its backward (bnb-int8-training: a fifth too much), sees nothing of what
kernels take inside themselves, and knows the peak alone, not the moments that lead to it.

Where operators need values or addresses (4-bit weights, some optimizers), two real steps are run,
one on FEW examples and one on twice as many. They show what an example adds to each moment of a
step, and the peak is that of the extrapolated moments. To extrapolate the two peaks would mislead:
with few examples another moment is the highest. A forecast says when it was made in this way.
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

from runner.config.schema import LARGEST_FORECAST_BATCH, RunSpec
from runner.config.targets import build_group
from runner.diagnostics.memory.limits import USABLE, free_memory
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

META = torch.device("meta")
FEW = 2


def predict_peak(
    spec: RunSpec, precision: Precision, device: torch.device, batch_size: int | None = None
) -> MemoryBreakdown:
    """Predict the peak of a training step.

    Args:
        spec: data.meta tells the shape of an example.
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
    """Return the largest batch size whose predicted peak is within `room` bytes, of
    train.batch_size and the powers of two up to LARGEST_FORECAST_BATCH; None where a single example
    is too much. Raises ForecastUnavailable."""
    return largest_fitting_batch(
        peak_forecast(spec, precision, device), spec.train.batch_size, room
    )


def largest_fitting_batch(
    peak: Callable[[int], MemoryBreakdown], own: int, room: float
) -> int | None:
    """Return the largest batch size whose predicted peak is within `room` bytes.

    Args:
        peak: a forecast.
        own: a size to try in addition to the powers of two.
        room: bytes.

    Returns:
        The size; None where a single example is too much.
    """
    sizes = sorted({own, *(2**power for power in range(LARGEST_FORECAST_BATCH.bit_length()))})
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
    # Whatever fails on fake tensors may work on real ones; the forecast says that it is of these.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        fallback = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        return PeakForecast(_extrapolated(spec, precision, device), fallback)
    return PeakForecast(rehearsal.peak)


def _refuse(spec: RunSpec, device: torch.device) -> None:
    """Raise ForecastUnavailable where no rehearsal can tell the peak."""
    if is_tpu(device):
        raise ForecastUnavailable("a TPU's compiler decides what a step holds.")
    if spec.optimizer.get("_target_") == "torch.optim.LBFGS":
        raise ForecastUnavailable(
            "optimizer=lbfgs keeps more with every step, up to its history_size."
        )


def _refuse_too_large(spec: RunSpec, precision: Precision, device: torch.device) -> None:
    """Raise ForecastUnavailable where even a real step on few examples does not fit into memory.

    It takes weights, gradients and two averages; where most weights are frozen, the weights alone,
    before they are packed.
    """
    size = 0
    room = USABLE * free_memory(device)
    with suppress(NotImplementedError, RuntimeError), META:
        model = build_group("model", spec.model)
        materialize_lazy_layers(spec, model, META)
        size = float32_bytes(model)
    needs = size * (1.5 if precision.freezes else 4)
    if needs > room:
        raise ForecastUnavailable(
            f"its operators want real numbers, and steps on a few take about {needs / GIB:.1f} of "
            f"the {room / GIB:.1f} GiB that may be used."
        )


def _extrapolated(
    spec: RunSpec, precision: Precision, device: torch.device
) -> Callable[[int], MemoryBreakdown]:
    """Return the peak by extrapolation from two real steps."""
    _refuse_too_large(spec, precision, device)
    try:
        rehearsal = _Rehearsal(spec, precision, device, fake=False)
        less, more = rehearsal.timeline(FEW), rehearsal.timeline(2 * FEW)
    except RunnerError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise ForecastUnavailable(f"its step does not run on random inputs: {said}") from error
    if len(less) != len(more):
        raise ForecastUnavailable(
            f"steps of {FEW} and of {2 * FEW} examples differ in their operators."
        )

    def peak(size: int) -> MemoryBreakdown:
        share = (size - FEW) / FEW
        moments = zip(less, more, strict=True)
        line = (
            MemoryBreakdown(*(round(a + (b - a) * share) for a, b in zip(*m, strict=True)))
            for m in moments
        )
        return max(line, key=sum)

    return peak


def build_fake_model(spec: RunSpec, precision: Precision) -> BuiltModel:
    """Build and convert the model on the meta device, which takes no memory.

    Where the model's code reads values, it is built on the CPU.
    """
    try:
        return build_model(spec, precision, META, made_on=META)
    except RunnerError:
        raise
    except (NotImplementedError, RuntimeError):
        return build_model(spec, precision, torch.device("cpu"))


class _Rehearsal:
    """A run's model with its optimizers, whose state is made, ready for steps on any batch size."""

    def __init__(
        self, spec: RunSpec, precision: Precision, device: torch.device, fake: bool
    ) -> None:
        self.spec, self.device = spec, device
        self.peak = cache(lambda size: max(self.timeline(size), key=sum))
        self.tensors = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
        making = MemoryTracker(kind=WEIGHTS)  # in float32 before it is converted, and on the CPU
        with making if device.type == "cpu" else nullcontext():
            made = (
                build_fake_model(spec, precision) if fake else build_model(spec, precision, device)
            )
        self.making, model = making.timeline, made.model
        with self.tensors:
            if fake:
                _replace(model, device)
            task = build_group("task", spec.task)
            setup = TrainingSetup(replace(spec, scheduler={}), precision, task, device)
            self.state = build_state(setup, model, total_steps=1)
            scale = self.state.scale
            scale.step = lambda optimizer, found_inf: optimizer.step()  # found-inf has no value
            prepare_model(
                replace(spec, train=replace(spec.train, compile=False)), precision, device, model
            )
            model.train()
            for p in self.state.trainable:
                p.grad = torch.zeros_like(p)
            for one in self.state.optimizers:
                one.optimizer.step()
            for p in self.state.trainable:
                p.grad = None

    def timeline(self, size: int) -> list[MemoryBreakdown]:
        """Return what is held while the model is made and after each operator of a step.

        Args:
            size: examples of a micro-batch.
        """
        state, train, precision = self.state, self.spec.train, self.state.precision
        with self.tensors, precision.session(state.model, self.device):
            batches = [example_batch(self.spec, size, self.device) for _ in range(train.accumulate)]
            tracker = MemoryTracker(accumulates=precision.kernels() == "float32_accumulate")
            tracker.add(WEIGHTS, *state.model.parameters(), *state.model.buffers())
            tracker.add(OPTIMIZER, *state.optimizer_tensors())
            tracker.add(ACTIVATIONS, *tree_leaves(batches))
            with tracker.gradients_of(state.trainable), tracker:
                # An evaluation's step compares half-precision weights before and after it.
                watch = Stagnation(state) if precision.storage.itemsize == 2 else None
                state.before_update = tracker.begin_update
                train_step(state, batches[:2])  # further micro-batches hold what the second does
                if watch is not None:
                    watch.close()
                del watch
                self._evaluate(*batches[0])
        return [*self.making, *tracker.timeline]

    @torch.no_grad()
    def _evaluate(self, inputs: Any, target: Any) -> None:
        """Compute what an evaluation computes with a batch."""
        state, precision = self.state, self.state.precision
        state.model.eval()
        with precision.eval_context(state.plain_model), precision.forward(self.device):
            output = state.model(precision.cast(inputs))
        dtype = precision.loss_dtype
        state.task.totals(cast_nest(output, dtype), cast_nest(target, dtype))
        state.model.train()


def _replace(model: nn.Module, device: torch.device) -> None:
    """Put fake tensors in the place of a model's own; tied ones stay tied.

    Raises:
        NotImplementedError: the model holds tensors of a library's class.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter):
            raise NotImplementedError(type(tensor).__name__)
        if id(tensor) not in made:
            empty = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
            )
            kept = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if kept else empty
        return made[id(tensor)]

    for module in model.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):
            held |= {name: fake(t) for name, t in held.items() if t is not None}
