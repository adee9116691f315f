"""Norms and clipping of gradients, sparse and complex ones included. Nothing here is read on the
host."""

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.core.base.tensor_facts import cast_gradients


def parameters_of(*optimizers: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [p for group in groups for p in group["params"]]


def finish_gradients(params: Iterable[Tensor]) -> None:
    """Put the gradients that a backward has left into the form that optimizers read, in place."""
    for p in params:
        if p.grad is None:
            continue
        # The backward appends a row per lookup. Norms and finiteness of the values are those of the
        # gradient only once each index has one row.
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()
        # Autograd leaves lazy conjugates in complex gradients, which optimizers cannot read.
        if p.grad.is_complex():
            p.grad = p.grad.resolve_conj()


def round_gradients(optimizers: Iterable[Optimizer], widened: Collection[Tensor]) -> None:
    """Round the gradients that optimizers read, except where a step computes in float32.

    Args:
        optimizers: that step next.
        widened: parameters whose gradients were added in float32.
    """
    # The attribute is set by runner.precision.wide_step, whose step widens gradients itself.
    narrow = [optimizer for optimizer in optimizers if not hasattr(optimizer, "kept_dtype")]
    cast_gradients(p for p in parameters_of(*narrow) if p in widened)


def gradients_of(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of those parameters that have one, as plain tensors.

    Of a sparse gradient they are its values, which share its memory.
    """
    grads = [p.grad for p in params if p.grad is not None]
    return [grad.values() if grad.is_sparse else grad for grad in grads]


def grad_norms(grads: list[Tensor]) -> Tensor:
    """Return the 2-norm of each gradient, [len(grads)], accumulated in float32 at least.

    Raises:
        RuntimeError: no parameter received a gradient.
    """
    if not grads:
        raise RuntimeError("no parameter received a gradient: the loss does not depend on any")
    dtypes = {grad.dtype for grad in grads}
    if dtypes in ({torch.float32}, {torch.float64}):
        return torch.stack(torch._foreach_norm(grads))
    # Without dtype= the norm would be rounded to the gradients' dtype: above 65504 it is infinite
    # in float16, and bfloat16 keeps 8 bits.
    has_double = bool(dtypes & {torch.float64, torch.complex128})
    wide = torch.float64 if has_double else torch.float32
    # A real view has the same 2-norm, and only real tensors can be accumulated in a given dtype.
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    return torch.stack(torch._foreach_norm(real, 2.0, dtype=wide))


def clip_gradients(
    grads: list[Tensor],
    norm: float | None,
    value: float | None,
    reduce_norm: Callable[[Tensor], Tensor] = lambda total: total,
) -> Tensor:
    """Clip unscaled gradients in place, and return the 2-norm of each before that: [len(grads)].

    An overflow makes norms infinite and never raises.

    Args:
        grads: of all optimizers together.
        norm: largest 2-norm of all of them together; None does not limit it.
        value: largest magnitude of each element; None does not limit it.
        reduce_norm: returns the 2-norm over all processes, of that of this process's shards.
    """
    norms = grad_norms(grads)
    if value is not None:
        clip_elements(grads, value)
    if norm is not None:
        # An optimizer whose gradients overflowed skips its step. Without the replacement, its
        # infinite norm would scale the gradients of the other optimizers to zero.
        finite = norms.nan_to_num(nan=0.0, posinf=0.0)
        total = reduce_norm(torch.linalg.vector_norm(finite))
        # 1e-6 as in torch.nn.utils.clip_grad_norm_. Multiplied always, even by 1: to ask whether
        # the norm is above the limit would be a read of the device.
        torch._foreach_mul_(grads, (norm / (total + 1e-6)).clamp(max=1.0))
    return norms


def clip_elements(grads: list[Tensor], limit: float) -> None:
    """Set each element of the gradients to the range from -limit to limit, in place.

    Of a complex element, its real and its imaginary part. NaN stays NaN.
    """
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    # torch refuses a limit that the dtype cannot hold.
    limits = [min(limit, torch.finfo(grad.dtype).max) for grad in real]
    torch._foreach_clamp_min_(real, [-value for value in limits])
    torch._foreach_clamp_max_(real, limits)


def any_found_inf(found_infs: Sequence[Tensor | None]) -> Tensor | None:
    """Return whether any optimizer's gradients overflowed, a scalar; None without a loss scale."""
    flags = [flag for flag in found_infs if flag is not None]
    if len(flags) > 1:
        return torch.stack(flags).amax()
    return flags[0] if flags else None
