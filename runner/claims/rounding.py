"""Measure claims about single numbers and their sums: updates, weights, accumulators, formats."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from runner.claims.claim import Measurement
from runner.precision.emulation.formats import E4M3, E5M2, Format, round_to_format
from runner.precision.weight_updates import UPDATE_RULES
from runner.precision.wide_step import attach_update
from runner.utils.tensors import dtype_name

FLOAT_1_6_9 = Format(
    # No dtype of torch's: its values are held in float32.
    "float16_1_6_9",
    torch.float32,
    9,
    -30,
    2.0**31 * (2 - 2.0**-9),
    2.0**31 * (2 - 2.0**-10),
)
"""The 16-bit format of arXiv:1812.08011, with 6 bits of exponent and 9 of significand."""

Rounding = Callable[[Tensor], Tensor]


def lost_updates() -> Measurement:
    """Measure from which ratio of weight to update on an addition leaves a weight of 1 unchanged.

    The ratios are powers of two, and the additions those of the dtype.
    """
    values = {}
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.ones((), dtype=dtype)
        update = torch.ones((), dtype=dtype)
        while weight + update != weight:
            update = update / 2
        values[dtype_name(dtype)] = 1 / update.item()
    return Measurement(values)


def stalled_weights(weights: int = 10_000) -> Measurement:
    """Measure the mean of bfloat16 weights of 1 after 100 updates of 0.001, under each rule.

    Args:
        weights: number of them, over which stochastic rounding is averaged.
    """
    values = {}
    for rule in UPDATE_RULES:
        parameter = nn.Parameter(torch.ones(weights, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], lr=1e-3)
        attach_update(optimizer, rule)
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        values[rule] = parameter.detach().float().mean().item()
    return Measurement(values)


def stopped_sums() -> Measurement:
    """Measure where sums in 16 bits stop growing, and the error of a sum in chunks of 64.

    The numbers of the (1,6,9) format are uniform with mean 1 and standard deviation 1; IEEE
    float16 adds ones.
    """
    generator = torch.Generator().manual_seed(0)
    spread = math.sqrt(3)
    numbers = 1 + spread * (2 * torch.rand(65_536, generator=generator) - 1)

    def to_1_6_9(x: Tensor) -> Tensor:
        return round_to_format(x, FLOAT_1_6_9)

    numbers = to_1_6_9(numbers)
    in_chunks = _sum_in_order(_sum_in_order(numbers.view(-1, 64), to_1_6_9), to_1_6_9).item()
    exact = numbers.double().sum().item()
    return Measurement(
        {
            # A quarter of the numbers is enough to see the sum stop.
            "(1,6,9)": _sum_in_order(numbers[: 1 << 14], to_1_6_9).item(),
            "float16": _sum_in_order(torch.ones(5000).half(), torch.Tensor.half).item(),
            "error in chunks": abs(in_chunks - exact) / exact,
        }
    )


def _sum_in_order(numbers: Tensor, rounded: Rounding) -> Tensor:
    """Return the sums along the last dimension, rounded after each addition."""
    total = torch.zeros_like(numbers[..., 0])
    for column in numbers.unbind(-1):
        total = rounded(total + column)
    return total


def fp8_range() -> Measurement:
    """Measure the limits of torch's FP8 dtypes, and count where the emulation differs from them.

    The emulation rounds every value of a dtype, every midpoint of two neighbours, and random
    numbers.
    """
    values = {}
    differences = 0
    for label, fmt in (("E4M3", E4M3), ("E5M2", E5M2)):
        every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).float()
        finite = every[every.isfinite()].unique()
        normal = torch.finfo(fmt.dtype).smallest_normal
        values[f"{label} max"] = finite.max().item()
        values[f"{label} log2 min"] = math.log2(normal)
        values[f"{label} log2 sub"] = math.log2(finite[finite > 0].min().item())
        differences += int(fmt.largest != finite.max()) + int(fmt.normal != normal)
        inputs = [finite, (finite[1:] + finite[:-1]) / 2]
        inputs.append(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
        for x in inputs:
            differences += int((round_to_format(x, fmt) != x.to(fmt.dtype).float()).sum())
    values["differences"] = float(differences)
    return Measurement(values)
