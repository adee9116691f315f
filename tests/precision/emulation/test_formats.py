import pytest
import torch

from runner.precision.emulation.formats import (
    E2M1,
    E4M3,
    E5M2,
    FLOAT16,
    FORMATS,
    round_to_format,
    round_to_tf32,
    round_within_range,
)

EVERY = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
INFINITY = float("inf")


def of_bits(bits):
    return bits.to(torch.int32).view(torch.float32)


def all_values(dtype):
    """Return each value of a format, in float32: every bit pattern of it."""
    kind = torch.int16 if dtype.itemsize == 2 else torch.int8
    width = 8 * dtype.itemsize
    return torch.arange(-(2 ** (width - 1)), 2 ** (width - 1)).to(kind).view(dtype).float()


def assert_rounded_as_torch_does(x, fmt):
    """Compare rounding with torch's cast, bit by bit; NaN need only be NaN."""
    ours, theirs = round_to_format(x, fmt), x.to(fmt.dtype).float()
    if fmt.saturates:  # torch before 2.15 makes NaN of what overflows
        theirs = torch.where(theirs.isnan() & ~x.isnan(), ours, theirs)
        assert (ours.abs() <= fmt.largest)[~x.isnan()].all()
    assert ours.dtype is torch.float32
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isnan(), x.isnan())
    number = ~x.isnan()
    assert torch.equal(ours[number].view(torch.int32), theirs[number].view(torch.int32))


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_values_of_both_half_formats(fmt, dtype):
    assert_rounded_as_torch_does(all_values(dtype), fmt)


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
def test_rounding_within_the_range_is_rounding_of_what_is_clamped(fmt):
    """On every pattern of the upper 18 bits, below, at and above the midpoints of all formats."""
    upper = torch.arange(-(2**17), 2**17) << 14
    for lower in (0, 1, 2**13 - 1, 2**13, 2**13 + 1, 2**14 - 1):
        x = of_bits(upper + lower)
        ours, wanted = (
            round_within_range(x, fmt),
            round_to_format(x.clamp(-fmt.largest, fmt.largest), fmt),
        )
        number = ~x.isnan()
        assert torch.equal(ours.isnan(), ~number)
        assert torch.equal(ours[number].view(torch.int32), wanted[number].view(torch.int32))


@EVERY
def test_all_midpoints_and_their_neighbours(fmt):
    values = all_values(fmt.dtype)
    values = values[values.isfinite()].unique()
    middle = ((values[1:].double() + values[:-1].double()) / 2).float()
    top = torch.tensor([fmt.overflow, -fmt.overflow])
    spots = torch.cat([values, middle, top])
    for toward in (INFINITY, -INFINITY):
        spots = torch.cat([spots, torch.nextafter(spots, torch.tensor(toward))])
    assert_rounded_as_torch_does(spots, fmt)


@EVERY
def test_random_bit_patterns(fmt):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator)
    assert_rounded_as_torch_does(of_bits(bits), fmt)
    near = torch.randn(300_000, generator=generator) * fmt.normal * 2
    assert_rounded_as_torch_does(near, fmt)


@EVERY
def test_nan_and_the_ends_of_the_range(fmt):
    odd = [INFINITY, -INFINITY, float("nan"), 0.0, -0.0, 3.4028235e38, 1e-45, -1e-45]
    assert_rounded_as_torch_does(torch.tensor(odd), fmt)
    just = torch.tensor([fmt.overflow]), torch.nextafter(torch.tensor([fmt.overflow]), just_under())
    past = fmt.largest if fmt.saturates else INFINITY
    assert [round_to_format(x, fmt).item() for x in just] == [past, fmt.largest]


def just_under():
    return torch.tensor(0.0)


@EVERY
def test_a_format_is_what_torch_says_it_is(fmt):
    info = torch.finfo(fmt.dtype)
    assert (fmt.name, fmt.largest, fmt.normal) == (str(fmt.dtype)[6:], info.max, info.tiny)
    assert 2.0**-fmt.mantissa == info.eps


def test_shape_and_input_are_kept():
    x = torch.randn(3, 5).t()
    before = x.clone()
    assert round_to_format(x, FLOAT16).shape == (5, 3)
    assert torch.equal(x, before)
    assert torch.equal(round_to_format(torch.empty(0), E5M2), torch.empty(0))


def test_e2m1_rounds_to_its_four_bit_values():
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    middle = (values[1:] + values[:-1]) / 2
    even = torch.tensor([0, 1, 1, 2, 2, 4, 4.0])  # the neighbour whose last bit is 0
    spots = torch.cat([values, middle, middle - 1e-3, middle + 1e-3, torch.tensor([6.9, 7, 1e9])])
    expected = torch.cat([values, even, values[:-1], values[1:], torch.tensor([6.0, 6, 6])])
    assert torch.equal(round_to_format(spots, E2M1), expected)
    assert torch.equal(round_to_format(-spots, E2M1), -expected)


def test_tf32_is_the_nearest_of_ten_bits_ties_away_from_zero():
    generator = torch.Generator().manual_seed(0)
    x = of_bits(torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator))
    ties = torch.tensor([1 + 2**-11, -1 - 2**-11, 1 + 2**-12])
    x = torch.cat([x, all_values(torch.float16), ties])
    x = x[x.isfinite() & (x.abs() < 2.0**127) & (x.abs() >= 2.0**-126)]
    mantissa, exponent = torch.frexp(x.double())
    scaled = mantissa * 2.0**11  # ten bits and the leading one
    nearest = (scaled.abs() + 0.5).floor().copysign(scaled)
    assert torch.equal(round_to_tf32(x).double(), torch.ldexp(nearest / 2.0**11, exponent))
    odd = torch.tensor([INFINITY, -INFINITY, float("nan"), -0.0])
    assert str(round_to_tf32(odd)) == str(odd)
