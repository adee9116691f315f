"""Hold an execution against a reference: what arrives at each boundary, and what each module adds.

Two visitors. `Arrival` lets the execution run freely and compares what crosses each boundary, which
holds the errors of everything before it. `Substitution` puts the reference's tensor in the place of
each tensor that crosses a boundary, in the forward and in the backward, so that each comparison
shows what one module's own code does to the reference's own numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.core import module_tape, tensor_facts
from runner.diagnostics.divergence.boundaries import LOSS, Boundary, Visitor, is_choice_of_experts
from runner.diagnostics.divergence.reference import (
    Call,
    GivenTensors,
    Reference,
    TensorVersions,
    are_overwritten,
    generator_states,
    set_generator_states,
)
from runner.diagnostics.divergence.roundoffs import Execution, Perturber
from runner.diagnostics.divergence.tensor_error import TensorError, larger_errors, measure_error
from runner.precision.layers.experts import by_expert, stack_names


class ComparingVisitor(Visitor):
    """A visitor that compares what crosses the boundaries with a reference.

    Attributes:
        reference, execution: as given.
        forward: errors of the tensors by boundary.
        backward: errors of their gradients by boundary.
    """

    def __init__(self, reference: Reference, execution: Execution) -> None:
        self.forward: dict[Boundary, TensorError] = {}
        self.backward: dict[Boundary, TensorError] = {}
        self.reference = reference
        self.execution = execution
        self._given = GivenTensors()

    def _source(self, tensor: Tensor, expected: Tensor) -> Boundary | None:
        """Return the boundary from which modules only pass a tensor on, as the reference's do."""
        source = self._given.source(tensor)
        # What one execution passes on, the other may have changed.
        is_passed_on = source is not None and self.reference.values.get(source) is expected
        return source if is_passed_on else None


class Arrival(ComparingVisitor):
    """Compares the tensors of a free execution.

    Attributes:
        dtypes: dtypes of the tensors by boundary.
        calls: that the execution made.
        outputs: what the model returned, by boundary.
        flips: by layer of experts, share of the tokens that go to other experts than in the
            reference, in the layer's first call.
        writes_in_place: whether the model wrote into what crosses boundaries.
    """

    def __init__(self, reference: Reference, execution: Execution) -> None:
        super().__init__(reference, execution)
        self.flips: dict[str, float] = {}
        self._layers_of_experts = layers_of_experts(execution.state.plain_model)
        self.dtypes: dict[Boundary, torch.dtype] = {}
        self.calls: set[Call] = set()
        self.outputs: dict[Boundary, Tensor] = {}
        self.writes_in_place = False
        self._versions: TensorVersions = []
        # The gradient that was compared last, kept so that its memory is not another's.
        self._last: tuple[Boundary, Tensor] | None = None

    def begin_call(self, module: str, call: int) -> None:
        """Note the call; the execution draws its own random numbers."""
        self.calls.add((module, call))

    def end_call(self, module: str, call: int) -> None:
        """Find at the end of the forward whether tensors were written into."""
        if module == LOSS:
            self.writes_in_place = are_overwritten(self._versions)
            self._versions = []

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor, and later its gradient; return a view that tells them apart."""
        self.dtypes[boundary] = tensor.dtype
        if boundary.module == module_tape.ROOT and boundary.side == "out":
            self.outputs[boundary] = tensor.detach()
        expected = self.reference.values.get(boundary)
        if expected is None:
            return tensor
        is_mixture = boundary.module in self._layers_of_experts and boundary.call == 0
        if is_mixture and is_choice_of_experts(boundary, tensor) and tensor.shape == expected.shape:
            # A set of experts: their order changes nothing.
            flipped = tensor.sort(-1).values != expected.sort(-1).values
            self.flips[boundary.module] = flipped.any(-1).float().mean().item()
        source = self._source(tensor, expected)
        if source is not None:
            self.forward[boundary] = self.forward[source]
        else:
            self.forward[boundary] = self.reference.error(tensor, expected)
        given = tensor
        if tensor.requires_grad:
            given = tensor.view_as(tensor)
            given.register_hook(partial(self._compare_gradient, boundary))
        self._given.add(boundary, given)
        self._versions.append((given.detach(), given._version))
        return given

    def visit_written(
        self, boundary: Boundary, caller: Tensor, tensor: Tensor, writes: bool
    ) -> None:
        """Compare an input that the reference's module wrote into."""
        expected = self.reference.values.get(boundary)
        if expected is not None:
            self.forward[boundary] = self.reference.error(tensor, expected)

    def _compare_gradient(self, boundary: Boundary, gradient: Tensor) -> None:
        expected = self.reference.gradients.get(boundary)
        if expected is None:
            return
        if self._last is not None:
            source, last = self._last
            is_same = last.data_ptr() == gradient.data_ptr() and last.shape == gradient.shape
            if is_same and self.reference.gradients[source] is expected:
                self.backward[boundary] = self.backward[source]
                return
        self.backward[boundary] = self.reference.error(gradient, expected, self.execution.scale)
        self._last = (boundary, gradient)


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


class Substitution(ComparingVisitor):
    """Gives every module the reference's tensors and gradients, and compares what it computes.

    The backward of a call runs when the call ends: its own code reaches no other call's, so that
    its graph is freed at once.

    Args:
        reference: whose tensors are put in.
        execution: whose model computes; its loss scale multiplies gradients on their way in.
        copies: whether modules get copies, as a model with operations in place needs.
        perturber: changes the tensors and gradients that are put in; None leaves them.
    """

    def __init__(
        self,
        reference: Reference,
        execution: Execution,
        copies: bool,
        perturber: Perturber | None = None,
    ) -> None:
        super().__init__(reference, execution)
        self._copies = copies
        self._perturber = perturber
        # A leaf, so that what is put in has a backward.
        self._start = torch.zeros((), requires_grad=True)
        # Of the calls that run, the innermost last; the first is the code around the model.
        self._running = [_OwnCode()]

    def begin_call(self, module: str, call: int) -> None:
        """Set the generators as they were before this call in the reference."""
        self._running.append(_OwnCode())
        states = self.reference.generators.get((module, call))
        if states is not None:
            set_generator_states(states, self.execution.device)

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor with the reference's, and return the reference's."""
        reference = self.reference
        expected = reference.values.get(boundary)
        if expected is None:
            return tensor
        takes = self._running[-1]
        computes = self._running[-2] if len(self._running) > 1 else takes
        if boundary.side == "out":
            computes, takes = takes, computes
        source = self._source(tensor, expected)
        if source is None:
            counts = self._perturber is None
            self.forward[boundary] = reference.error(tensor, expected, counts=counts)
        else:
            self.forward[boundary] = reference.no_error(expected)
        if expected.shape != tensor.shape:
            return tensor
        put_in = self._put_in(boundary, source, tensor, expected)
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
        written = self.reference.values.get(boundary)
        before = self.reference.values.get(boundary._replace(side="in"))
        if before is None or not (writes or written is not None):
            return
        expected = before if written is None else written
        self.forward[boundary] = self.reference.error(tensor, expected)
        if written is not None and written.shape == caller.shape:
            # Without autograd, as if the caller had got this tensor.
            caller.data.copy_(written)

    def weigh(self, module: str, tensor: Tensor) -> Tensor:
        """Return the tensor, perturbed as the module's own code may round it on its way."""
        if self._perturber is None:
            return tensor
        return self._perturber.perturbed(tensor, self._perturber.code_roundoff(module))

    def _put_in(
        self, boundary: Boundary, source: Boundary | None, tensor: Tensor, expected: Tensor
    ) -> Tensor:
        """Return what takes the place of a tensor: the reference's, in the tensor's dtype."""
        perturber = self._perturber
        if perturber is None:
            return tensor.detach() if source is not None else expected.to(tensor.dtype).detach()
        roundoff = perturber.roundoff(boundary)
        if source is not None and perturber.roundoff(source) == roundoff:
            return tensor.detach()
        return perturber.perturbed(expected, roundoff).to(tensor.dtype).detach()

    def end_call(self, module: str, call: int) -> None:
        """Compute the call's gradients from the reference's gradients of what it computed."""
        code = self._running.pop()
        execution = self.execution
        if code.computed:
            for boundary, (tensor, gradient) in code.computed.items():
                put_in = gradient
                if self._perturber is not None:
                    roundoff = self._perturber.gradient_roundoff(boundary)
                    put_in = self._perturber.perturbed(gradient, roundoff)
                if execution.scale != 1.0:
                    put_in = put_in * execution.scale
                code.computed[boundary] = (tensor, put_in.to(tensor.dtype))
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
            expected = self.reference.gradients.get(boundary)
            if expected is not None and boundary not in self.backward:
                # The module cuts the gradient off: it computes one of zero.
                zeros = torch.zeros_like(expected)
                self.backward[boundary] = self.reference.error(zeros, expected)

    def _compare_gradient(self, code: _OwnCode, boundary: Boundary, gradient: Tensor) -> None:
        """Compare a gradient that a module's own code computes.

        Args:
            code: that computes it.
            boundary: at which the code took the tensor.
            gradient: multiplied by the loss scale.
        """
        expected = self.reference.gradients.get(boundary)
        # A later backward through the same graph brings what another call adds.
        if expected is None or boundary in self.backward:
            return
        for source, (_, put_in) in code.computed.items():
            is_same = put_in.data_ptr() == gradient.data_ptr() and put_in.shape == gradient.shape
            if is_same and self.reference.gradients[source] is expected:
                self.backward[boundary] = self.reference.no_error(expected)
                return
        scale, counts = self.execution.scale, self._perturber is None
        self.backward[boundary] = self.reference.error(gradient, expected, scale, counts)


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
        return PassErrors(
            larger_errors(self.forward, other.forward),
            larger_errors(self.backward, other.backward),
            larger_errors(self.gradients, other.gradients),
            larger_errors(self.buffers, other.buffers),
        )


def pass_errors(visitor: ComparingVisitor) -> PassErrors:
    """Return the errors of a pass that has ended, while the model still holds its gradients."""
    execution, reference = visitor.execution, visitor.reference
    model = execution.state.plain_model
    gradients = {}
    stacks = stack_names(model)
    for name, parameter in model.named_parameters():
        expected = reference.parameter_gradients.get(name)
        gradient = parameter.grad
        if gradient is None and parameter.requires_grad:
            gradient = torch.zeros_like(parameter)  # the model does not use it, or cuts it off
        if expected is not None and gradient is not None:
            pairs = (by_expert(name, each, stacks) for each in (gradient, expected))
            for (part, own), (_, other) in zip(*pairs, strict=True):
                gradients[part] = measure_error(own, other, execution.scale)
    buffers = {}
    for name, buffer in model.named_buffers():
        expected = reference.buffers.get(name)
        if expected is not None and _is_comparable(buffer, expected):
            buffers[name] = measure_error(buffer, expected)
    return PassErrors(visitor.forward, visitor.backward, gradients, buffers)


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


def layers_of_experts(model: nn.Module) -> set[str]:
    """Return the names of the modules that hold, or may hold, stacked weights of experts."""
    return {name.rpartition(".")[0] or module_tape.ROOT for name in stack_names(model)}


def _is_comparable(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape and hold numbers of one kind, as those of a module
    that was converted may not."""
    is_same_kind = tensor.is_floating_point() == other.is_floating_point()
    return tensor.shape == other.shape and is_same_kind
