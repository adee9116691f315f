"""Rows in multiples of what FP8 products need: a batch's last part may have any number of them."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F


def pad_rows(forward: Callable[[Tensor], Tensor], inputs: Tensor, multiple: int) -> Tensor:
    """`forward(inputs)`, its rows padded with zeros to a multiple and the padding cut off again.

    A linear layer's weight gradient contracts over the rows, so they must be such a multiple
    although the forward alone takes any number. A row of zeros changes no amax, and its gradient
    is zero, so neither outputs nor gradients depend on the padding.

    Args:
        forward: maps [rows, in] to [rows, out], row by row (a bias may be in it).
        inputs: [..., in]. Where the rows divide (and there are any), forward takes it as it is.
        multiple: of rows.

    Returns:
        Outputs [..., out].
    """
    *leading, width = inputs.shape
    flat = inputs.reshape(inputs.numel() // width, width)
    rows = flat.shape[0]
    missing = -rows % multiple if rows else multiple  # no amax of nothing
    if not missing:
        return forward(inputs)
    outputs = forward(F.pad(flat, (0, 0, 0, missing)))[:rows]
    return outputs.reshape(*leading, outputs.shape[-1])
