"""Pass every tensor that enters or leaves a module through a function, and count the calls."""

import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

ROOT = "(model)"
"""Name of the model itself, whose dotted name is empty."""
LOSS = "(loss)"
"""Name of the code after the model: the task's loss, which takes the model's output."""
BATCH = "(batch)"
"""Name of the code before the model, which makes its inputs."""


class Boundary(NamedTuple):
    """A tensor that crosses the boundary of a module.

    Attributes:
        module: dotted name of the module, or one of ROOT and LOSS.
        call: number of the module's call in this forward, from 0.
        side: "in" for what it takes, "out" for what it returns.
        number: of the tensor among the floating ones of that side, from 0.
    """

    module: str
    call: int
    side: str
    number: int

    @property
    def key(self) -> str:
        """Return the boundary as one word, for files."""
        return f"{self.module}|{self.call}|{self.side}|{self.number}"

    @classmethod
    def from_key(cls, key: str) -> "Boundary":
        """Return the boundary that `key` names."""
        module, call, side, number = key.rsplit("|", 3)
        return cls(module, int(call), side, int(number))


class Visitor(Protocol):
    """What a pass over a model does with the tensors at the boundaries."""

    def begin_call(self, module: str, call: int) -> None:
        """Note that a module is about to be called."""

    def end_call(self, module: str, call: int) -> None:
        """Note that a call has ended, after its output was visited."""

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Return the tensor that crosses the boundary in place of this one.

        Args:
            boundary: where.
            owner: name of the module whose own code computed the tensor; its caller for an input.
            user: name of the module whose own code takes it.
            tensor: floating.
        """
        ...


def comparable_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules whose calls can be seen: all but those inside a compiled
    module, which run as one program, and containers, which are not called."""
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    inside = {part for module in compiled for part in module.modules() if part is not module}
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return {
        name or ROOT
        for name, module in model.named_modules()
        if module not in inside and not isinstance(module, containers)
    }


@contextmanager
def visited_modules(
    model: nn.Module, names: Collection[str], visitor: Visitor
) -> Iterator["ModuleCalls"]:
    """Return a context in which the modules of these names pass their tensors to a visitor."""
    calls = ModuleCalls(visitor)
    replaced: list[tuple[nn.Module, str, Any]] = []
    for name, module in model.named_modules():
        own_name = name or ROOT
        if own_name not in names:
            continue
        # The forward of a compiled module would be traced into its program.
        key = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        replaced.append((module, key, vars(module).get(key)))
        vars(module)[key] = calls.wrap(own_name, getattr(module, key))
    try:
        with warnings.catch_warnings():
            # The compiler looks for a gradient of what it gets, which is the output of a visit.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield calls
    finally:
        for module, key, earlier in reversed(replaced):
            del vars(module)[key]
            if earlier is not None:
                vars(module)[key] = earlier


class ModuleCalls:
    """The calls of a model's modules in one forward, nested as they happen."""

    def __init__(self, visitor: Visitor) -> None:
        self._visitor = visitor
        self._counts: Counter[str] = Counter()
        self._running = [BATCH]

    def wrap(self, name: str, forward: Any) -> Any:
        """Return a module's forward with the visits at its boundaries."""

        def run(*args: Any, **kwargs: Any) -> Any:
            number = self._counts[name]
            self._counts[name] += 1
            caller = self._running[-1]
            self._visitor.begin_call(name, number)
            args, kwargs = self._cross((args, kwargs), name, number, "in", caller)
            self._running.append(name)
            try:
                output = forward(*args, **kwargs)
            finally:
                self._running.pop()
            output = self._cross(output, name, number, "out", caller)
            self._visitor.end_call(name, number)
            return output

        return run

    def cross_loss(self, loss: Tensor) -> Tensor:
        """Return the loss, passed to the visitor."""
        loss = self._visitor.visit(Boundary(LOSS, 0, "out", 0), LOSS, "", loss)
        self._visitor.end_call(LOSS, 0)
        return loss

    def _cross(self, nest: Any, name: str, number: int, side: str, caller: str) -> Any:
        """Return a module's arguments or output with every floating tensor visited."""
        leaves, structure = tree_flatten(nest)
        # The caller of the model is the loss where its output is used.
        outside = LOSS if caller == BATCH else caller
        found = 0
        for position, leaf in enumerate(leaves):
            if not _is_activation(leaf):
                continue
            boundary = Boundary(name, number, side, found)
            owner, user = (caller, name) if side == "in" else (name, outside)
            leaves[position] = self._visitor.visit(boundary, owner, user, leaf)
            found += 1
        return tree_unflatten(leaves, structure)


def _is_activation(leaf: object) -> bool:
    """Return whether a value is a floating tensor that was computed, and no parameter."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return False
    return leaf.is_floating_point()
