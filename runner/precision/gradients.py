"""Norms and clipping of gradients, sparse and complex ones included. Nothing here is read on the
host."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

_NEEDS_NO_WIDENING = ({torch.float32}, {torch.float64})


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def coalesce_gradients(params: Sequence[Tensor]) -> None:
    """Add up the rows of sparse gradients that belong to one index, in place."""
    # The backward appends a row per lookup. Norms and finiteness of the values are those of the
    # gradient only once each index has one row.
    for p in params:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()


def gradient_values(grad: Tensor) -> Tensor:
    """Return a gradient as a plain tensor that shares its memory: of a sparse one its values."""
    return grad.values() if grad.is_sparse else grad


def grad_norms(grads: list[Tensor]) -> Tensor:
    """Return the 2-norm of each gradient, [len(grads)], accumulated in float32 at least.

    Raises:
        RuntimeError: no parameter received a gradient.
    """
    if not grads:
        raise RuntimeError("no parameter received a gradient: the loss does not depend on any")
    dtypes = {grad.dtype for grad in grads}
    if dtypes in _NEEDS_NO_WIDENING:
        return torch.stack(torch._foreach_norm(grads))
    # Without dtype= the norm would be rounded to the gradients' dtype: above 65504 it is infinite
    # in float16, and bfloat16 keeps 8 bits.
    has_double = bool(dtypes & {torch.float64, torch.complex128})
    wide = torch.float64 if has_double else torch.float32
    # A real view has the same 2-norm, and only real tensors can be accumulated in a given dtype.
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    return torch.stack(torch._foreach_norm(real, 2.0, dtype=wide))


def total_norm(norms: Tensor) -> Tensor:
    """Return the 2-norm of all gradients, a scalar, of the norm of each: [gradients]."""
    # An optimizer whose gradients overflowed skips its step. Without the replacement, its infinite
    # norm would scale the gradients of the other optimizers to zero.
    return torch.linalg.vector_norm(norms.nan_to_num(nan=0.0, posinf=0.0))


def scale_to_norm(grads: list[Tensor], total: Tensor, limit: float) -> None:
    """Scale gradients in place to a 2-norm of at most the limit.

    Args:
        grads: changed in place.
        total: their 2-norm, a scalar.
        limit: largest 2-norm of all of them together.
    """
    # 1e-6 as in torch.nn.utils.clip_grad_norm_. Multiplied always, even by 1: to ask whether the
    # norm is above the limit would be a read of the device.
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factor)


def clip_elements(grads: list[Tensor], limit: float) -> None:
    """Set each element of the gradients to the range from -limit to limit, in place.

    Of a complex element, its real and its imaginary part. NaN stays NaN.
    """
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    # torch refuses a limit that the dtype cannot hold.
    limits = [min(limit, torch.finfo(grad.dtype).max) for grad in real]
    torch._foreach_clamp_min_(real, [-value for value in limits])
    torch._foreach_clamp_max_(real, limits)
