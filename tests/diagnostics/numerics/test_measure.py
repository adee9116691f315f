import math

import pytest
import torch

from runner.diagnostics.numerics.measure import (
    BLOCK_ELEMENTS,
    CHUNK_BLOCKS,
    MAX_SAMPLE_ELEMENTS,
    READINGS,
    SampledTensor,
    count_exponents,
    is_measurable,
    quantization_losses,
    take_sample,
)
from runner.precision.emulation.formats import FLOAT16, FORMATS


def measured(x, **more):
    (counted,) = count_exponents([SampledTensor(take_sample(x), **more)])
    return counted, quantization_losses([counted])


def spread_over(fmt, count=5000, seed=0):
    """Magnitudes far below, in and above a format's range."""
    generator = torch.Generator().manual_seed(seed)
    least, most = fmt.exponent - fmt.mantissa - 4, int(math.log2(fmt.largest)) + 4
    exponents = torch.randint(least, most, (count,), generator=generator)
    x = (1 + torch.rand(count, generator=generator)) * torch.exp2(exponents.float())
    return x * (torch.randint(2, (count,), generator=generator) * 2 - 1)


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn_unscaled", "float8_e5m2_unscaled"])
def test_shares_are_those_of_torchs_casts(name):
    fmt = FORMATS[name.removesuffix("_unscaled")]
    x = torch.cat([spread_over(fmt), torch.zeros(77)])
    cast = x.clamp(-fmt.largest, fmt.largest).to(fmt.dtype).float().abs()
    _, found = measured(x)
    values = (x != 0).sum().item()
    assert found[name].underflow == ((cast == 0) & (x != 0)).sum().item() / values
    assert found[name].subnormal == ((cast > 0) & (cast < fmt.normal)).sum().item() / values
    assert found[name].overflow == (x.abs() >= fmt.overflow).sum().item() / values
    assert found[name].overflow > 0 < found[name].underflow


@pytest.mark.parametrize(("name", "fmt", "scaled"), READINGS, ids=lambda v: str(v)[:24])
def test_noise_is_that_of_torchs_casts(name, fmt, scaled):
    x = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 1e-3
    scale = fmt.largest / x.abs().max() if scaled else 1.0
    error = x.double() - (x * scale).to(fmt.dtype).double() / scale
    wanted = 10 * math.log10(x.double().square().sum() / error.square().sum())
    assert measured(x)[1][name].sqnr_db == pytest.approx(wanted, abs=0.01)


def test_fp8_is_scaled_to_its_largest_value():
    """As a recipe with a scale per tensor does it, however small the values are."""
    x = torch.randn(4000, generator=torch.Generator().manual_seed(2))
    for factor in (2.0**-100, 2.0**100):
        _, small = measured(x * factor)
        assert small["float8_e4m3fn"] == measured(x)[1]["float8_e4m3fn"]
        assert small["float8_e4m3fn"].overflow == 0
    assert small["float8_e4m3fn_unscaled"].overflow == 1


def test_exponents_zeros_and_what_is_not_finite():
    ones, tiny = [1.0, 1.5, -1.99], [2.0**-126, 2.0**-130]
    x = torch.tensor([0.0, -0.0, *ones, 2.0, *tiny, 3e38, math.inf, math.nan])
    counted, found = measured(x)
    bins = {i - 127: int(n) for i, n in enumerate(counted.exponents) if n}
    assert bins == {0: 3, 1: 1, -126: 1, -127: 1, 127: 1}
    assert (counted.elements, counted.zeros, counted.not_finite) == (11, 2, 2)
    assert not math.isfinite(counted.largest)
    assert found["float16"].overflow == pytest.approx(1 / 7)
    assert all(math.isfinite(value.sqnr_db) for value in found.values())


def test_largest_is_of_the_whole_tensor():
    x = torch.full((10 * MAX_SAMPLE_ELEMENTS + 1,), 0.5)
    x[1] = -3.0  # no sample falls on it
    counted, _ = measured(x)
    assert counted.largest == 3.0
    assert counted.exponents.sum() == pytest.approx(len(x))
    assert counted.elements == len(x)


def test_a_sample_falls_on_every_channel():
    x = torch.arange(8 * MAX_SAMPLE_ELEMENTS).reshape(-1, 8).float() % 8
    taken = take_sample(x)
    assert len(taken.values) <= MAX_SAMPLE_ELEMENTS
    assert taken.values.unique().tolist() == list(range(8))


def test_a_sample_is_a_copy():
    x = torch.ones(4)
    taken = take_sample(x)
    x.zero_()
    assert taken.values.tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_every_floating_dtype(dtype):
    x = torch.tensor([[1.0, -3.0], [0.0, 2.0]]).to(dtype).t()
    assert is_measurable(x)
    counted, _ = measured(x)
    assert counted.largest == 3.0
    assert counted.elements == (8 if x.is_complex() else 4)
    assert counted.exponents.sum() == 3


def test_integers_sparse_and_empty_tensors_are_not_measured():
    for dtype in (torch.int64, torch.uint8, torch.float8_e5m2):
        assert not is_measurable(torch.ones(3).to(dtype))
    assert not is_measurable(torch.empty(0, 4))
    assert not is_measurable(torch.eye(3).to_sparse())


def test_many_tensors_are_counted_separately():
    """More than one chunk of them, each as if it were alone."""
    generator = torch.Generator().manual_seed(3)
    some = [1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 3]
    sizes = [*some, MAX_SAMPLE_ELEMENTS, 5 * MAX_SAMPLE_ELEMENTS] * 20
    tensors = [
        torch.randn(n, generator=generator) * 10.0 ** (i % 9 - 6) for i, n in enumerate(sizes)
    ]
    together = count_exponents([SampledTensor(take_sample(x)) for x in tensors])
    assert sum(len(take_sample(x).values) for x in tensors) > 2 * BLOCK_ELEMENTS * CHUNK_BLOCKS
    for x, found in zip(tensors, together, strict=True):
        alone, wanted = measured(x)
        for name in ("elements", "zeros", "largest"):
            assert getattr(found, name) == getattr(alone, name)
        assert (found.exponents == alone.exponents).all()
        assert quantization_losses([found]) == wanted


def test_updates_that_storage_swallows():
    weights = torch.ones(1000)
    update = torch.full((1000,), 2.0**-10)  # bfloat16's spacing at 1 is 2**-7, float16's 2**-10
    update[:100] = 2.0**-7
    update[900:] = 0.0
    _, found = measured(update, weights_before=weights, has_gradient=update != 0)
    assert found["float16"].swallowed == 0.0
    assert found["bfloat16"].swallowed == pytest.approx(800 / 900)
    assert found["float8_e4m3fn"].swallowed is None
    assert measured(update)[1]["float16"].swallowed is None


def test_parts_of_a_module_are_added_up_by_size():
    """A sample of a large tensor counts as all of it."""
    large = torch.full((4 * MAX_SAMPLE_ELEMENTS + 1,), 1.0)
    small = torch.full((MAX_SAMPLE_ELEMENTS,), 1e6)
    both = [SampledTensor(take_sample(x)) for x in (large, small)]
    together = quantization_losses(count_exponents(both))
    assert together["float16"].overflow == pytest.approx(0.2, abs=1e-4)
    assert FLOAT16.largest < 1e6
