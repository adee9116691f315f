"""Trace where numbers stop being finite: each module's output and gradients, in one step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.core import module_tape, tensor_facts


class TracedTensor(NamedTuple):
    """The statistics of one tensor of a step.

    Attributes:
        phase: forward or backward.
        module: its dotted name, or (inputs), (model), (loss).
        kind: the module's class.
        tensor: output, gradient of the output, or gradient of a parameter by its name.
        dtype: name without "torch.".
        largest: greatest magnitude of the finite elements.
        nonfinite_share: share of elements that are not finite, 0 to 1.
    """

    phase: str
    module: str
    kind: str
    tensor: str
    dtype: str
    largest: float
    nonfinite_share: float

    @property
    def key(self) -> tuple[str, str, str]:
        """Phase, module and tensor, which are the same in a trace of another precision."""
        return self.phase, self.module, self.tensor


def describe_tensor(phase: str, module: str, kind: str, tensor: str, value: Tensor) -> TracedTensor:
    """Return the statistics of a tensor; the host waits for the device."""
    value = value.detach()
    wide = tensor_facts.widest_float(value.device)
    magnitude = value.abs().to(wide)
    finite = magnitude.isfinite()
    largest = 0.0
    nonfinite_share = 0.0
    if value.numel():  # max() of an empty tensor raises, and its mean is NaN
        largest = torch.where(finite, magnitude, 0).max().item()
        nonfinite_share = 1 - finite.to(wide).mean().item()
    name = tensor_facts.dtype_name(value.dtype)
    return TracedTensor(phase, module, kind, tensor, name, largest, nonfinite_share)


class NonfiniteTrace:
    """Context around a forward and a backward that records each module's tensors.

    `rows` are in the order in which the tensors were made, so a module's own output comes before
    that of the module that holds it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rows: list[TracedTensor] = []
        self._tape = module_tape.ModuleTape()

    def __enter__(self) -> "NonfiniteTrace":
        for name, module in self.model.named_modules():
            self._watch(name or module_tape.ROOT, module)
        return self

    def __exit__(self, *_: object) -> None:
        self._tape.close()

    def record(self, phase: str, module: str, kind: str, tensor: str, nest: Any) -> None:
        """Add the floating and complex tensors of a nest."""
        for value in tree_leaves(nest):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.rows.append(describe_tensor(phase, module, kind, tensor, value))

    def _watch(self, name: str, module: nn.Module) -> None:
        kind = type(module).__name__

        def end(_: str, output: Any) -> None:
            self.record("forward", name, kind, "output", output)
            for value in tree_leaves(output):
                # On the output: a backward hook on the module refuses what writes in place.
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(gradient)

        def gradient(grad: Tensor) -> None:
            self.record("backward", name, kind, "gradient of the output", grad)

        # Recomputed, too: a reentrant checkpoint has gradients in the second forward alone.
        self._tape.watch_calls(name, module, end=end, recomputed=True)
        for key, param in module.named_parameters(recurse=False):
            if param.requires_grad:
                # The default binds this parameter's name, not the last one of the loop.
                def accumulated(made: Tensor, key: str = key) -> None:
                    self.record("backward", name, kind, f"gradient of {key}", made.grad)

                self._tape.watch_gradient(param, accumulated)


def first_nonfinite(rows: Sequence[TracedTensor]) -> int | None:
    """Return the index of the first row that is not all finite; None where every row is."""
    return next((i for i, row in enumerate(rows) if row.nonfinite_share), None)
