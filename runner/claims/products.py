"""Measure claims about products of matrices in int8 and FP8."""

from typing import Any

import torch
from torch import Tensor

from runner.claims.claim import Measurement
from runner.precision.emulation.formats import E4M3
from runner.precision.emulation.hopper import scaled_product
from runner.precision.emulation.quantizers import BlockQuantizer, amax_scale

OUTLIER_THRESHOLD = 6.0


def int8_outliers() -> Measurement:
    """Measure the errors of bitsandbytes' int8 layer on inputs with a large column of 1024.

    The column is 60 times as large as the others; with the threshold the layer multiplies it in
    float16. The layer is the library's own, on the CPU.
    """
    from runner.precision.layers.bnb_library import bnb

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 1024, generator=generator) / 32
    # No other value reaches the threshold.
    rows = torch.randn(256, 1024, generator=generator).clamp_(-5, 5)
    rows[:, 0] *= 60
    errors = {}
    for label, threshold in (("plain", 0.0), ("outliers apart", OUTLIER_THRESHOLD)):
        layer = bnb.nn.Linear8bitLt(
            1024, 1024, bias=False, has_fp16_weights=False, threshold=threshold
        ).eval()
        kind: Any = bnb.nn.Int8Params
        layer.weight = kind(weight.clone(), requires_grad=False, has_fp16_weights=False)
        with torch.no_grad():
            output = layer.to("cpu")(rows.half())
        exact = rows.half().double() @ weight.double().t()
        errors[label] = ((output - exact).norm() / exact.norm()).item()
    ratio = errors["plain"] / errors["outliers apart"]
    return Measurement({**errors, "plain / apart": ratio})


def hopper_sums(size: int = 64) -> Measurement:
    """Measure the largest error of FP8 products with K = 4096 summed as on Hopper.

    Errors are those of the sums alone, relative to the root mean square of the exact products of
    the quantised operands. Both have one scale for a tensor.

    Args:
        size: rows and columns of the product.
    """
    values = {}
    for label, draw in (("normal", torch.randn), ("uniform", torch.rand)):
        generator = torch.Generator().manual_seed(0)
        quantizer = BlockQuantizer(E4M3, amax_scale, keeps_scales=True)
        a = quantizer(draw(size, 4096, generator=generator))
        b = quantizer(draw(size, 4096, generator=generator))
        exact = _values(a) @ _values(b).t()
        unit = exact.square().mean().sqrt()
        for suffix, promotes in (("", False), (" promoted", True)):
            error = (scaled_product(a, b, promotes) - exact).abs().max() / unit
            values[f"{label}{suffix}"] = error.item()
    return Measurement(values)


def _values(operand: Tensor) -> Tensor:
    """Return the float64 values of an operand of scaled_product."""
    return operand.double().prod(0)
