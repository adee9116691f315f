"""Looking at the numbers of one optimizer step: samples taken by hooks, measured at its end."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from runner.diagnostics.numerics.measure import (
    ExponentCounts,
    Sample,
    SampledTensor,
    count_exponents,
    is_measurable,
    quantization_losses,
    take_sample,
    to_float32,
)
from runner.diagnostics.numerics.results import KINDS, NumericsSnapshot, TensorStats
from runner.training.state import TrainState

CALLS = 4
"""Of a module that a forward calls several times, so many outputs are measured."""
INSIDE = 16
"""So many results of operations in a module's own forward."""


def modules_holding_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Sequence[Tensor]]]:
    """Modules that hold parameters of their own, by dotted name, each once; a parameter that
    several hold belongs to the first."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        held = list(module.parameters(recurse=False))
        mine = [p for p in held if id(p) not in seen]
        seen.update(map(id, held))
        if held:
            yield name or "(model)", module, mine


class OperationWatcher(TorchFunctionMode):
    """Shows the results of operations inside modules' own code, where numbers may leave a format
    that inputs and outputs fit in. torch's own modules have nothing inside that counts."""

    def __init__(self, seen: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.seen = seen
        self._within: list[str] = []

    def watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        """Hooks that tell when a module's forward runs."""
        inside = name if is_user_code(module) else ""
        yield module.register_forward_pre_hook(lambda *_: self._within.append(inside))
        yield module.register_forward_hook(
            lambda *_: return_nothing(self._within.pop()), always_call=True
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._within and self._within[-1]:
            self.seen(self._within[-1], result)
        return result


def is_user_code(module: nn.Module) -> bool:
    """Whether a module is not one of torch's own."""
    return not type(module).__module__.startswith("torch.")


def return_nothing(_: object) -> None:
    """Return None, by which a hook changes nothing."""


class Probe:
    """Context around an optimizer step. Nothing that the step computes is altered, and nothing is
    read from the device before its end.

    Args:
        state: of the run.
        seen: called with what was found, where the step ended well.
    """

    def __init__(self, state: TrainState, seen: Callable[[NumericsSnapshot], None]) -> None:
        self.state, self.seen = state, seen
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        self._scale = self.state.scale.value
        self._activations: dict[str, list[Sample]] = defaultdict(list)
        self._inside: dict[str, list[Sample]] = defaultdict(list)
        self._counted: dict[str, list[Tensor]] = defaultdict(list)
        self._gradients: dict[int, Sample] = {}
        self._weights: list[tuple[str, Tensor, Sample]] = []
        model, trainable = self.state.plain_model, {id(p) for p in self.state.trainable_parameters}
        self._hooks.callback(model.register_forward_pre_hook(self._begin).remove)
        operations = OperationWatcher(self._operation)
        for name, module in model.named_modules():
            for hook in operations.watch(name or "(model)", module):
                self._hooks.callback(hook.remove)
        self._hooks.enter_context(operations)
        for name, module, params in modules_holding_tensors(model):
            after = self._output(name, is_user_code(module))
            self._hooks.callback(module.register_forward_hook(after).remove)
            for p in filter(is_measurable, params):
                self._weights.append((name, p, take_sample(p)))
                if id(p) in trainable:
                    hook = p.register_post_accumulate_grad_hook(self._gradient)
                    self._hooks.callback(hook.remove)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._hooks.close()
        look = None if error else self._look()
        del self._activations, self._inside, self._counted, self._gradients, self._weights
        if look:
            self.seen(look)

    def _begin(self, *_: object) -> None:
        """Of several micro-batches the last one counts."""
        self._activations.clear()
        self._inside.clear()

    def _operation(self, name: str, result: Any) -> None:
        held = self._inside[name]
        if isinstance(result, Tensor) and is_measurable(result) and len(held) < INSIDE:
            held.append(take_sample(result, masked=True))
            self._counted[name].append(result)

    def _output(self, name: str, masked: bool) -> Callable[[nn.Module, Any, Any], None]:
        def after(_: nn.Module, args: Any, output: Any) -> None:
            if len(held := self._activations[name]) < CALLS:
                counted = {id(t) for t in self._counted[name]}
                found = (
                    t for t in tree_leaves(output) if isinstance(t, Tensor) and is_measurable(t)
                )
                held.extend(take_sample(t, masked) for t in found if id(t) not in counted)
            self._counted[name].clear()

        return after

    def _gradient(self, param: Tensor) -> None:
        """As the backward left it: multiplied by the loss scale, not clipped, the micro-batches
        so far added up. A sparse one is measured as the dense one that it stands for."""
        grad = param.grad
        if grad is not None and grad.layout is torch.sparse_coo:
            grad = grad.detach().to_dense()
        if grad is not None and is_measurable(grad):
            self._gradients[id(param)] = take_sample(grad)

    @torch.no_grad()
    def _look(self) -> NumericsSnapshot:
        named = [
            (name, "activations", SampledTensor(s))
            for found in (self._activations, self._inside)
            for name, all_ in found.items()
            for s in all_
        ]
        named += [(name, "weights", SampledTensor(s)) for name, _, s in self._weights]
        for name, p, before in self._weights:
            if id(p) in self._gradients:
                gradient = self._gradients[id(p)]
                named += [
                    (name, "gradients", SampledTensor(gradient)),
                    (name, "updates", _update(p, before, gradient)),
                ]
        counted = count_exponents([row for _, _, row in named])
        parts: dict[tuple[str, str], list[ExponentCounts]] = defaultdict(list)
        for (name, kind, _), found in zip(named, counted, strict=True):
            parts[name, kind].append(found)
        if not any(c.largest for (_, kind), cs in parts.items() if kind == "updates" for c in cs):
            parts = {key: cs for key, cs in parts.items() if key[1] != "updates"}  # it was skipped
        names = [name or "(model)" for name, _ in self.state.plain_model.named_modules()]
        order = [(n, k) for n in names for k in KINDS if (n, k) in parts]
        scale = None if self._scale is None else self._scale.item()
        return NumericsSnapshot(
            self.state.step, scale, tuple(_measured(*key, parts[key]) for key in order)
        )


def _update(param: Tensor, before: Sample, gradient: Sample) -> SampledTensor:
    """Return the change that the step made to a parameter."""
    after = take_sample(param)
    wide = torch.float64 if before.values.dtype is torch.float64 else torch.float32
    update = (after.values.to(wide) - before.values.to(wide)).float()
    made = Sample(update, update.abs().amax(), before.elements, before.stride)
    pulled = gradient.values != 0
    if before.values.itemsize >= 4:
        pulled &= update != 0  # float32 lost it already, or its learning rate is zero
    return SampledTensor(made, to_float32(before.values), pulled)


def _measured(module: str, kind: str, counted: Sequence[ExponentCounts]) -> TensorStats:
    elements = sum(c.elements for c in counted)
    largest = np.max([c.largest for c in counted])
    histogram = np.sum([c.exponents for c in counted], axis=0)
    bins = {int(i) - 127: round(histogram[i]) for i in np.flatnonzero(histogram)}
    return TensorStats(
        module,
        kind,
        elements,
        sum(c.zeros for c in counted) / elements,
        sum(c.not_finite for c in counted) / elements,
        float(largest) if np.isfinite(largest) else None,
        bins,
        quantization_losses(counted),
    )
