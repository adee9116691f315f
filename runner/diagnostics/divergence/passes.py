"""Hold an execution against a reference: what arrives at each boundary, and what each module adds.

Two visitors. `Arrival` lets the execution run freely and compares what crosses each boundary, which
holds the errors of everything before it. `Substitution` puts the reference's tensor in the place of
each tensor that crosses a boundary, in the forward and in the backward, so that each comparison
shows what one module's own code does to the reference's own numbers.
"""

from functools import partial

import torch
from torch import Tensor, nn

from runner.diagnostics.divergence.boundaries import ROOT, Boundary
from runner.diagnostics.divergence.expected_error import Perturber
from runner.diagnostics.divergence.reference import Reference, set_generator_states
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
    """Measure a tensor's error; one of another shape than its reference is left out."""
    if tensor.shape == wanted.shape and tensor.numel():
        errors[boundary] = measure_error(tensor, wanted, scale, counts)


class Arrival:
    """A visitor that compares the tensors of a free execution with a reference.

    Attributes:
        forward: errors of the tensors by boundary.
        backward: errors of their gradients by boundary.
        dtypes: dtypes of the tensors by boundary.
        outputs: what the model returned, by boundary.
    """

    def __init__(self, reference: Reference, scale: float) -> None:
        self.forward: Errors = {}
        self.backward: Errors = {}
        self.dtypes: dict[Boundary, torch.dtype] = {}
        self.outputs: dict[Boundary, Tensor] = {}
        self._reference = reference
        self._scale = scale

    def begin_call(self, module: str, call: int) -> None:
        """Do nothing: the execution draws its own random numbers."""

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor, and later its gradient; return a view that tells them apart."""
        self.dtypes[boundary] = tensor.dtype
        if boundary.module == ROOT and boundary.side == "out":
            self.outputs[boundary] = tensor.detach()
        wanted = self._reference.values.get(boundary)
        if wanted is None:
            return tensor
        _add_error(self.forward, boundary, tensor, wanted)
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(partial(self._compare_gradient, boundary))
        return view

    def _compare_gradient(self, boundary: Boundary, gradient: Tensor) -> None:
        wanted = self._reference.gradients.get(boundary)
        if wanted is not None:
            _add_error(self.backward, boundary, gradient, wanted, self._scale)


class Substitution:
    """A visitor that gives every module the reference's tensors and gradients.

    Args:
        reference: whose tensors are put in.
        device: whose generator is set before each call, beside the host's.
        scale: loss scale, by which gradients are multiplied on their way in.
        perturber: changes the tensors and gradients that are put in; None leaves them.

    Attributes:
        forward: errors of what modules compute, by boundary, before it is replaced.
        backward: errors of the gradients that they compute, by boundary.
    """

    def __init__(
        self,
        reference: Reference,
        device: torch.device,
        scale: float = 1.0,
        perturber: Perturber | None = None,
    ) -> None:
        self.forward: Errors = {}
        self.backward: Errors = {}
        self._reference = reference
        self._device = device
        self._scale = scale
        self._perturber = perturber
        # What modules computed, with the reference's gradients of it.
        self._heads: list[tuple[Tensor, Tensor]] = []
        # What was put in, whose gradients the modules compute.
        self._inputs: dict[Boundary, Tensor] = {}
        # Ids of the tensors that were put in: a module that only passes one on computes nothing.
        self._put_in: set[int] = set()
        self._alive: list[Tensor] = []

    def begin_call(self, module: str, call: int) -> None:
        """Set the generators as they were before this call in the reference."""
        states = self._reference.generators.get((module, call))
        if states is not None:
            set_generator_states(states, self._device)

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Compare a tensor with the reference's, and return the reference's."""
        wanted = self._reference.values.get(boundary)
        if wanted is None or wanted.shape != tensor.shape:
            return tensor
        if id(tensor) not in self._put_in:
            _add_error(self.forward, boundary, tensor, wanted, counts=self._perturber is None)
        gradient = self._reference.gradients.get(boundary)
        if tensor.requires_grad and gradient is not None:
            if self._perturber is not None:
                gradient = self._perturber.gradient(boundary, gradient)
            self._heads.append((tensor, (gradient * self._scale).to(tensor.dtype)))
        put_in = wanted
        if self._perturber is not None:
            put_in = self._perturber.value(boundary, wanted)
        put_in = put_in.to(tensor.dtype)
        if tensor.requires_grad:
            # A copy of the leaf: the module may write into what it gets.
            leaf = put_in.detach().clone().requires_grad_()
            self._inputs[boundary] = leaf
            put_in = leaf.clone()
        self._put_in.add(id(put_in))
        self._alive.append(put_in)
        return put_in

    def backward_through_modules(self) -> None:
        """Compute each module's gradients from the reference's gradients of what it computes."""
        heads = [(tensor, gradient) for tensor, gradient in self._heads if tensor.requires_grad]
        torch.autograd.backward([t for t, _ in heads], [g for _, g in heads])
        for boundary, leaf in self._inputs.items():
            wanted = self._reference.gradients.get(boundary)
            if wanted is not None and leaf.grad is not None:
                _add_error(self.backward, boundary, leaf.grad, wanted, self._scale)


def parameter_errors(
    model: nn.Module, reference: Reference, scale: float
) -> dict[str, TensorError]:
    """Return the errors of the parameters' gradients by the parameter's name."""
    errors = {}
    for name, parameter in model.named_parameters():
        wanted = reference.parameter_gradients.get(name)
        gradient = parameter.grad
        if wanted is not None and gradient is not None and gradient.shape == wanted.shape:
            errors[name] = measure_error(gradient, wanted, scale)
    return errors
