"""Other kernels for PyTorch's operators on a CPU, while a context is open."""

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Boxed = Callable[..., Any]
"""A kernel, called as f(dispatch keys, *args, **kwargs)."""
Kernels = Mapping[tuple[str, str], Boxed]
"""By operator and dispatch key."""

INTO = {
    "mm.out": "mm",
    "bmm.out": "bmm",
    "addmm.out": "addmm",
    "baddbmm.out": "baddbmm",
    "addbmm.out": "addbmm",
    "addmm_": "addmm",
    "baddbmm_": "baddbmm",
    "addbmm_": "addbmm",
}
"""Variants that write into a given tensor, and the operator that they write. Compiled graphs
call them."""

_lock = threading.Lock()
_open: dict[Hashable, tuple[int, torch.library.Library]] = {}


@contextmanager
def replace_kernels(what: Hashable, kernels: Callable[[], Kernels]) -> Iterator[None]:
    """Context with other kernels in place.

    Process-wide while it is open: every thread and every forked worker has them, which the
    autograd engine needs. It nests with itself; the last exit, also after an exception, restores
    the dispatcher. Compile inside it and stay inside it.

    Open the first and close the last while no other thread computes: PyTorch's dispatcher takes
    a kernel away without waiting for a thread that is in it, which ends in an error or a crash.

    Args:
        what: names the kernels, so that it knows itself again.
        kernels: makes them; called while PyTorch's own are in place.
    """
    _enter(what, kernels)
    try:
        yield
    finally:
        _exit(what)


def original_kernel(name: str, key: str = "CPU") -> Boxed:
    """The kernel registered now."""
    return torch.library.get_kernel(f"aten::{name}", key).call_boxed


def _enter(what: Hashable, kernels: Callable[[], Kernels]) -> None:
    with _lock:
        depth, library = _open.get(what) or (0, _install(kernels()))
        _open[what] = depth + 1, library


def _exit(what: Hashable) -> None:
    with _lock:
        depth, library = _open.pop(what)
        if depth > 1:
            _open[what] = depth - 1, library
        else:
            # Its last reference going would do it too, but a kept traceback may hold one.
            library._destroy()


def _install(kernels: Kernels) -> torch.library.Library:
    """The library that holds the kernels: active until it is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():  # before torch 2.12 it tells of each override
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for (name, key), kernel in kernels.items():
                library.impl(name, kernel, key, with_keyset=True)
    except BaseException:
        library._destroy()
        raise
    return library
