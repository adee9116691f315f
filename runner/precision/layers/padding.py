"""Pad rows to the multiple that FP8 products need: the last batch may have any number of rows."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F


def pad_rows(forward: Callable[[Tensor], Tensor], inputs: Tensor, multiple: int) -> Tensor:
    """Return `forward(inputs)`, computed on rows that are padded with zeros to a multiple.

    A linear layer's weight gradient contracts over the rows, so they must be such a multiple
    although the forward alone takes any number. A row of zeros changes no amax, and its gradient
    is zero, so neither outputs nor gradients depend on the padding.

    Args:
        forward: maps [rows, in] to [rows, out], row by row (a bias may be in it).
        inputs: [..., in], any dtype that forward takes. If there are rows and their number is such
            a multiple, forward takes the inputs unchanged.
        multiple: that the number of rows must have.

    Returns:
        Outputs [..., out] without the padding.
    """
    *leading, width = inputs.shape
    flat = inputs.reshape(inputs.numel() // width, width)
    rows = flat.shape[0]
    # Without rows there would be no amax to scale by.
    missing = -rows % multiple if rows else multiple
    if not missing:
        return forward(inputs)
    outputs = forward(F.pad(flat, (0, 0, 0, missing)))[:rows]
    return outputs.reshape(*leading, outputs.shape[-1])
