"""Trace chosen modules through a forward and a backward: their dtypes, kernels and tensors."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.diagnostics.dtype_trace import kernel_dtypes, kernel_name
from runner.diagnostics.numerics.measure import (
    Sample,
    SampledTensor,
    count_exponents,
    is_measurable,
    take_sample,
)
from runner.diagnostics.numerics.probe import is_user_code, tensor_stats
from runner.diagnostics.numerics.results import TensorStats
from runner.precision.layers.backward_checks import is_in_backward
from runner.utils.tensors import dtype_name

TRACED_KINDS = ("weights", "inputs", "outputs", "output gradients")
"""Kinds of tensors that are measured, in the order of the tables."""
MAX_ACTIVATION_SAMPLES = 16
"""Tensors of each kind but weights that are measured; a module may be called many times."""


@dataclass
class TracedPass:
    """The tensors and kernels of a module in the forward or in the backward.

    The keys are in the order in which they were seen; the values are True.

    Attributes:
        takes: dtype and shape of inputs, or of the gradients of outputs.
        kernels: (dtype, name) of each product, convolution, norm and lookup.
        gives: dtype and shape of outputs, or of the gradients of inputs.
    """

    takes: dict[str, bool] = field(default_factory=dict)
    kernels: dict[tuple[str, str], bool] = field(default_factory=dict)
    gives: dict[str, bool] = field(default_factory=dict)


@dataclass
class TracedModule:
    """The trace of one module, with those of the modules inside it.

    Attributes:
        name: dotted name; empty for the model itself.
        module: the module.
        forward: inputs, kernels and outputs.
        backward: gradients of outputs, kernels and gradients of inputs; empty without a backward.
        samples: elements of the tensors of each of TRACED_KINDS.
        node_ranges: first and last sequence number + 1 of the autograd nodes of each call.
    """

    name: str
    module: nn.Module
    forward: TracedPass = field(default_factory=TracedPass)
    backward: TracedPass = field(default_factory=TracedPass)
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    node_ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def was_called(self) -> bool:
        """Return whether the module's forward ran."""
        return bool(self.node_ranges)

    def made_node(self, number: int) -> bool:
        """Return whether the module's forward made the autograd node of a sequence number."""
        return any(first <= number < end for first, end in self.node_ranges)

    def weight_gradients(self) -> list[str]:
        """Return the dtypes of the gradients of the module's parameters after a backward."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        return sorted({dtype_name(grad.dtype) for grad in grads})

    def measure(self) -> dict[str, TensorStats]:
        """Return what each format loses of each of TRACED_KINDS, where it has tensors."""
        stats = {}
        for kind in TRACED_KINDS:
            counted = count_exponents([SampledTensor(sample) for sample in self.samples[kind]])
            if counted:
                stats[kind] = tensor_stats(self.name or "(model)", kind, counted)
        return stats


class ModuleTrace(TorchDispatchMode):
    """Context around a forward and a backward that traces modules.

    Kernels are seen after autocast, so that their dtypes are those that they really get. In the
    backward a kernel belongs to the module whose forward made the autograd node that runs.

    Args:
        modules: by dotted name; none holds another one.

    Attributes:
        traced: the traces, in the order given.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.traced = [TracedModule(name, module) for name, module in modules.items()]
        # The first sequence number of the call of each module whose forward is running.
        self._running: dict[str, int] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> "ModuleTrace":
        for traced in self.traced:
            for weight in _weights(traced.module):
                self._sample(traced, "weights", weight)
            self._watch(traced)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _watch(self, traced: TracedModule) -> None:
        """Register the hooks around a module's forward."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            # Activation checkpointing computes the forward again in the backward.
            if is_in_backward():
                return
            self._running[traced.name] = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            for tensor in _tensors((args, kwargs)):
                traced.forward.takes[_describe(tensor)] = True
                self._sample(traced, "inputs", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(traced, "input gradients"))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            first = self._running.pop(traced.name, None)
            if first is None:
                return
            end = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            traced.node_ranges.append((first, end))
            for tensor in _tensors(output):
                traced.forward.gives[_describe(tensor)] = True
                self._sample(traced, "outputs", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(traced, "output gradients"))

        module = traced.module
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
        self._hooks.callback(handle.remove)
        self._hooks.callback(module.register_forward_hook(after).remove)

    def _gradient_hook(
        self, traced: TracedModule, kind: Literal["input gradients", "output gradients"]
    ) -> Any:
        def record(grad: Tensor) -> None:
            if kind == "input gradients":
                traced.backward.gives[_describe(grad)] = True
                return
            traced.backward.takes[_describe(grad)] = True
            self._sample(traced, kind, grad)

        return record

    def _sample(self, traced: TracedModule, kind: str, tensor: Tensor) -> None:
        samples = traced.samples[kind]
        is_full = kind != "weights" and len(samples) >= MAX_ACTIVATION_SAMPLES
        if is_measurable(tensor) and not is_full:
            # torch's own modules take and return no attention mask.
            samples.append(take_sample(tensor, masked=is_user_code(traced.module)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for dtype in sorted(kernel_dtypes(func, args)):
            for current in self._current_passes():
                current.kernels[dtype, kernel_name(func)] = True
        return out

    def _current_passes(self) -> Iterator[TracedPass]:
        """Yield the passes of the modules that call the kernel that runs now."""
        node = torch._C._current_autograd_node()
        for traced in self.traced:
            if node is not None and traced.made_node(node._sequence_nr()):
                yield traced.backward
            elif node is None and traced.name in self._running:
                yield traced.forward


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a module and of those inside it; for codes what they stand for."""
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if key == "weight" and hasattr(part, "unpacked_weight"):
                yield part.unpacked_weight()  # type: ignore[operator]
            elif parameter is not None:
                yield parameter


def _tensors(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nest."""
    return (leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor))


def _describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape, as "bfloat16 [64, 128]"."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
