"""Compare what each module's own code does to a reference's numbers, and what rounding explains.

The reference's tensor is put in the place of each tensor that crosses a boundary, in the forward
and in the backward, so that no error of one module reaches another.

A module's expected error is measured: the reference's own module gets the reference's inputs,
weights and output gradients, each element off by a random share of the unit roundoff of the format
in which the other execution holds it, and the result is compared with the reference's. To this the
rounding of the result itself is added. So a module that amplifies errors is allowed more.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.core import Precision, TrainState, module_tape, tensor_facts
from runner.diagnostics.divergence.boundaries import Boundary, Visitor
from runner.diagnostics.divergence.reference import (
    GivenTensors,
    Reference,
    generator_states,
    set_generator_states,
)
from runner.diagnostics.divergence.tensor_error import TensorError, measure_error, no_error
from runner.diagnostics.module_tensors import named_modules
from runner.precision.casting import KeptInFloat32
from runner.precision.conversion import is_converted
from runner.precision.layers.experts import by_expert, stack_names

SEED = 2**40 + 1
"""Of the generator that draws the perturbations."""
POOL_SIZE = 2**20
"""Random numbers that are drawn; drawing them for every tensor would take as long as a step."""
POOL_STEP = 1_000_003
"""By how many numbers the next tensor begins later in the pool: a prime, so that places differ."""
TF32 = 2.0**-11
"""Unit roundoff of float32 operands in TF32 products, which have 10 stored bits of significand."""


class Roundoffs:
    """The unit roundoffs with which an execution computes; 0 where none is noted.

    Attributes:
        tensors: by boundary, of the tensor's dtype, or of that which it was passed on from.
        tensor_gradients: by boundary, the same of the tensor's gradient.
        code: by module, of its own code: the widest of the dtypes that it takes and returns, or of
            the narrow format that a converted layer multiplies in.
        gradients: by module, of a converted layer's output gradients.
        parameters: of the dtype in which autocast may use any parameter.
    """

    def __init__(self) -> None:
        self.tensors: defaultdict[Boundary, float] = defaultdict(float)
        self.tensor_gradients: defaultdict[Boundary, float] = defaultdict(float)
        self.code: defaultdict[str, float] = defaultdict(float)
        self.gradients: defaultdict[str, float] = defaultdict(float)
        self.parameters = 0.0


@dataclass(frozen=True)
class Execution:
    """A model in one precision, ready to compute.

    Attributes:
        label: for messages and pages.
        state: model, precision, task and device.
        scale: loss scale.
    """

    label: str
    state: TrainState
    scale: float = 1.0

    @property
    def precision(self) -> Precision:
        """Return the precision."""
        return self.state.precision

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return self.state.device


def narrow_dtype(precision: Precision) -> torch.dtype:
    """Return the narrower of the dtypes that a precision computes in and stores."""
    return max(precision.compute, precision.storage, key=tensor_facts.unit_roundoff)


def find_roundoffs(
    reference_execution: Execution, execution: Execution, reference: Reference, free: Reference
) -> Roundoffs:
    """Return the wider of the roundoffs of two executions.

    Args:
        reference_execution: of the reference.
        execution: is compared with it.
        reference: its tensors.
        free: tensors of the other execution.
    """
    roundoffs = Roundoffs()
    # A tensor that is narrower than the precision has it is a bug, which must not excuse itself.
    widest = tensor_facts.unit_roundoff(narrow_dtype(execution.precision))
    # Where the reference's modules pass a tensor on, it is as rounded as where it came from: what
    # one execution passes on the other may have cast, as float() of a float32 and of a bfloat16
    # tensor.
    by_tensor = defaultdict(float)
    by_boundary: dict[Boundary, float] = {}
    for boundary, value in reference.values.items():
        other_dtype = free.values.get(boundary, value).dtype
        other = min(tensor_facts.unit_roundoff(other_dtype), widest)
        roundoff = max(tensor_facts.unit_roundoff(value.dtype), other)
        by_boundary[boundary] = roundoff
        # What a module only passes on it has not rounded.
        if roundoff > by_tensor[id(value)]:
            by_tensor[id(value)] = roundoff
            owner = reference.owners[boundary]
            roundoffs.code[owner] = max(roundoffs.code[owner], roundoff)
        roundoffs.tensors[boundary] = by_tensor[id(value)]
    by_gradient = defaultdict(float)
    for boundary in reversed(by_boundary):
        if boundary in reference.gradients:
            key = id(reference.gradients[boundary])
            by_gradient[key] = max(by_boundary[boundary], by_gradient[key])
            roundoffs.tensor_gradients[boundary] = by_gradient[key]
    for one, tensors in ((reference_execution, reference), (execution, free)):
        _add_execution(roundoffs, one, tensors, reference.users)
    return roundoffs


def _add_execution(
    roundoffs: Roundoffs, execution: Execution, tensors: Reference, users: Mapping[Boundary, str]
) -> None:
    """Raise the roundoffs to those of an execution's own code, converted layers, products in TF32
    and autocast.

    Args:
        roundoffs: are raised.
        execution: computes.
        tensors: that it computed.
        users: by boundary, the module whose own code takes the tensor.
    """
    precision, device = execution.precision, execution.device
    uses_tf32 = precision.float32_matmul not in ("", "highest")
    narrow = narrow_dtype(precision)
    narrow_code = tensors.narrow_code
    rounding: set[str] = set()
    if narrow_code is not None:
        takers = [users.get(b, "") for b, t in tensors.values.items() if t.dtype is narrow]
        rounding = narrow_code.modules(takers)
    kept: set[nn.Module] = set()
    for name, module in named_modules(execution.state.plain_model):
        if uses_tf32:
            roundoffs.code[name] = max(roundoffs.code[name], TF32)
        if is_converted(module):
            forward, backward = precision.operand_roundoffs
            roundoffs.code[name] = max(roundoffs.code[name], forward)
            roundoffs.gradients[name] = max(roundoffs.gradients[name], backward)
        if isinstance(module, KeptInFloat32):
            kept.update(module.modules())  # type: ignore[attr-defined]
        # Where functions are not seen, the own code of any module that has modules may round.
        elif narrow_code is None and module not in kept and next(module.children(), None):
            rounding.add(name)
    roundoff = tensor_facts.unit_roundoff(narrow)
    for name in rounding:
        roundoffs.code[name] = max(roundoffs.code[name], roundoff)
    if precision.storage is torch.float32:
        with precision.forward(device):
            if torch.is_autocast_enabled(device.type):
                autocast = tensor_facts.unit_roundoff(torch.get_autocast_dtype(device.type))
                roundoffs.parameters = max(roundoffs.parameters, autocast)


class Perturber:
    """Changes tensors by a random share of a roundoff; the draws are the same for the same order.

    Args:
        roundoffs: of both executions.
        reference: whose tensors are perturbed.
        device: of the tensors.
        draw: number of the draw; others are other random numbers.
    """

    def __init__(
        self, roundoffs: Roundoffs, reference: Reference, device: torch.device, draw: int = 0
    ) -> None:
        self.roundoffs = roundoffs
        self._reference = reference
        self._generator = torch.Generator(device).manual_seed(SEED + draw)
        self._pool: Tensor | None = None
        self._place = 0

    def roundoff(self, boundary: Boundary) -> float:
        """Return the roundoff with which the module that takes a tensor may round it."""
        code = self.roundoffs.code[self._reference.users[boundary]]
        return max(code, self.roundoffs.tensors[boundary])

    def gradient_roundoff(self, boundary: Boundary) -> float:
        """Return the roundoff with which the module that computed a tensor may round its
        gradient."""
        owner = self._reference.owners[boundary]
        converted = self.roundoffs.gradients[owner]
        return max(self.roundoffs.code[owner], converted, self.roundoffs.tensor_gradients[boundary])

    def perturbed(self, tensor: Tensor, roundoff: float) -> Tensor:
        """Return tensor * (1 + r), r random and uniform in [-roundoff, roundoff]."""
        if tensor.is_complex():
            return torch.view_as_complex(self.perturbed(tensor_facts.real_view(tensor), roundoff))
        if not (roundoff and tensor.is_floating_point()):
            return tensor
        # In float32 at least: a narrow reference would round the change away.
        wide = tensor if tensor.dtype is torch.float64 else tensor.float()
        # They come from one pool, each time from another place; large tensors repeat it.
        count = wide.numel()
        if self._pool is None or self._pool.dtype is not wide.dtype:
            pool = torch.empty(POOL_SIZE, dtype=wide.dtype, device=wide.device)
            self._pool = pool.uniform_(-1, 1, generator=self._generator)
        self._place += POOL_STEP
        pool = self._pool
        if count > POOL_SIZE:
            pool = pool.repeat(-(-count // POOL_SIZE) + 1)
        place = self._place % (pool.numel() - count + 1)
        draws = pool[place : place + count].view(wide.shape)
        return torch.addcmul(wide, wide, draws, value=roundoff)

    @contextmanager
    def perturbed_parameters(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which the model's parameters are as rounding may have them."""
        roundoffs = defaultdict(float)
        for name, module in named_modules(model):
            for parameter in module.parameters(recurse=False):
                # A tied parameter belongs to several modules, and is changed once.
                roundoffs[parameter] = max(self.roundoffs.code[name], roundoffs[parameter])
        changed = {p: r for p, r in roundoffs.items() if tensor_facts.unit_roundoff(p.dtype) and r}
        before = {parameter: parameter.detach().clone() for parameter in changed}
        for parameter, roundoff in changed.items():
            parameter.data.copy_(self.perturbed(parameter.detach(), roundoff))
        try:
            yield
        finally:
            for parameter, value in before.items():
                parameter.data.copy_(value)


@dataclass
class _OwnCode:
    """What a module's own code computes in one call, and from what.

    Attributes:
        computed: by boundary, a tensor that it computed, and the reference's gradient; in the
            backward, the gradient that is put in for it.
        taken: boundaries at which it takes tensors, whose gradients it computes.
    """

    computed: dict[Boundary, tuple[Tensor, Tensor]] = field(default_factory=dict)
    taken: list[Boundary] = field(default_factory=list)


class _Entry(torch.autograd.Function):
    """The identity, whose gradient is given to a function and goes no further."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, tensor: Tensor, receive: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.receive = receive
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.receive(gradient)
        return None, None, None


class Substitution(Visitor):
    """Gives every module the reference's tensors and gradients, and compares what it computes.

    The backward of a call runs when the call ends: its own code reaches no other call's, so that
    its graph is freed at once.

    Args:
        reference: whose tensors are put in.
        execution: whose model computes; its loss scale multiplies gradients on their way in.
        copies: whether modules get copies, as a model with operations in place needs.
        perturber: changes the tensors and gradients that are put in; None leaves them.

    Attributes:
        forward: errors of the tensors by boundary.
        backward: errors of their gradients by boundary.
    """

    def __init__(
        self,
        reference: Reference,
        execution: Execution,
        copies: bool,
        perturber: Perturber | None = None,
    ) -> None:
        self.forward: dict[Boundary, TensorError] = {}
        self.backward: dict[Boundary, TensorError] = {}
        self._reference = reference
        self._execution = execution
        self._copies = copies
        # The size of the errors alone is used of a perturbed reference.
        self._counts = perturber is None
        self._perturber = perturber or Perturber(Roundoffs(), reference, execution.device)
        self._given = GivenTensors()
        # A leaf, so that what is put in has a backward.
        self._start = torch.zeros((), requires_grad=True)
        # The calls that run, the innermost last; the first is the code around the model.
        self._running = [_OwnCode()]

    def begin_call(self, module: str, call: int) -> None:
        """Set the generators as they were before this call in the reference."""
        self._running.append(_OwnCode())
        states = self._reference.generators.get((module, call))
        if states is not None:
            set_generator_states(states, self._execution.device)

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor with the reference's, and return the reference's."""
        reference = self._reference
        expected = reference.values.get(boundary)
        if expected is None:
            return tensor
        takes = self._running[-1]
        computes = self._running[-2] if len(self._running) > 1 else takes
        if boundary.side == "out":
            computes, takes = takes, computes
        source = self._given.source(tensor)
        # What one execution passes on, the other may have changed.
        if source is not None and reference.values.get(source) is expected:
            self.forward[boundary] = no_error(expected)
        else:
            source = None
            self.forward[boundary] = measure_error(tensor, expected, counts=self._counts)
        if expected.shape != tensor.shape:
            return tensor
        perturber = self._perturber
        roundoff = perturber.roundoff(boundary)
        if source is not None and perturber.roundoff(source) == roundoff:
            put_in = tensor.detach()
        else:
            put_in = perturber.perturbed(expected, roundoff).to(tensor).detach()
        if tensor.requires_grad:
            if boundary in reference.gradients:
                computes.computed[boundary] = (tensor, reference.gradients[boundary])
            takes.taken.append(boundary)
            receive = partial(self._compare_gradient, takes, boundary)
            put_in = _Entry.apply(self._start, put_in, receive)
        if self._copies:
            put_in = put_in.clone()
        self._given.add(boundary, put_in)
        return put_in

    def visit_written(
        self, boundary: Boundary, caller: Tensor, tensor: Tensor, writes: bool
    ) -> None:
        """Compare an input that either execution's module wrote into, and write what the
        reference's wrote into the caller's tensor, for modules get copies."""
        written = self._reference.values.get(boundary)
        before = self._reference.values.get(boundary._replace(side="in"))
        if before is None or not (writes or written is not None):
            return
        expected = before if written is None else written
        self.forward[boundary] = measure_error(tensor, expected)
        if written is not None and written.shape == caller.shape:
            # Without autograd, as if the caller had got this tensor.
            caller.data.copy_(written)

    def weigh(self, module: str, tensor: Tensor) -> Tensor:
        """Return the tensor, perturbed as the module's own code may round it on its way."""
        return self._perturber.perturbed(tensor, self._perturber.roundoffs.code[module])

    def end_call(self, module: str, call: int) -> None:
        """Compute the call's gradients from the reference's gradients of what it computed."""
        code = self._running.pop()
        execution = self._execution
        if code.computed:
            for boundary, (tensor, gradient) in code.computed.items():
                roundoff = self._perturber.gradient_roundoff(boundary)
                put_in = self._perturber.perturbed(gradient, roundoff)
                if execution.scale != 1.0:
                    put_in = put_in * execution.scale
                code.computed[boundary] = (tensor, put_in.to(tensor))
            tensors, gradients = zip(*code.computed.values(), strict=True)
            # A backward that draws, as one that rounds stochastically, comes later in a step.
            drawn = generator_states(execution.device)
            off = torch.autocast(execution.device.type, enabled=False)
            state = execution.state
            with off, state.precision.backward(state.device, state.plan):
                # The graph is kept for a tensor that reaches another call by no boundary.
                torch.autograd.backward(tensors, gradients, retain_graph=True)
            set_generator_states(drawn, execution.device)
            # Else the graph, which refers to the code, would keep itself alive.
            code.computed.clear()
        for boundary in code.taken:
            expected = self._reference.gradients.get(boundary)
            if expected is not None and boundary not in self.backward:
                # The module cuts the gradient off: it computes one of zero.
                zeros = torch.zeros_like(expected)
                self.backward[boundary] = measure_error(zeros, expected)

    def _compare_gradient(self, code: _OwnCode, boundary: Boundary, gradient: Tensor) -> None:
        """Compare a gradient that a module's own code computes.

        Args:
            code: that computes it.
            boundary: at which the code took the tensor.
            gradient: multiplied by the loss scale.
        """
        expected = self._reference.gradients.get(boundary)
        # A later backward through the same graph brings what another call adds.
        if expected is None or boundary in self.backward:
            return
        for source, (_, put_in) in code.computed.items():
            is_same = put_in.data_ptr() == gradient.data_ptr() and put_in.shape == gradient.shape
            if is_same and self._reference.gradients[source] is expected:
                self.backward[boundary] = no_error(expected)
                return
        scale = self._execution.scale
        self.backward[boundary] = measure_error(gradient, expected, scale, self._counts)


class PassErrors(NamedTuple):
    """The errors of one pass over a model.

    Attributes:
        forward: of the tensors, by boundary.
        backward: of their gradients.
        gradients: of the parameters' gradients, by the parameter's name.
        buffers: of the buffers after the pass, by the buffer's name.
    """

    forward: Mapping[Boundary, TensorError]
    backward: Mapping[Boundary, TensorError]
    gradients: Mapping[str, TensorError]
    buffers: Mapping[str, TensorError]

    def larger(self, other: "PassErrors") -> "PassErrors":
        """Return the larger error of each tensor of two passes."""
        larger: list[dict[Any, TensorError]] = [{**errors} for errors in self]
        for errors, others in zip(larger, other, strict=True):
            for key, error in others.items():
                if key not in errors or error.error > errors[key].error:
                    errors[key] = error
        return PassErrors(*larger)


def state_errors(
    model: nn.Module,
    reference: Reference,
    gradients: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    scale: float = 1.0,
) -> tuple[dict[str, TensorError], dict[str, TensorError]]:
    """Return the errors of the gradients of a model's parameters, and of its buffers, by name.

    Args:
        model: whose they are.
        reference: with which they are compared.
        gradients: by the parameter's name.
        buffers: by name, after the pass.
        scale: loss scale of the gradients.
    """
    gradient_errors = {}
    stacks = stack_names(model)
    for name, parameter in model.named_parameters():
        expected = reference.parameter_gradients.get(name)
        gradient = gradients.get(name)
        if gradient is None and parameter.requires_grad:
            gradient = torch.zeros_like(parameter)  # the model does not use it, or cuts it off
        if expected is not None and gradient is not None:
            pairs = (by_expert(name, each, stacks) for each in (gradient, expected))
            for (part, own), (_, other) in zip(*pairs, strict=True):
                gradient_errors[part] = measure_error(own, other, scale)
    buffer_errors = {}
    for name, expected in reference.buffers.items():
        if name in buffers and _is_comparable(buffers[name], expected):
            buffer_errors[name] = measure_error(buffers[name], expected)
    return gradient_errors, buffer_errors


def other_weights(model: nn.Module, reference: nn.Module) -> list[str]:
    """Return the modules, and the experts' matrices, whose parameters differ from a reference's by
    more than their formats' rounding, in order; without those that a conversion has packed."""
    others = dict(reference.named_parameters())
    stacks = stack_names(model)
    modules = []
    for name, parameter in model.named_parameters():
        other = others.get(name)
        if other is None or not _is_comparable(parameter, other):
            continue
        roundoff = max(
            tensor_facts.unit_roundoff(parameter.dtype), tensor_facts.unit_roundoff(other.dtype)
        )
        pairs = (by_expert(name, each.detach(), stacks) for each in (parameter, other))
        for (part, own), (_, expected) in zip(*pairs, strict=True):
            error = measure_error(own, expected.to(own.device), counts=False)
            if error.relative > roundoff:
                modules.append(
                    part if name in stacks else name.rpartition(".")[0] or module_tape.ROOT
                )
    return [*dict.fromkeys(modules)]


def _is_comparable(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape and hold numbers of one kind, as those of a module
    that was converted may not."""
    is_same_kind = tensor.is_floating_point() == other.is_floating_point()
    return tensor.shape == other.shape and is_same_kind
