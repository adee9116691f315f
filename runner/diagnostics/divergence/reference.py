"""Record what crosses the boundaries of a model's modules in one forward and backward."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from runner.diagnostics.divergence.boundaries import Boundary

Call = tuple[str, int]
"""A module's name, and the number of its call."""


@dataclass
class Reference:
    """The tensors of one forward and backward.

    Attributes:
        values: by boundary, in the order of the forward.
        gradients: of the loss with respect to these, through that boundary alone, not scaled.
        parameter_gradients: by the parameter's name, not scaled.
        owners: by boundary, the module whose own code computed the tensor.
        users: by boundary, the module whose own code takes it.
        generators: states of the random generators right before each call, by call; device states
            after the host's.
        loss: of the batch.
    """

    values: dict[Boundary, Tensor] = field(default_factory=dict)
    gradients: dict[Boundary, Tensor] = field(default_factory=dict)
    parameter_gradients: dict[str, Tensor] = field(default_factory=dict)
    owners: dict[Boundary, str] = field(default_factory=dict)
    users: dict[Boundary, str] = field(default_factory=dict)
    generators: dict[Call, list[Tensor]] = field(default_factory=dict)
    loss: float = 0.0

    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        tensors = {id(t): t for t in (*self.values.values(), *self.gradients.values())}
        return sum(tensor.nbytes for tensor in tensors.values())


class Overwritten(Exception):
    """The model wrote into a tensor after it was recorded: it must be recorded as copies."""


class Recorder:
    """A visitor that records a reference.

    Args:
        device: whose generator is recorded beside the host's.
        copies: whether tensors are copied, as a model with operations in place needs.
    """

    def __init__(self, device: torch.device, copies: bool) -> None:
        self.reference = Reference()
        self._device = device
        self._copies = copies
        self._versions: list[tuple[Tensor, int]] = []

    def begin_call(self, module: str, call: int) -> None:
        """Record the states of the generators."""
        self.reference.generators[module, call] = generator_states(self._device)

    def end_call(self, module: str, call: int) -> None:
        """Do nothing: the gradients come in one backward, after the forward."""

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Record a tensor; return a view of it whose gradient is that through this boundary."""
        reference = self.reference
        kept = tensor.detach()
        if self._copies:
            kept = kept.clone()
        else:
            self._versions.append((kept, kept._version))
        reference.values[boundary] = kept
        reference.owners[boundary] = owner
        reference.users[boundary] = user
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(partial(self._keep_gradient, boundary))
        return view

    def finish(self, model: nn.Module, loss: Tensor, scale: float) -> Reference:
        """Return the reference, after the backward.

        Args:
            model: its parameters hold their gradients.
            loss: of the batch, not scaled.
            scale: what the gradients are divided by.

        Raises:
            Overwritten: the model wrote into a recorded tensor.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise Overwritten
        reference = self.reference
        reference.loss = loss.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                reference.parameter_gradients[name] = unscaled(parameter.grad, scale)
        for boundary, gradient in reference.gradients.items():
            reference.gradients[boundary] = unscaled(gradient, scale)
        return reference

    def _keep_gradient(self, boundary: Boundary, gradient: Tensor) -> None:
        self.reference.gradients[boundary] = gradient.detach()


def unscaled(gradient: Tensor, scale: float) -> Tensor:
    """Return a gradient divided by the loss scale; in float32 at least, where that changes it."""
    if scale == 1.0:
        return gradient.detach()
    wide = gradient if gradient.dtype is torch.float64 else gradient.float()
    return wide.detach() / scale


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the host's and the device's random generators."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    """Restore what generator_states returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def writes_in_place(model: nn.Module) -> bool:
    """Return whether a module of the model says that it overwrites its input."""
    return any(getattr(module, "inplace", False) for module in model.modules())
