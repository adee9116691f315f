"""Formats of packed weights: rounding in training gives what packing stores, bit by bit."""

import pytest
import torch
from precision_models import values_of_many_magnitudes
from torch.nn import functional as F

from runner.precision.layers.quantized_linear import (
    FORMAT_NAMES,
    format_of_packed,
    pack_nibbles,
    packed_label,
    unpack_nibbles,
    unpack_state_dict,
    weight_format,
)

every_format = pytest.mark.parametrize("name", FORMAT_NAMES)
WEIGHTS = {
    "normal": torch.randn(24, 64, generator=torch.Generator().manual_seed(0)),
    "many magnitudes": values_of_many_magnitudes(24, 64),
    "tiny": 1e-30 * torch.randn(24, 64, generator=torch.Generator().manual_seed(1)),
    "zero": torch.zeros(24, 64),
}


def loaded_format(name, group_size):
    fmt = weight_format(name, group_size)
    fmt.load_library()
    return fmt


@every_format
@pytest.mark.parametrize("kind", WEIGHTS)
def test_rounded_weights_are_what_packed_ones_stand_for(name, kind):
    fmt, weight = loaded_format(name, 32), WEIGHTS[kind]
    packed = fmt.pack(weight)
    assert torch.equal(fmt.round_weight(weight), fmt.unpack(packed))
    assert format_of_packed(packed).label == fmt.label


# Half the widest gap between two values, relative to the largest magnitude of the group: int4 has
# 15 steps from -7.5 to 7.5 times the scale, and 7.5 itself is clipped to 7; int8 has 255; NVFP4's
# widest gap is from 4 to 6, and its scale is rounded to E4M3, 2**-4 at most.
BOUND = {"int4": 0.5 / 7.5, "int8": 0.5 / 127.5, "nvfp4": 1 / 6 + 2**-4}


@every_format
def test_the_error_is_within_half_a_gap_of_the_groups_largest(name):
    fmt, weight = loaded_format(name, 32), WEIGHTS["normal"]
    group = {"int4": 32, "int8": 64, "nvfp4": 16}[name]
    error = (fmt.round_weight(weight) - weight).abs().unflatten(1, (-1, group))
    largest = weight.abs().unflatten(1, (-1, group)).amax(-1, keepdim=True)
    assert (error <= 1.001 * BOUND[name] * largest).all()
    assert error.mean() > 0


def test_int4_is_what_torchao_quantises_a_linear_layer_to():
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    layer = torch.nn.Linear(64, 24)
    fmt = weight_format("int4", 16)
    packed = fmt.pack(layer.weight.detach())
    quantize_(torch.nn.Sequential(layer), IntxWeightOnlyConfig(torch.int4, PerGroup(16)))
    assert torch.equal(fmt.unpack(packed), layer.weight.dequantize())
    assert (packed["weight"].dtype, packed["weight"].shape) == (torch.uint8, (24, 32))
    rows = torch.randn(5, 64)
    assert torch.equal(fmt.product(rows, packed), F.linear(rows, layer.weight))


def test_int8_products_are_those_of_torchaos_quantised_layer():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, MappingType, quantize_

    layer = torch.nn.Linear(64, 24, bias=False)
    fmt = loaded_format("int8", 0)
    packed = fmt.pack(layer.weight.detach())
    config = Int8DynamicActivationInt8WeightConfig(
        act_mapping_type=MappingType.ASYMMETRIC, set_inductor_config=False
    )
    quantize_(torch.nn.Sequential(layer), config)
    rows = torch.randn(2, 5, 64)
    assert torch.equal(fmt.product(rows, packed), layer(rows))
    # The integers' sums are exact; the rounded values' are float32's.
    rounded = F.linear(fmt.round_input(rows), fmt.unpack(packed))
    assert rounded.allclose(layer(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["normal", "zero"])
def test_nvfp4_is_torchaos_format(kind):
    """Not so for blocks 2**14 below the largest: torchao's scales stop at E4M3's least normal
    value, and TransformerEngine's, which these are, at its least subnormal one."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    fmt, weight = weight_format("nvfp4", 0), WEIGHTS[kind]
    amax = weight.abs().amax().clamp(min=2.0**-100)
    tensor = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(amax))
    found, wanted = fmt.round_weight(weight), tensor.dequantize()
    # Scales are computed in another order of operations, so a value at a tie may round otherwise.
    assert (found != wanted).float().mean() < 0.01


# Gradients


@every_format
def test_gradients_pass_the_rounding_straight_through(name):
    fmt = loaded_format(name, 32)
    for rounding in (fmt.round_weight, fmt.round_input):
        values = torch.randn(24, 64, requires_grad=True)
        upstream = torch.randn(24, 64)
        rounding(values).backward(upstream)
        assert torch.equal(values.grad, upstream)


# State dicts


def test_nibbles_are_unpacked_to_what_was_packed():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(4, 8)
    assert pack_nibbles(codes).shape == (4, 4)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@every_format
def test_a_state_dict_is_unpacked_and_names_its_packing(name):
    fmt, weight = loaded_format(name, 16), WEIGHTS["normal"]
    packed = {f"body.{key}": part for key, part in fmt.pack(weight).items()}
    state = {**packed, "body.bias": torch.ones(24), "norm.weight": torch.ones(3), "step": 3}
    assert packed_label(state) == {"int4": "int4-16"}.get(name, name)
    plain = unpack_state_dict(state)
    assert set(plain) == {"body.weight", "body.bias", "norm.weight", "step"}
    assert torch.equal(plain["body.weight"], fmt.round_weight(weight))
    transposed = unpack_state_dict(state, transposed=["body"])
    assert torch.equal(transposed["body.weight"], plain["body.weight"].t())


def test_a_plain_state_dict_has_no_packing():
    state = {"body.weight": torch.ones(2, 2), "body.weight_scale": torch.ones(2)}
    assert packed_label(state) == ""
    assert unpack_state_dict(state) == state
