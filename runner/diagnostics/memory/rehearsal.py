"""Rehearse a training step and an evaluation, in which all that they hold is tracked."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from runner.config.schema import RunSpec
from runner.data.loader import Batch
from runner.data.task_target import build_task
from runner.diagnostics.memory.memory_tracker import (
    ACTIVATIONS,
    OPTIMIZER,
    WEIGHTS,
    MemoryBreakdown,
    MemoryTracker,
)
from runner.precision.contract import Precision
from runner.training.compile import prepare_model
from runner.training.evaluation import Stagnation, set_evaluation_mode
from runner.training.model import build_model, build_on_meta
from runner.training.model_call import call_model
from runner.training.setup import TrainingSetup, build_state
from runner.training.state import TrainState
from runner.training.step import train_step
from runner.utils.modules import set_training

_REAL = nullcontext()


@dataclass(eq=False)
class Rehearsal:
    """Steps of a training state on any batch size, in which all that they hold is tracked.

    Args:
        state: the state of its optimizers is made already.
        micro_batches: makes the micro-batches of a step, of so many examples each.
        tensors: the context of fake tensors; none for real ones.
        making: what was held while the model was made.
    """

    state: TrainState
    micro_batches: Callable[[int], list[Batch]]
    tensors: AbstractContextManager[object] = _REAL
    making: Sequence[MemoryBreakdown] = ()

    def __post_init__(self) -> None:
        self.peak = cache(lambda size: max(self.timeline(size), key=sum))

    def timeline(self, size: int) -> list[MemoryBreakdown]:
        """Return what is held while the model is made and after each operator of a step.

        Args:
            size: examples of a micro-batch.
        """
        state = self.state
        precision = state.precision
        with self.tensors, precision.session(state.model, state.device):
            batches = self.micro_batches(size)
            tracker = MemoryTracker(accumulates=precision.kernels() == "float32_accumulate")
            tracker.add(WEIGHTS, *state.model.parameters(), *state.model.buffers())
            tracker.add(OPTIMIZER, *state.optimizer_tensors())
            if state.average is not None:
                tracker.add(OPTIMIZER, *state.average.tensors())
            tracker.add(ACTIVATIONS, *tree_leaves(batches))
            set_training(state.model)
            with tracker.gradients_of(state.trainable_parameters), tracker:
                # An evaluation's step compares half-precision weights before and after it.
                watch = Stagnation(state)
                state.set_update_hook(tracker.begin_update)
                train_step(state, batches[:2])  # further micro-batches hold what the second does
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
        # Generators have no state on fake tensors that could be saved.
        set_evaluation_mode(state.model, state.task)
        with precision.eval_context(state.plain_model), precision.forward(state.device):
            output = call_model(state.model, precision.cast(inputs))
        state.task.evaluation_totals(*precision.loss_pair(output, target))


def build_rehearsal(
    spec: RunSpec,
    precision: Precision,
    device: torch.device,
    micro_batches: Callable[[int], list[Batch]],
    fake: bool,
) -> Rehearsal:
    """Build a run's model with its optimizers, on fake tensors or in memory."""
    # Tensors that a module holds apart from its parameters and buffers stay real.
    tensors = FakeTensorMode(allow_non_fake_inputs=True) if fake else _REAL
    # In float32 before it is converted, and on the CPU: for another device it does not count.
    making = MemoryTracker(kind=WEIGHTS)
    with making if device.type == "cpu" else nullcontext():
        if fake:
            built = build_on_meta(partial(build_model, spec, precision))
        else:
            built = build_model(spec, precision, device)
    model = built.model
    with tensors:
        if fake:
            _replace_by_fakes(model, device)
        # A schedule needs the number of steps of a run, and changes no tensor's size.
        without_schedule = replace(spec, scheduler={})
        task = build_task(spec.task)
        setup = TrainingSetup(without_schedule, precision, task, device)
        state = build_state(setup, model, total_steps=1)
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
