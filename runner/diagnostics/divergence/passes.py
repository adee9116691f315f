"""Hold an execution against a reference: what arrives at each boundary, and what each module adds.

Two visitors. `Arrival` lets the execution run freely and compares what crosses each boundary, which
holds the errors of everything before it. `Substitution` puts the reference's tensor in the place of
each tensor that crosses a boundary, in the forward and in the backward, so that each comparison
shows what one module's own code does to the reference's own numbers.
"""

from functools import partial

import torch
from torch import Tensor, nn

from runner.diagnostics.divergence.boundaries import BATCH, ROOT, Boundary
from runner.diagnostics.divergence.expected_error import Perturber
from runner.diagnostics.divergence.reference import (
    Call,
    Reference,
    generator_states,
    set_generator_states,
)
from runner.diagnostics.divergence.roundoffs import Execution
from runner.diagnostics.divergence.tensor_error import TensorError, measure_error

Errors = dict[Boundary, TensorError]


def _add_error(
    errors: Errors,
    boundary: Boundary,
    tensor: Tensor,
    wanted: Tensor,
    scale: float = 1.0,
    counts: bool = True,
) -> None:
    """Measure a tensor's error; one without elements has none."""
    if tensor.numel() or wanted.numel():
        errors[boundary] = measure_error(tensor, wanted, scale, counts)


class Arrival:
    """A visitor that compares the tensors of a free execution with a reference.

    Attributes:
        forward: errors of the tensors by boundary.
        backward: errors of their gradients by boundary.
        dtypes: dtypes of the tensors by boundary.
        calls: that the execution made.
        outputs: what the model returned, by boundary.
    """

    def __init__(self, reference: Reference, scale: float) -> None:
        self.forward: Errors = {}
        self.backward: Errors = {}
        self.dtypes: dict[Boundary, torch.dtype] = {}
        self.calls: set[Call] = set()
        self.outputs: dict[Boundary, Tensor] = {}
        self._reference = reference
        self._scale = scale
        # By the memory of both tensors, the first boundary that they crossed.
        self._first: dict[object, Boundary] = {}

    def begin_call(self, module: str, call: int) -> None:
        """Note the call; the execution draws its own random numbers."""
        self.calls.add((module, call))

    def end_call(self, module: str, call: int) -> None:
        """Do nothing: the gradients come in one backward, after the forward."""

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor, and later its gradient; return a view that tells them apart."""
        self.dtypes[boundary] = tensor.dtype
        if boundary.module == ROOT and boundary.side == "out":
            self.outputs[boundary] = tensor.detach()
        wanted = self._reference.values.get(boundary)
        if wanted is None:
            return tensor
        self._add_forward_error(boundary, tensor, wanted)
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(partial(self._compare_gradient, boundary))
        return view

    def _add_forward_error(self, boundary: Boundary, tensor: Tensor, wanted: Tensor) -> None:
        """Measure a tensor's error, once where modules pass it on."""
        # In both executions: what one of them passes on, the other may have changed.
        memory = (wanted.data_ptr(), wanted.shape, tensor.data_ptr(), tensor._version)
        first = self._first.setdefault(memory, boundary)
        if first == boundary or first not in self.forward:
            _add_error(self.forward, boundary, tensor, wanted)
        else:
            self.forward[boundary] = self.forward[first]

    def _compare_gradient(self, boundary: Boundary, gradient: Tensor) -> None:
        wanted = self._reference.gradients.get(boundary)
        if wanted is not None:
            _add_error(self.backward, boundary, gradient, wanted, self._scale)


class _OwnCode:
    """What a module's own code computes in one call, and from what.

    Attributes:
        computed: tensors that it computed, each with the reference's gradient of it.
        leaves: by boundary, what was put in for it as a copy, whose gradient it computes.
    """

    def __init__(self) -> None:
        self.computed: list[tuple[Tensor, Tensor]] = []
        self.leaves: dict[Boundary, Tensor] = {}


class Substitution:
    """A visitor that gives every module the reference's tensors and gradients.

    The backward of a call runs when the call ends: its own code reaches no other call's, so that
    its graph is freed at once.

    Args:
        reference: whose tensors are put in.
        execution: whose model computes; its loss scale multiplies gradients on their way in.
        perturber: changes the tensors and gradients that are put in; None leaves them.

    Attributes:
        forward: errors of what modules compute, by boundary, before it is replaced.
        backward: errors of the gradients that they compute, by boundary.
    """

    def __init__(
        self, reference: Reference, execution: Execution, perturber: Perturber | None = None
    ) -> None:
        self.forward: Errors = {}
        self.backward: Errors = {}
        self._reference = reference
        self._execution = execution
        self._perturber = perturber
        # Of the calls that run, the innermost last; the first is the code around the model.
        self._running = [_OwnCode()]
        self._names = [BATCH]
        self._visits = False

    @property
    def running_code(self) -> str:
        """Return the module whose own code runs now; empty while a tensor is visited."""
        return "" if self._visits else self._names[-1]

    def begin_call(self, module: str, call: int) -> None:
        """Set the generators as they were before this call in the reference."""
        self._running.append(_OwnCode())
        self._names.append(module)
        states = self._reference.generators.get((module, call))
        if states is not None:
            set_generator_states(states, self._execution.device)

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor with the reference's, and return the reference's."""
        wanted = self._reference.values.get(boundary)
        if wanted is None:
            return tensor
        if wanted.shape != tensor.shape:
            _add_error(self.forward, boundary, tensor, wanted)
            return tensor
        self._visits = True
        try:
            return self._substitute(boundary, tensor, wanted)
        finally:
            self._visits = False

    def _substitute(self, boundary: Boundary, tensor: Tensor, wanted: Tensor) -> Tensor:
        caller = self._running[-2] if len(self._running) > 1 else self._running[0]
        computes, takes = caller, self._running[-1]
        if boundary.side == "out":
            computes, takes = takes, computes
        # Also of what is only passed on: the reference's code may have changed it on its way.
        counts = self._perturber is None
        _add_error(self.forward, boundary, tensor, wanted, counts=counts)
        gradient = self._reference.gradients.get(boundary)
        if tensor.requires_grad and gradient is not None:
            if self._perturber is not None:
                gradient = self._perturber.gradient(boundary, gradient)
            scaled = (gradient * self._execution.scale).to(tensor.dtype)
            computes.computed.append((tensor, scaled))
        put_in = wanted
        if self._perturber is not None:
            put_in = self._perturber.value(boundary, wanted)
        put_in = put_in.to(tensor.dtype)
        if tensor.requires_grad:
            leaf = put_in.detach().requires_grad_()
            takes.leaves[boundary] = leaf
            put_in = leaf
        # A copy: the module may write into what it takes.
        return put_in.clone()

    def end_call(self, module: str, call: int) -> None:
        """Compute the call's gradients from the reference's gradients of what it computed."""
        code = self._running.pop()
        self._visits = True
        self._backpropagate(code)
        self._visits = False
        if len(self._names) > 1:
            self._names.pop()

    def _backpropagate(self, code: _OwnCode) -> None:
        if code.computed:
            tensors, gradients = zip(*code.computed, strict=True)
            device = self._execution.device
            # A backward that draws, as one that rounds stochastically, comes later in a step.
            drawn = generator_states(device)
            off = torch.autocast(device.type, enabled=False)
            with off, self._execution.precision.backward(device):
                # The graph is kept for a tensor that reaches another call by no boundary.
                torch.autograd.backward(tensors, gradients, retain_graph=True)
            set_generator_states(drawn, device)
        for boundary, leaf in code.leaves.items():
            wanted = self._reference.gradients.get(boundary)
            if wanted is not None:
                # A module that cuts the gradient off computes one of zero.
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                _add_error(self.backward, boundary, gradient, wanted, self._execution.scale)


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
