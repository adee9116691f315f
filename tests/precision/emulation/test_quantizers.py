"""Operands in blocks: what recipes round, and how they scale it."""

import pytest
import torch
from precision_models import CPU, values_of_many_magnitudes

from runner.precision.emulation.formats import (
    E2M1,
    E4M3,
    E5M2,
    BlockQuantizer,
    Nvfp4Quantizer,
    amax_scale,
    exponent_scale,
    hadamard_rotation,
    power_of_two_scale,
    round_to_format,
)

RULES = [amax_scale, power_of_two_scale, exponent_scale]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_the_largest_value_stays_in_range_and_near_its_end(rule, fmt):
    amax = 10.0 ** torch.linspace(-30, 30, 999)
    top = amax * rule(amax, fmt)
    # The one that divides may round above by a last bit, which saturates.
    assert (top <= fmt.largest * (1 + 2**-22)).all()
    assert (top > fmt.largest / (1.001 if rule is amax_scale else 2.001)).all()


def plain_blocks(x, fmt, rule, shape):
    """Blocks, one after another, in as few words as possible."""
    out = torch.empty(x.shape)
    down, across = shape
    for i in range(0, x.shape[0], down):
        for j in range(0, x.shape[1], across):
            block = x[i : i + down, j : j + across]
            scale = rule(block.abs().max(), fmt)
            near = round_to_format((block * scale).clamp(-fmt.largest, fmt.largest), fmt)
            out[i : i + down, j : j + across] = near * scale.reciprocal()
    return out


FURTHER_SHAPES = [(1, 16), (1, 32), (16, 16), (128, 128)]


@pytest.mark.parametrize(
    "shape",
    [(1, 128), (32, 32), *(pytest.param(s, marks=pytest.mark.extended) for s in FURTHER_SHAPES)],
)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_blocks_equal_a_plain_reference_bit_by_bit(rule, fmt, shape):
    whole = values_of_many_magnitudes(32, 128)
    views = {
        "rows": whole,
        "transposed": whole.t(),
        "padded": whole[:20, :70],
        "transposed and padded": whole[:20, :70].t(),
        "strided": whole[:, ::2],
    }
    for name, x in views.items():
        before = x.clone()
        found = BlockQuantizer(fmt, rule, shape)(x)
        assert torch.equal(found, plain_blocks(x, fmt, rule, shape)), name
        assert torch.equal(x, before), name


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_a_nan_stays_in_its_block(fmt):
    x = values_of_many_magnitudes(64, 64)
    x[3, 40] = float("nan")
    for view in (x, x.t()):
        lost = BlockQuantizer(fmt, exponent_scale, (1, 32))(view).isnan()
        assert torch.equal(lost, view.isnan())


def plain_nvfp4(x, stochastic, rotates):
    """Nvfp4 in blocks of a row's 16, in as few words as possible."""
    if rotates:
        x = (x.reshape(x.shape[0], -1, 16) @ hadamard_rotation(CPU)).flatten(1)
    whole = torch.tensor(6.0 * 448.0) / x.abs().max()
    sixth = torch.tensor(6.0).reciprocal()
    blocks = x.reshape(x.shape[0], -1, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = round_to_format((amax * (whole * sixth)).clamp(max=448.0), E4M3) * whole.reciprocal()
    values = (blocks * scale.reciprocal().clamp(max=torch.finfo(torch.float32).max)).clamp(-6, 6)
    if not stochastic:
        return (round_to_format(values, E2M1) * scale).flatten(1)
    spacing = torch.where(values.abs() >= 4, 2.0, torch.where(values.abs() >= 2, 1.0, 0.5))
    places = values.abs() / spacing
    up = torch.rand(x.shape[0], 1, x.shape[1] // 16, 16).squeeze(1) < places - places.floor()
    return (((places.floor() + up) * spacing).copysign(values) * scale).flatten(1)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
def test_nvfp4_equals_a_plain_reference_bit_by_bit(stochastic, rotates):
    x = values_of_many_magnitudes(48, 64)
    torch.manual_seed(0)
    found = Nvfp4Quantizer(rotates=rotates, stochastic=stochastic)(x)
    torch.manual_seed(0)
    assert torch.equal(found, plain_nvfp4(x, stochastic, rotates))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_an_amax_of_zero_or_infinity_scales_by_one(rule):
    amax = torch.tensor([0.0, float("inf"), float("nan")])
    assert rule(amax, E4M3).tolist() == [1, 1, 1]


def test_e8m0_keeps_the_largest_value_where_a_power_of_two_is_enough():
    assert exponent_scale(torch.tensor([448.0, 449.0, 224.0]), E4M3).tolist() == [1, 0.5, 2]


def test_a_power_of_two_scales_without_rounding():
    x = torch.tensor([[1.0, 3.0, 100.0, 448.0]])
    assert torch.equal(
        BlockQuantizer(E4M3, power_of_two_scale)(x), torch.tensor([[1.0, 3.0, 96.0, 448.0]])
    )


def test_infinite_gradients_saturate_and_nan_stays():
    x = torch.tensor([[float("inf"), 1.0, -float("inf"), float("nan")]])
    got = BlockQuantizer(E5M2, amax_scale)(x)[0]
    assert got[:3].tolist() == [57344, 1, -57344]
    assert got[3].isnan()


def test_the_rotation_cancels_in_a_product():
    a, b = values_of_many_magnitudes(8, 64), values_of_many_magnitudes(12, 64, seed=1)
    turn = hadamard_rotation(CPU)
    assert torch.allclose(turn @ turn.t(), torch.eye(16), atol=1e-6)
    turned = [(x.unflatten(1, (-1, 16)) @ turn).flatten(1) for x in (a, b)]
    assert torch.allclose(turned[0] @ turned[1].t(), a @ b.t(), rtol=1e-4, atol=1e-2)


def test_stochastic_rounding_is_right_on_average():
    torch.manual_seed(0)
    x = torch.full((4000, 16), 0.3)
    x[:, 0] = 6  # sets the scale
    got = Nvfp4Quantizer(stochastic=True)(x)
    assert sorted(got[:, 1:].unique().tolist()) == [0, 0.5]
    assert abs(got[:, 1:].mean().item() - 0.3) < 0.003
    assert Nvfp4Quantizer()(x)[:, 1:].unique().tolist() == [0.5]


def test_the_librarys_own_reference_agrees():
    """Bit by bit, for scaling of whole tensors and for NVFP4."""
    pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")
    from transformer_engine.pytorch.custom_recipes import (
        reference_current_scaling,
        reference_nvfp4,
        reference_utils,
    )

    x = values_of_many_magnitudes(64, 96)
    for fmt in (E4M3, E5M2):
        for rule in (amax_scale, power_of_two_scale):
            reference = reference_current_scaling.CurrentScalingQuantizerRef(
                fmt.dtype, pow_2_scales=rule is power_of_two_scale
            )
            values, scale = reference._quantize(x)[:2]
            assert torch.equal(BlockQuantizer(fmt, rule)(x), values.float() * scale)
    for shape in ((1, 16), (16, 16)):
        reference = reference_nvfp4.NVFP4QuantizerRef(
            reference_utils.Fp4Formats.E2M1, quant_tile_shape=shape, with_rht=shape == (1, 16)
        )
        along, scale, across, scale_t, amax, amax_t = reference._quantize(x)
        turned = Nvfp4Quantizer(shape, rotates=shape == (1, 16))(x.t())
        found = (along, scale, amax, Nvfp4Quantizer(shape)(x)), (across, scale_t, amax_t, turned)
        for values, scales, largest, ours in found:
            whole = (torch.full_like(largest, 2688.0) / largest).reciprocal()
            wide = (scales.float() * whole).repeat_interleave(16, 1)
            assert torch.equal(reference_nvfp4.cast_from_fp4x2(values, torch.float32) * wide, ours)
