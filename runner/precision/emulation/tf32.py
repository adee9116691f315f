"""Emulate TF32 on a CPU: round the operands of float32 products to ten bits of mantissa.

Products and sums stay in float32, as on NVIDIA's tensor cores since Ampere (A100 Tensor Core GPU
Architecture, 2020). The order of summation is the CPU's, so results differ from a GPU's in the last
bits of float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner.precision.emulation.dispatcher import (
    WRITING_VARIANTS,
    BoxedKernel,
    Kernels,
    original_kernel,
    replace_kernels,
)
from runner.precision.emulation.formats import round_to_tf32

PRODUCT_OPERANDS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "_addmm_activation": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
}
"""Operators that tensor cores compute, and the positions of the operands among their arguments."""


@contextmanager
def tf32_products(model: nn.Module) -> Iterator[None]:
    """Round the operands of the operators in PRODUCT_OPERANDS while the context is open.

    It is process-wide: see dispatcher.replace_kernels. Attention and LSTMs are computed from those
    operators, not by kernels of their own, which could not be rounded inside.

    Args:
        model: that is computed inside; looked through for LSTMs.
    """
    onednn = torch.backends.mkldnn
    # Not by its context manager flags(), which warns of a deprecated setting.
    previous = onednn.enabled
    if any(isinstance(module, nn.LSTM) for module in model.modules()):
        # It has a fused kernel for LSTMs.
        onednn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH), replace_kernels("tf32", _kernels):
            yield
    finally:
        onednn.enabled = previous


def _kernels() -> Kernels:
    operands = dict(PRODUCT_OPERANDS)
    for variant, name in WRITING_VARIANTS.items():
        operands[variant] = PRODUCT_OPERANDS[name]
    return {
        (name, "CPU"): _with_rounded_operands(original_kernel(name), positions)
        for name, positions in operands.items()
    }


def _with_rounded_operands(native: BoxedKernel, positions: tuple[int, ...]) -> BoxedKernel:
    """Return a kernel that rounds the arguments at these positions before the native kernel."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        rounded = list(args)
        for position in positions:
            rounded[position] = _round_operand(args[position])
        return native(keys, *rounded, **kwargs)

    return run


def _round_operand(x: Tensor) -> Tensor:
    """Return a tensor rounded to TF32: float32, the parts of complex64; other dtypes unchanged."""
    if x.dtype is torch.float32:
        return round_to_tf32(x)
    if x.dtype is torch.complex64:
        return torch.view_as_complex(
            round_to_tf32(torch.view_as_real(x.resolve_conj().resolve_neg()))
        )
    return x
