"""Checksum what every module computes in a step, so that two computations can be compared."""

from collections.abc import Container, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype of each size of an element, in bytes."""


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers: int64 [], on its device.

    Integers add up to the same sum in any order, modulo 2**64, so equal bits have equal sums. A
    change of one element always changes the sum; several changes cancel by chance only.
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.nbytes % 8 == 0:
        # Several elements at once: as fast as the memory is read. Which elements are together may
        # not depend on the place in memory, which differs between two computations.
        values = values.contiguous().view(-1)
        if values.data_ptr() % 8:
            values = values.clone()
        values = values.view(torch.int64)
    elif values.is_floating_point():
        values = values.view(_INTEGERS[values.itemsize])
    return values.sum(dtype=torch.int64)


class ChecksumTrace:
    """Context around forwards and backwards that checksums what each module computes.

    The checksums are in the order in which the tensors were made: a module's own output comes
    before that of the module that holds it. Nothing is read from the device.

    Args:
        model: its modules are traced.
        untraced: names of modules that no hook may be registered on.

    Attributes:
        places: what each checksum is of, in words.
        sums: the checksums, int64 [] each.
    """

    def __init__(self, model: nn.Module, untraced: Container[str] = ()) -> None:
        self.places: list[str] = []
        self.sums: list[Tensor] = []
        self._modules = {
            name: module for name, module in model.named_modules() if name not in untraced
        }
        self._last_output: tuple[Tensor, int] | None = None  # with its version
        self._stack = ExitStack()

    def __enter__(self) -> "ChecksumTrace":
        for name, module in self._modules.items():
            hook = partial(self._after_forward, name)
            handle = module.register_forward_hook(hook, with_kwargs=True)
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, place: str, tensor: Tensor) -> None:
        """Append the checksum of a tensor."""
        self.places.append(place)
        self.sums.append(checksum(tensor))

    def _after_forward(
        self, name: str, _: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        label = name or "the model"
        made = _tensors(output)
        for tensor in made:
            # A container returns the output of its last part, which is traced already.
            if not self._is_last_output(tensor):
                self.add(f"the output of {label}", tensor)
            self._last_output = (tensor, tensor._version)
        # The gradient of a module's input is what its own backward computes. A tensor hook, because
        # a backward hook on the module refuses what writes in place; a module that does so returns
        # its input, whose gradient belongs to the next module.
        made_ids = {id(tensor) for tensor in made}
        for tensor in _tensors((args, kwargs)):
            if tensor.grad_fn is not None and id(tensor) not in made_ids:
                tensor.register_hook(partial(self.add, f"the gradient of the input of {label}"))
        for tensor in made:
            if not name and tensor.grad_fn is not None:
                tensor.register_hook(partial(self.add, "the gradient of the model's output"))

    def _is_last_output(self, tensor: Tensor) -> bool:
        """Return whether this very tensor was traced last, and not written to since."""
        if self._last_output is None:
            return False
        last, version = self._last_output
        return tensor is last and tensor._version == version


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
