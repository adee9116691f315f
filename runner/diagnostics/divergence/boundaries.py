"""Pass every tensor that enters or leaves a module through a function, and count the calls."""

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from runner.core import module_tape
from runner.diagnostics.module_tensors import named_modules
from runner.precision.layers.experts import expert_parts

LOSS = "(loss)"
"""Name of the code after the model: the task's loss, which takes the model's output."""
BATCH = "(batch)"
"""Name of the code before the model, which makes its inputs."""
CHOICES = ("topk", "sort", "argsort", "argmax", "argmin", "multinomial")
"""Functions of torch that choose among floating numbers, as a router does. Where rounding swaps two
numbers they choose otherwise, and what follows would be another computation. Their indices are
therefore visited like what crosses a boundary."""
WRITTEN = "written"
"""The side of a module's input after the call, where the module wrote into it."""


class Boundary(NamedTuple):
    """A tensor that crosses the boundary of a module, or the indices that its own code chooses.

    Attributes:
        module: dotted name of the module, or one of ROOT and LOSS.
        call: number of the module's call in this forward, from 0.
        side: "in" for what it takes, "out" for what it returns, WRITTEN, or one of CHOICES for
            indices.
        number: of the tensor on that side, from 0; for indices of the function's call.
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


def is_choice_of_experts(boundary: Boundary, tensor: Tensor) -> bool:
    """Return whether a tensor that a layer of experts takes, or chooses itself, has the numbers of
    each token's experts, int [..., tokens, k]."""
    is_chosen = boundary.side in ("in", "topk", "multinomial")
    is_number = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    return is_chosen and is_number and tensor.ndim > 1


FunctionListener = Callable[[str, str, Any, Any], None]
"""Is called with the name of the module whose own code calls a function of torch, the function's
name without underscores around it, its nested arguments and its result."""


class Visitor(ABC):
    """What a pass over a model does with the tensors at the boundaries."""

    def begin_call(self, module: str, call: int) -> None:
        """Note that a module is about to be called."""

    def end_call(self, module: str, call: int) -> None:
        """Note that a call has ended, after its output was visited."""

    @abstractmethod
    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Return the tensor that crosses the boundary in place of this one.

        Args:
            boundary: where.
            owner: name of the module whose own code computed the tensor; its caller for an input.
            user: name of the module whose own code takes it.
            tensor: floating, complex, integer or boolean.
        """

    def visit_written(
        self, boundary: Boundary, caller: Tensor, tensor: Tensor, writes: bool
    ) -> None:
        """Note at the end of a call what has become of an input.

        Args:
            boundary: of side WRITTEN.
            caller: the tensor that the caller holds.
            tensor: what the module was given in its place.
            writes: whether something was written into it during the call.
        """

    def weigh(self, module: str, tensor: Tensor) -> Tensor:
        """Return what a module's own code chooses among in place of these floating numbers."""
        return tensor


def comparable_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules whose calls can be seen and mean the same in two executions:
    all but those inside a compiled module, which run as one program, and the parts of experts."""
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    inside = {part for module in compiled for part in module.modules() if part is not module}
    inside |= {part for module in model.modules() for part in expert_parts(module)}
    return {name for name, module in named_modules(model) if module not in inside}


def functions_are_seen(model: nn.Module) -> bool:
    """Return whether the functions are seen that modules' own code calls: not where a part of the
    model is compiled, for a mode would be traced into its program."""
    return all(module._compiled_call_impl is None for module in model.modules())


@contextmanager
def visited_modules(
    model: nn.Module, names: Collection[str], visitor: Visitor, *listeners: FunctionListener
) -> Iterator["ModuleCalls"]:
    """Return a context in which the modules of these names pass their tensors to a visitor.

    Listeners hear of nothing where a part of the model is compiled.
    """
    calls = ModuleCalls(visitor, listeners)
    functions = calls if functions_are_seen(model) else nullcontext()
    with module_tape.ModuleTape() as tape, warnings.catch_warnings(), functions:
        for name, module in named_modules(model):
            if name in names:
                # The forward of a compiled module would be traced into its program.
                key = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
                tape.replace_forward(module, calls.wrap(name, getattr(module, key)), key)
        # The compiler looks for a gradient of what it gets, which is the output of a visit.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield calls


class ModuleCalls(TorchFunctionMode):
    """The calls of a model's modules in one forward, nested as they happen.

    As a context it sees the functions of torch that the modules' own code calls: listeners hear of
    all of them, and the indices that those of CHOICES return are visited.
    """

    def __init__(self, visitor: Visitor, listeners: Sequence[FunctionListener]) -> None:
        super().__init__()
        self._visitor = visitor
        self._listeners = listeners
        self._counts: Counter[str] = Counter()
        self._choices: Counter[tuple[str, int, str]] = Counter()
        # The modules that run, the innermost last, with the numbers of their calls.
        self._running = [(BATCH, 0)]
        self._visits = False

    def _own_code(self) -> str:
        """Return the module whose own code runs now; empty while the visitor does."""
        module, _ = self._running[-1]
        if self._visits:
            return ""
        return LOSS if module == BATCH else module

    @contextmanager
    def _visiting(self) -> Iterator[None]:
        """Return a context in which the visitor runs, and no module's own code."""
        # A visitor's backward may call modules again, as checkpointed ones, inside a visit.
        earlier, self._visits = self._visits, True
        try:
            yield
        finally:
            self._visits = earlier

    def wrap(self, name: str, forward: Any) -> Any:
        """Return a module's forward with the visits at its boundaries."""

        def run(*args: Any, **kwargs: Any) -> Any:
            number = self._counts[name]
            self._counts[name] += 1
            caller, _ = self._running[-1]
            taken = (args, kwargs)
            with self._visiting():
                self._visitor.begin_call(name, number)
                args, kwargs = given = self._cross(taken, name, number, "in", caller)
            pairs = zip(tree_leaves(taken), tree_leaves(given), strict=True)
            inputs = [(*pair, pair[1]._version) for pair in pairs if _is_compared(pair[0])]
            self._running.append((name, number))
            try:
                output = forward(*args, **kwargs)
            finally:
                self._running.pop()
            with self._visiting():
                for index, (held, tensor, version) in enumerate(inputs):
                    boundary = Boundary(name, number, WRITTEN, index)
                    writes = tensor._version != version
                    self._visitor.visit_written(boundary, held, tensor, writes)
                output = self._cross(output, name, number, "out", caller)
                self._visitor.end_call(name, number)
            return output

        return run

    def cross_loss(self, loss: Tensor) -> Tensor:
        """Return the loss, passed to the visitor."""
        with self._visiting():
            loss = self._visitor.visit(Boundary(LOSS, 0, "out", 0), LOSS, "", loss)
            self._visitor.end_call(LOSS, 0)
        return loss

    def _cross(self, nest: Any, name: str, number: int, side: str, caller: str) -> Any:
        """Return a module's arguments or output with every tensor visited."""
        leaves, structure = tree_flatten(nest)
        owner, user = (caller, name) if side == "in" else (name, caller)
        # The caller of the model is the loss where its output is used.
        user = LOSS if user == BATCH else user
        compared = [position for position, leaf in enumerate(leaves) if _is_compared(leaf)]
        for index, position in enumerate(compared):
            boundary = Boundary(name, number, side, index)
            leaves[position] = self._visitor.visit(boundary, owner, user, leaves[position])
        return tree_unflatten(leaves, structure)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        module = self._own_code()
        if not module:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func)).strip("_")
        if name in CHOICES:
            result = self._choose(func, name, args, kwargs)
        else:
            result = func(*args, **kwargs)
        for listener in self._listeners:
            listener(module, name, (args, kwargs), result)
        return result

    def _choose(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what a function of CHOICES returns for the indices that the visitor puts in."""
        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {**kwargs}
            del kwargs["input"]
        # Integers, as the numbers of experts, are ordered alike in both executions.
        if not (args and args[0].is_floating_point()):
            return func(*args, **kwargs)
        source, *rest = args
        module = self._own_code()
        with self._visiting():
            result = func(self._visitor.weigh(module, source), *rest, **kwargs)
            key = (module, self._running[-1][1], name)
            boundary = Boundary(*key, self._choices[key])
            self._choices[key] += 1
            indices = result if isinstance(result, Tensor) else result.indices
            indices = self._visitor.visit(boundary, module, module, indices)
        if isinstance(result, Tensor):
            return indices
        place = _DIM_ARGUMENT[name]
        dim = kwargs.get("dim", rest[place] if len(rest) > place else -1)
        return type(result)((source.gather(dim, indices), indices))


_DIM_ARGUMENT = {"topk": 1, "sort": 0}
"""Position of the dimension in the arguments after the tensor, of functions with two results."""


def _is_compared(leaf: object) -> bool:
    """Return whether a value is a tensor that was computed, and no parameter."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
