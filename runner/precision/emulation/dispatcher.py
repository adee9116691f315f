"""Replace kernels of PyTorch's CPU operators while a context is open.

The replacements are registered with PyTorch's dispatcher (torch.library), below autograd, so they
hold for the forward and the backward of any model, in every thread.
"""

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

BoxedKernel = Callable[..., Any]
"""A kernel, called as f(dispatch keys, *args, **kwargs)."""
Kernels = Mapping[tuple[str, str], BoxedKernel]
"""Kernels by (operator, dispatch key)."""

WRITING_VARIANTS = {
    "mm.out": "mm",
    "bmm.out": "bmm",
    "addmm.out": "addmm",
    "baddbmm.out": "baddbmm",
    "addbmm.out": "addbmm",
    "addmm_": "addmm",
    "baddbmm_": "baddbmm",
    "addbmm_": "addbmm",
}
"""Operators that write into a given tensor, and the operator whose result they write. Compiled
graphs call them."""

_lock = threading.Lock()
# Of each set of kernels in place: how many contexts are open, and what holds the kernels.
_active: dict[Hashable, tuple[int, torch.library.Library]] = {}


@contextmanager
def replace_kernels(key: Hashable, make_kernels: Callable[[], Kernels]) -> Iterator[None]:
    """Register other kernels while the context is open.

    They are process-wide: every thread and every forked worker has them, which the autograd engine
    needs. Contexts with the same key nest; the last exit, also after an exception, restores the
    dispatcher. Compile a model inside the context and use it inside only.

    Open the first and close the last while no other thread computes: PyTorch's dispatcher removes
    a kernel without waiting for a thread that runs it, which ends in an error or a crash.

    Args:
        key: identifies the kernels among the open contexts.
        make_kernels: returns the kernels; called once, while PyTorch's own are in place.
    """
    with _lock:
        if key not in _active:
            _active[key] = 0, _install(make_kernels())
        depth, library = _active[key]
        _active[key] = depth + 1, library
    try:
        yield
    finally:
        with _lock:
            depth, library = _active.pop(key)
            if depth > 1:
                _active[key] = depth - 1, library
            else:
                # Deleting the last reference would do too, but a stored traceback may hold one.
                library._destroy()


def original_kernel(name: str, key: str = "CPU") -> BoxedKernel:
    """Return the kernel that the dispatcher has now for an ATen operator and a dispatch key."""
    return torch.library.get_kernel(f"aten::{name}", key).call_boxed


def _install(kernels: Kernels) -> torch.library.Library:
    """Register kernels and return the library that holds them: active until it is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # torch before 2.12 warns of each override.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for (name, key), kernel in kernels.items():
                library.impl(name, kernel, key, with_keyset=True)
    except BaseException:
        library._destroy()
        raise
    return library
