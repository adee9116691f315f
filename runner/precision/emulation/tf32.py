"""TF32 on a CPU: the operands of float32 products rounded to ten bits of mantissa, products and
sums in float32, as tensor cores do."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner.precision.emulation.dispatcher import (
    INTO,
    Boxed,
    Kernels,
    original_kernel,
    replace_kernels,
)
from runner.precision.emulation.formats import as_tf32

PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "_addmm_activation": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
}
"""Operators that tensor cores compute, and which of their arguments are operands of products."""


@contextmanager
def tf32_products(model: nn.Module) -> Iterator[None]:
    """Context in which the operators of PRODUCTS round their operands; see cpu_kernels.replaced.

    Attention and LSTMs are computed from those operators, not by kernels of their own.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.LSTM) for module in model.modules()):
            stack.enter_context(_without_onednn())
        stack.enter_context(replace_kernels("tf32", _kernels))
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    onednn = torch.backends.mkldnn
    before, onednn.enabled = onednn.enabled, False  # its flags() warns of a setting that is gone
    try:
        yield
    finally:
        onednn.enabled = before


def _kernels() -> Kernels:
    own = PRODUCTS | {variant: PRODUCTS[name] for variant, name in INTO.items()}
    return {(name, "CPU"): _rounding(original_kernel(name), places) for name, places in own.items()}


def _rounding(native: Boxed, places: tuple[int, ...]) -> Boxed:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        rounded = list(args)
        for place in places:
            rounded[place] = _operand(args[place])
        return native(keys, *rounded, **kwargs)

    return run


def _operand(x: Tensor) -> Tensor:
    if x.dtype is torch.float32:
        return as_tf32(x)
    if x.dtype is torch.complex64:
        return torch.view_as_complex(as_tf32(torch.view_as_real(x.resolve_conj().resolve_neg())))
    return x
