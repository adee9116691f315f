"""Hold an execution against a reference: what arrives at each boundary, and what each module adds.

Two visitors. `Arrival` lets the execution run freely and compares what crosses each boundary, which
holds the errors of everything before it. `Substitution` puts the reference's tensor in the place of
each tensor that crosses a boundary, in the forward and in the backward, so that each comparison
shows what one module's own code does to the reference's own numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.diagnostics.divergence.boundaries import LOSS, ROOT, Boundary
from runner.diagnostics.divergence.expected_error import Perturber
from runner.diagnostics.divergence.reference import (
    Call,
    GivenTensors,
    Reference,
    Versions,
    generator_states,
    set_generator_states,
)
from runner.diagnostics.divergence.roundoffs import Execution
from runner.diagnostics.divergence.tensor_error import TensorError, measure_error

Errors = dict[Boundary, TensorError]


def _error(
    reference: Reference, tensor: Tensor, wanted: Tensor, scale: float = 1.0, counts: bool = True
) -> TensorError:
    """Return the error of a tensor against one of the reference's own."""
    return measure_error(tensor, wanted, scale, counts, reference.norm(wanted))


class Arrival:
    """A visitor that compares the tensors of a free execution with a reference.

    Attributes:
        forward: errors of the tensors by boundary.
        backward: errors of their gradients by boundary.
        dtypes: dtypes of the tensors by boundary.
        calls: that the execution made.
        outputs: what the model returned, by boundary.
        writes_in_place: whether the model wrote into what crosses boundaries.
    """

    def __init__(self, reference: Reference, scale: float) -> None:
        self.forward: Errors = {}
        self.backward: Errors = {}
        self.dtypes: dict[Boundary, torch.dtype] = {}
        self.calls: set[Call] = set()
        self.outputs: dict[Boundary, Tensor] = {}
        self.writes_in_place = False
        self._reference = reference
        self._scale = scale
        self._given = GivenTensors()
        self._versions = Versions()
        # The gradient that was compared last, kept so that its memory is not another's.
        self._last: tuple[Boundary, Tensor] | None = None

    def begin_call(self, module: str, call: int) -> None:
        """Note the call; the execution draws its own random numbers."""
        self.calls.add((module, call))

    def end_call(self, module: str, call: int) -> None:
        """Find at the end of the forward whether tensors were written into."""
        if module == LOSS:
            self.writes_in_place = self._versions.changed()
            self._versions = Versions()

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor, and later its gradient; return a view that tells them apart."""
        self.dtypes[boundary] = tensor.dtype
        if boundary.module == ROOT and boundary.side == "out":
            self.outputs[boundary] = tensor.detach()
        wanted = self._reference.values.get(boundary)
        if wanted is None:
            return tensor
        source = self._given.source(tensor)
        # What one execution passes on, the other may have changed.
        if source is not None and self._reference.values.get(source) is wanted:
            self.forward[boundary] = self.forward[source]
        else:
            self.forward[boundary] = _error(self._reference, tensor, wanted)
        given = tensor
        if tensor.requires_grad:
            given = tensor.view_as(tensor)
            given.register_hook(partial(self._compare_gradient, boundary))
        self._given.add(boundary, given)
        self._versions.add(given)
        return given

    def visit_written(
        self, boundary: Boundary, caller: Tensor, tensor: Tensor, writes: bool
    ) -> None:
        """Compare an input that the reference's module wrote into."""
        wanted = self._reference.values.get(boundary)
        if wanted is not None:
            self.forward[boundary] = _error(self._reference, tensor, wanted)

    def weigh(self, module: str, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def _compare_gradient(self, boundary: Boundary, gradient: Tensor) -> None:
        wanted = self._reference.gradients.get(boundary)
        if wanted is None:
            return
        if self._last is not None:
            source, last = self._last
            is_same = last.data_ptr() == gradient.data_ptr() and last.shape == gradient.shape
            if is_same and self._reference.gradients[source] is wanted:
                self.backward[boundary] = self.backward[source]
                return
        self.backward[boundary] = _error(self._reference, gradient, wanted, self._scale)
        self._last = (boundary, gradient)


class _OwnCode:
    """What a module's own code computes in one call, and from what.

    Attributes:
        computed: by boundary, a tensor that it computed, and the reference's gradient; in the
            backward, the gradient that is put in for it.
        taken: boundaries at which it takes tensors, whose gradients it computes.
    """

    def __init__(self) -> None:
        self.computed: dict[Boundary, tuple[Tensor, Tensor]] = {}
        self.taken: list[Boundary] = []


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


class Substitution:
    """A visitor that gives every module the reference's tensors and gradients.

    The backward of a call runs when the call ends: its own code reaches no other call's, so that
    its graph is freed at once.

    Args:
        reference: whose tensors are put in.
        execution: whose model computes; its loss scale multiplies gradients on their way in.
        copies: whether modules get copies, as a model with operations in place needs.
        perturber: changes the tensors and gradients that are put in; None leaves them.

    Attributes:
        forward: errors of what modules compute, by boundary, before it is replaced.
        backward: errors of the gradients that they compute, by boundary.
    """

    def __init__(
        self,
        reference: Reference,
        execution: Execution,
        copies: bool,
        perturber: Perturber | None = None,
    ) -> None:
        self.forward: Errors = {}
        self.backward: Errors = {}
        self._reference = reference
        self._execution = execution
        self._copies = copies
        self._perturber = perturber
        self._given = GivenTensors()
        # A leaf, so that what is put in has a backward.
        self._start = torch.zeros((), requires_grad=True)
        # Of the calls that run, the innermost last; the first is the code around the model.
        self._running = [_OwnCode()]

    def begin_call(self, module: str, call: int) -> None:
        """Set the generators as they were before this call in the reference."""
        self._running.append(_OwnCode())
        states = self._reference.generators.get((module, call))
        if states is not None:
            set_generator_states(states, self._execution.device)

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor with the reference's, and return the reference's."""
        wanted = self._reference.values.get(boundary)
        return tensor if wanted is None else self._substitute(boundary, tensor, wanted)

    def visit_written(
        self, boundary: Boundary, caller: Tensor, tensor: Tensor, writes: bool
    ) -> None:
        """Compare an input that either execution's module wrote into, and write what the
        reference's wrote into the caller's tensor, for modules get copies."""
        wanted = self._reference.values.get(boundary)
        before = self._reference.values.get(boundary._replace(side="in"))
        if before is None or not (writes or wanted is not None):
            return
        self.forward[boundary] = _error(
            self._reference, tensor, before if wanted is None else wanted
        )
        if wanted is not None and wanted.shape == caller.shape:
            # Without autograd, as if the caller had got this tensor.
            caller.data.copy_(wanted)

    def weigh(self, module: str, tensor: Tensor) -> Tensor:
        """Return the tensor, perturbed as the module's own code may round it on its way."""
        if self._perturber is None:
            return tensor
        return self._perturber.perturbed(tensor, self._perturber.code_roundoff(module))

    def _substitute(self, boundary: Boundary, tensor: Tensor, wanted: Tensor) -> Tensor:
        caller = self._running[-2] if len(self._running) > 1 else self._running[0]
        computes, takes = caller, self._running[-1]
        if boundary.side == "out":
            computes, takes = takes, computes
        source = self._given.source(tensor)
        # What one execution passes on, the other may have changed.
        if source is not None and self._reference.values.get(source) is not wanted:
            source = None
        self.forward[boundary] = self._forward_error(source, tensor, wanted)
        if wanted.shape != tensor.shape:
            return tensor
        gradient = self._reference.gradients.get(boundary)
        if tensor.requires_grad and gradient is not None:
            computes.computed[boundary] = (tensor, gradient)
        put_in = self._put_in(boundary, source, tensor, wanted)
        if tensor.requires_grad:
            takes.taken.append(boundary)
            receive = partial(self._compare_gradient, takes, boundary)
            put_in = _Entry.apply(self._start, put_in, receive)
        if self._copies:
            put_in = put_in.clone()
        self._given.add(boundary, put_in)
        return put_in

    def _forward_error(
        self, source: Boundary | None, tensor: Tensor, wanted: Tensor
    ) -> TensorError:
        if source is not None:
            norm, is_discrete = self._reference.norm(wanted), not wanted.is_floating_point()
            return TensorError(0.0, norm, elements=tensor.numel(), is_discrete=is_discrete)
        return _error(self._reference, tensor, wanted, counts=self._perturber is None)

    def _put_in(
        self, boundary: Boundary, source: Boundary | None, tensor: Tensor, wanted: Tensor
    ) -> Tensor:
        """Return what takes the place of a tensor: the reference's, in the tensor's dtype."""
        perturber = self._perturber
        if perturber is None:
            return tensor.detach() if source is not None else wanted.to(tensor.dtype).detach()
        roundoff = perturber.roundoff(boundary)
        if source is not None and perturber.roundoff(source) == roundoff:
            return tensor.detach()
        return perturber.perturbed(wanted, roundoff).to(tensor.dtype).detach()

    def _put_in_gradient(self, boundary: Boundary, gradient: Tensor, tensor: Tensor) -> Tensor:
        """Return what takes the place of a tensor's gradient, multiplied by the loss scale."""
        put_in = gradient
        if self._perturber is not None:
            roundoff = self._perturber.gradient_roundoff(boundary)
            put_in = self._perturber.perturbed(gradient, roundoff)
        if self._execution.scale != 1.0:
            put_in = put_in * self._execution.scale
        return put_in.to(tensor.dtype)

    def end_call(self, module: str, call: int) -> None:
        """Compute the call's gradients from the reference's gradients of what it computed."""
        self._backpropagate(self._running.pop())

    def _backpropagate(self, code: _OwnCode) -> None:
        if code.computed:
            for boundary, (tensor, gradient) in code.computed.items():
                put_in = self._put_in_gradient(boundary, gradient, tensor)
                code.computed[boundary] = (tensor, put_in)
            tensors, gradients = zip(*code.computed.values(), strict=True)
            device = self._execution.device
            # A backward that draws, as one that rounds stochastically, comes later in a step.
            drawn = generator_states(device)
            off = torch.autocast(device.type, enabled=False)
            with off, self._execution.precision.backward(device):
                # The graph is kept for a tensor that reaches another call by no boundary.
                torch.autograd.backward(tensors, gradients, retain_graph=True)
            set_generator_states(drawn, device)
            # Else the graph, which refers to the code, would keep itself alive.
            code.computed.clear()
        for boundary in code.taken:
            wanted = self._reference.gradients.get(boundary)
            if wanted is not None and boundary not in self.backward:
                # The module cuts the gradient off: it computes one of zero.
                self.backward[boundary] = _error(self._reference, torch.zeros_like(wanted), wanted)

    def _compare_gradient(self, code: _OwnCode, boundary: Boundary, gradient: Tensor) -> None:
        """Compare a gradient that a module's own code computes.

        Args:
            code: that computes it.
            boundary: at which the code took the tensor.
            gradient: multiplied by the loss scale.
        """
        wanted = self._reference.gradients.get(boundary)
        # A later backward through the same graph brings what another call adds.
        if wanted is None or boundary in self.backward:
            return
        for source, (_, put_in) in code.computed.items():
            is_same = put_in.data_ptr() == gradient.data_ptr() and put_in.shape == gradient.shape
            if is_same and self._reference.gradients[source] is wanted:
                norm = self._reference.norm(wanted)
                self.backward[boundary] = TensorError(0.0, norm, elements=gradient.numel())
                return
        scale, counts = self._execution.scale, self._perturber is None
        self.backward[boundary] = _error(self._reference, gradient, wanted, scale, counts)


def buffer_errors(model: nn.Module, reference: Reference) -> dict[str, TensorError]:
    """Return the errors of a model's buffers after its forward and backward, by name."""
    errors = {}
    for name, buffer in model.named_buffers():
        wanted = reference.buffers.get(name)
        if wanted is not None and _is_comparable(buffer, wanted):
            errors[name] = measure_error(buffer, wanted)
    return errors


def _is_comparable(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have one shape and hold numbers of one kind, as those of a module
    that was converted may not."""
    is_same_kind = tensor.is_floating_point() == other.is_floating_point()
    return tensor.shape == other.shape and is_same_kind and not tensor.is_complex()


def weight_errors(model: nn.Module, reference: nn.Module) -> dict[str, TensorError]:
    """Return the errors of a model's parameters against another one's, by name; of those that no
    conversion has packed."""
    wanted = dict(reference.named_parameters())
    errors = {}
    for name, parameter in model.named_parameters():
        other = wanted.get(name)
        if other is not None and _is_comparable(parameter, other):
            errors[name] = measure_error(parameter, other.to(parameter.device), counts=False)
    return errors


def parameter_errors(
    model: nn.Module, reference: Reference, scale: float
) -> dict[str, TensorError]:
    """Return the errors of the parameters' gradients by the parameter's name."""
    errors = {}
    for name, parameter in model.named_parameters():
        wanted = reference.parameter_gradients.get(name)
        gradient = parameter.grad
        if gradient is None and parameter.requires_grad:
            gradient = torch.zeros_like(parameter)  # the model does not use it, or cuts it off
        if wanted is not None and gradient is not None:
            errors[name] = measure_error(gradient, wanted, scale)
    return errors
