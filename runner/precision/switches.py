"""Select how a process computes products: the switches and kernels of a precision's session."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from runner.core import random_streams, sessions
from runner.precision.emulation.cpu_kernels import float32_accumulate, tf32_products
from runner.precision.emulation.cuda_autocast import cuda_casts
from runner.precision.emulation.grouped_casts import grouped_casts

# Attributes of torch.backends.cuda.matmul.
_SWITCHES = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
MATMUL_PRECISIONS = ("highest", "high", "medium")  # of torch.set_float32_matmul_precision


@contextmanager
def switched(switches: sessions.Switches, model: nn.Module) -> Iterator[None]:
    """Return the context in which switches are set."""
    with ExitStack() as stack:
        stack.enter_context(float32_matmul(switches.float32_matmul))
        stack.enter_context(reduced_precision_sums(switches.reduced_sums))
        for key in switches.replacements:
            if isinstance(key, torch.dtype):
                stack.enter_context(float32_accumulate(key))
            elif key == "tf32":
                stack.enter_context(tf32_products(model))
            elif key == "calls_parts":
                fuses = torch.backends.mha.get_fastpath_enabled()
                stack.callback(torch.backends.mha.set_fastpath_enabled, fuses)
                torch.backends.mha.set_fastpath_enabled(False)
            else:
                stack.enter_context(cuda_casts() if key == "cuda_casts" else grouped_casts())
        yield


@contextmanager
def reduced_precision_sums(allowed: bool) -> Iterator[None]:
    """Set whether float16 and bfloat16 products on CUDA may add their parts in half precision,
    and restore torch's switches after, also after an exception.

    torch's default allows it: cuBLAS may then split a long sum (split-K) and add the parts in the
    dtype of the result, which rounds each of them.

    Args:
        allowed: whether sums may be in half precision.

    Source: pytorch.org/docs/stable/notes/numerical_accuracy.html, reduced precision reduction.
    """
    matmul = torch.backends.cuda.matmul
    # With each switch whether sums may be split at all.
    previous = {s: (getattr(matmul, s), getattr(matmul, f"{s}_split_k")) for s in _SWITCHES}
    for switch, (_, split_k) in previous.items():
        # torch refuses reduced sums where sums may not be split at all.
        setattr(matmul, switch, (allowed, allowed or split_k))
    try:
        yield
    finally:
        for switch, before in previous.items():
            setattr(matmul, switch, before)


@contextmanager
def float32_matmul(precision: str) -> Iterator[None]:
    """Set PyTorch's TF32 switches for matmul and cuDNN, and restore them after.

    Args:
        precision: one of MATMUL_PRECISIONS.
    """
    restore = random_streams.saved_float32_switches()
    random_streams.set_float32_switches(precision)
    try:
        yield
    finally:
        restore()
