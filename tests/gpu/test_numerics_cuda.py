"""What is measured of numbers on a GPU is what is measured on a CPU."""

import pytest
import torch

from runner.diagnostics.numerics.measure import (
    SampledTensor,
    count_exponents,
    quantization_losses,
    take_sample,
)
from runner.precision.emulation.formats import FORMATS, round_to_format

pytestmark = pytest.mark.gpu


@pytest.mark.imitated
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_rounding_is_that_of_a_cpu_bit_by_bit(fmt):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2_000_000,), generator=generator)
    x = bits.to(torch.int32).view(torch.float32)
    x = x[~x.isnan()]
    assert torch.equal(
        round_to_format(x.cuda(), fmt).cpu().view(torch.int32),
        round_to_format(x, fmt).view(torch.int32),
    )


def test_measures_are_those_of_a_cpu():
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(n, generator=generator) * 10.0 ** (i % 7 - 5)
        for i, n in enumerate([1, 1000, 100_000] * 9)
    ]
    here = count_exponents([SampledTensor(take_sample(x)) for x in tensors])
    there = count_exponents([SampledTensor(take_sample(x.cuda())) for x in tensors])
    for one, other in zip(here, there, strict=True):
        assert (one.elements, one.zeros, one.largest) == (
            other.elements,
            other.zeros,
            other.largest,
        )
        assert (one.exponents == other.exponents).all()
        for name, wanted in quantization_losses([one]).items():
            assert quantization_losses([other])[name][:4] == pytest.approx(wanted[:4], rel=1e-4)
