"""Have autocast cast grouped products, which its own lists lack."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.precision.emulation.cpu_kernels import BoxedKernel, Kernels, replace_kernels

_GROUPED_PRODUCTS = {"aten": "_grouped_mm", "transformers": "grouped_mm_fallback"}
"""Operators that multiply each expert's rows by its weight, by namespace: torch's, and that of
transformers where torch's has no kernel and under torch.compile."""
_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA", "AutocastMPS", "AutocastXLA")


@contextmanager
def grouped_casts() -> Iterator[None]:
    """Have autocast cast grouped products while the context is open: torch's lists lack them, so
    that it would leave the experts of a mixture in float32.

    It is process-wide: see cpu_kernels.replace_kernels.
    """
    settings = torch.compiler.config
    tag = settings.cache_key_tag
    try:
        # Compiled code that is stored on disk without these casts must not be loaded. Not by
        # settings.patch, which only the thread that entered it can leave.
        settings.cache_key_tag = f"{tag}grouped_casts"
        with ExitStack() as stack:
            for namespace, name in _GROUPED_PRODUCTS.items():
                kernels = partial(_grouped_kernels, namespace, name)
                stack.enter_context(replace_kernels(name, kernels, namespace))
            yield
    finally:
        settings.cache_key_tag = tag


def _grouped_kernels(namespace: str, name: str) -> Kernels:
    return {(name, key): _grouped_kernel(namespace, name, key) for key in _AUTOCAST_KEYS}


def _grouped_kernel(namespace: str, name: str, key: str) -> BoxedKernel:
    """Return an operator's kernel for a dispatch key of autocast, which calls it with its operands
    cast."""
    autocast_key = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def run(_: Any, *args: Any) -> Any:
        device_type = args[0].device.type
        # A call with out_dtype has chosen its dtypes, as one of mm has.
        if not any(isinstance(value, torch.dtype) for value in args):
            half = torch.get_autocast_dtype(device_type)
            args = tuple(_autocast_operand(value, half) for value in args)
        # The operator is defined once its library is imported.
        operator = getattr(getattr(torch.ops, namespace), name)
        args, width = _aligned(*args)
        with torch._C._ExcludeDispatchKeyGuard(autocast_key):
            return operator(*args)[..., :width]

    return run


def _aligned(rows: Tensor, weight: Tensor, *rest: Any) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of a grouped product in half precision, padded with zeros to the sizes
    that its kernels take, and the width of its output.

    Args:
        rows: [..., contracted].
        weight: [experts, contracted, width].
        rest: the other arguments.
    """
    width = weight.shape[-1]
    contracted_missing, width_missing = -rows.shape[-1] % 8, -width % 8
    if rows.itemsize == 2 and weight.ndim == 3 and (contracted_missing or width_missing):
        rows = F.pad(rows, (0, contracted_missing))
        weight = F.pad(weight, (0, width_missing, 0, contracted_missing))
    return (rows, weight, *rest), width


def _autocast_operand(value: Any, half: torch.dtype) -> Any:
    is_cast = isinstance(value, Tensor) and value.is_floating_point()
    # Autocast leaves float64.
    return value.to(half) if is_cast and value.dtype is not torch.float64 else value
