"""Watch modules and gradients and replace forwards, for a time, and leave no trace of it."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

ROOT = "(model)"
"""Name of the model itself, whose dotted name is empty."""

Note = Callable[[str, Any], None]
"""Takes a module's name and its arguments, or its output: None after an exception."""


def is_in_backward() -> bool:
    """Return whether a backward runs; a forward within it recomputes activations."""
    # Only autograd's engine runs inside a graph task; it is -1 in a forward.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class ModuleTape(ExitStack):
    """A context at whose end every hook is removed and every replaced forward is restored.

    Attributes:
        running: names of the watched modules whose forward runs, the innermost last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []

    def watch_calls(
        self,
        name: str,
        module: nn.Module,
        begin: Note | None = None,
        end: Note | None = None,
        recomputed: bool = False,
    ) -> None:
        """Call functions at the beginning and at the end of each call of a module.

        Args:
            name: of the module, for the functions and `running`.
            module: a container is never called, and what is compiled in place runs past its hooks.
            begin, end: the functions.
            recomputed: whether they are called for the forwards, too, that activation
                checkpointing computes again in the backward.
        """

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if recomputed or not is_in_backward():
                self.running.append(name)
                if begin is not None:
                    begin(name, (args, kwargs))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            if recomputed or not is_in_backward():
                self.running.pop()
                if end is not None:
                    end(name, output)

        self.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        # always_call: after a forward that raises, `running` would otherwise name a wrong module.
        self.callback(module.register_forward_hook(after, always_call=True).remove)

    def watch_gradient(self, parameter: Tensor, receive: Callable[[Tensor], None]) -> None:
        """Call a function with the parameter each time that its gradient is complete."""
        self.callback(parameter.register_post_accumulate_grad_hook(receive).remove)

    def replace_forward(self, module: nn.Module, forward: Any, key: str = "forward") -> None:
        """Replace a module's forward, on the instance alone.

        `layer.forward(x)` calls no hooks, and their presence changes the path that some modules
        take.

        Args:
            module: the module; one that is replaced twice is restored in reverse.
            forward: the function in its place; it is given the name and signature of the first.
            key: name of the attribute.
        """
        attributes = vars(module)
        earlier = attributes.get(key)
        # The fields of a batch that a model takes are read from the signature of its forward.
        attributes[key] = update_wrapper(forward, getattr(module, key), updated=())

        def restore() -> None:
            del attributes[key]
            if earlier is not None:
                attributes[key] = earlier

        self.callback(restore)


class FunctionWatch(TorchFunctionMode):
    """A context in which another function hears of each call of torch's functions before it is
    made.

    Args:
        note: takes torch's function, and the leaves of its arguments.
    """

    def __init__(self, note: Callable[[Any, list[Any]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(func, tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))
