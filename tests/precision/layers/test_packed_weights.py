"""Weights in 4 and 8 bits: their packing, the entries of a state dict, and what they refuse.

What holds for every kind of converted layer is in test_layer_contract.py.
"""

import copy
import math
from collections import OrderedDict

import pytest
import torch
from precision_models import (
    assert_same_tensors,
    load_precision,
    relative_error,
    reloaded,
    skip_reasons,
)
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

pytest.importorskip("runner.precision.layers.bnb_linear")

from runner.precision.layers.bnb_linear import (
    pack_4bit,
    pack_int8,
    packed_mode,
    packing_label,
    unpack_4bit,
    unpack_int8,
)
from runner.precision.layers.quantized_linear import unpack_state_dict

FOUR_BITS = ("nf4", "nf4-dq", "fp4", "fp4-dq")
PACKED = (*FOUR_BITS, "int8")
MODES = (*PACKED, "int8-training")
X = torch.linspace(-1, 1, 3 * 80).view(3, 80)


def plain_model(seed=0, width=80, dtype=torch.float32):
    torch.manual_seed(seed)
    parts = {"body": nn.Linear(width, 48), "norm": nn.LayerNorm(48), "head": nn.Linear(48, 5)}
    return nn.Sequential(OrderedDict(parts)).to(dtype)


def convert(mode, model=None):
    model = plain_model() if model is None else model
    return load_precision(f"bnb-{mode}", compute_dtype="float32").convert(model)[0]


def packed_state(mode, seed=1, without=""):
    """Return the state dict of a converted model, without one entry."""
    state = reloaded(convert(mode, plain_model(seed)).state_dict())
    if without:
        del state[without]
    return state


# State dicts


def test_the_entries_of_a_packed_weight():
    entries = {
        "nf4": {
            *"weight weight.absmax weight.quant_map weight.quant_state.bitsandbytes__nf4".split()
        },
        "int8": {"weight", "SCB"},
        "int8-training": {"weight"},
    }
    for mode, keys in entries.items():
        assert set(convert(mode, nn.Linear(80, 8)).state_dict()) == {*keys, "bias"}
    keys = convert("fp4-dq", nn.Linear(80, 8)).state_dict().keys()
    assert {"weight.nested_absmax", "weight.nested_quant_map"} < keys


@pytest.mark.parametrize("mode", FOUR_BITS)
def test_scales_beside_the_weight_change_neither_outputs_nor_the_state_dict(mode):
    model = convert(mode)
    outputs, state = model(X), reloaded(model.state_dict())
    for layer in (model.body, model.head):
        layer.separate_scales(torch.device("cpu"))
        assert type(layer.codes) is nn.Parameter
    assert torch.equal(model(X), outputs)
    assert_same_tensors(reloaded(model.state_dict()), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", ["nf4", "int8"])
def test_plain_weights_of_another_width_are_packed_when_they_are_loaded(mode, dtype):
    model, plain = convert(mode), plain_model(seed=2, dtype=dtype)
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert relative_error(model(X), plain.float()(X)) < 0.2
    assert (model.body.bias.dtype, model.body.codes.requires_grad) == (torch.float32, False)


INCOMPLETE = [
    ("nf4", "weight.absmax", "absmax is"),
    ("nf4", "weight.quant_map", "quant_map is"),
    ("fp4-dq", "weight.nested_absmax", "nested_absmax is"),
    ("fp4-dq", "weight.nested_quant_map", "nested_quant_map is"),
    ("fp4-dq", "weight.quant_state.bitsandbytes__fp4", "scales are"),
]


@pytest.mark.parametrize(("mode", "entry", "missing"), INCOMPLETE)
def test_weights_without_their_scales_are_neither_loaded_nor_unpacked(mode, entry, missing):
    model, state = convert(mode), packed_state(mode, without=f"body.{entry}")
    before = copy.deepcopy(model.body.codes)
    message = rf"body\.weight: it is packed, and its {missing} missing"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state, strict=strict)
    assert torch.equal(model.body.codes, before)
    with pytest.raises(ValueError, match=message):
        unpack_state_dict(state)
    del state["body.weight"]
    unpack_state_dict(state)


@pytest.mark.parametrize(
    ("mode", "entry"), [("int8", "SCB"), ("int8", "weight"), ("nf4", "weight")]
)
def test_a_missing_key_is_named(mode, entry):
    state = packed_state(mode, without=f"body.{entry}")
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "body\.{entry}"'):
        convert(mode).load_state_dict(state)
    if entry == "SCB":
        with pytest.raises(ValueError, match=r"body\.weight: it is int8, and body\.SCB is missing"):
            unpack_state_dict(state)


def wide_state(mode=""):
    """Return the state dict of a wider model, plain or packed."""
    model = plain_model(width=96)
    return (convert(mode, model) if mode else model).state_dict()


MISFITS = [
    ("nf4", lambda: packed_state("nf4-dq"), "body.weight: it is packed as nf4-dq, not as nf4"),
    ("nf4-dq", lambda: packed_state("fp4-dq"), "body.weight: it is packed as fp4-dq, not as nf4-"),
    ("fp4", lambda: packed_state("nf4"), "body.weight: it is packed as nf4, not as fp4"),
    ("nf4", lambda: packed_state("int8"), "body.weight: it is packed, and its scales are missing"),
    ("nf4", wide_state, "body.weight: its shape is [48, 96], not [48, 80]"),
    ("nf4", lambda: wide_state("nf4"), "body.weight: its shape is [48, 96], not [48, 80]"),
    ("int8", lambda: packed_state("nf4"), "body.weight"),
    ("int8", wide_state, "size mismatch for body.weight"),
    ("int8", lambda: wide_state("int8"), "size mismatch for body.weight"),
]


@pytest.mark.parametrize(("mode", "state", "message"), MISFITS)
def test_the_error_of_another_packing_or_shape_names_the_weight(mode, state, message):
    model = convert(mode)
    before = copy.deepcopy(model.body.codes)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state())
    assert message in str(error.value)
    assert torch.equal(model.body.codes, before)


@pytest.mark.parametrize("mode", ["nf4", "int8"])
def test_an_unexpected_key_is_reported(mode):
    state = {**packed_state(mode), "body.extra": X}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "body\.extra"'):
        convert(mode).load_state_dict(state)


@pytest.mark.parametrize("packed", [True, False])
def test_another_shape_with_as_many_elements_is_refused(packed):
    other = nn.Linear(8, 16)
    if packed:
        convert("fp4-dq", other)
    with pytest.raises(RuntimeError, match=r"weight: its shape is \[16, 8\], not \[8, 16\]"):
        convert("fp4-dq", nn.Linear(16, 8)).load_state_dict(other.state_dict())


# unpack_state_dict


@pytest.mark.parametrize("mode", MODES)
def test_unpacked_weights_are_the_numbers_that_packed_ones_stand_for(mode):
    model, target, original = convert(mode), plain_model(seed=3), plain_model()
    state = unpack_state_dict(reloaded(model.state_dict()))
    target.load_state_dict(state, strict=True)
    assert {value.dtype for value in state.values()} == {torch.float32}
    error = relative_error(target.body.weight, original.body.weight)
    assert error < 0.13
    assert (error > 0) == (mode != "int8-training")
    # int8-training quantises in its forward.
    tolerance = 0.02 if mode == "int8-training" else 1e-5
    torch.testing.assert_close(target(X), model(X), rtol=1e-5, atol=tolerance)
    assert torch.equal(target.norm.weight, model.norm.weight)
    assert torch.equal(target.body.bias, model.body.bias)


@pytest.mark.parametrize("mode", ["nf4", "int8"])
def test_weights_of_a_layer_that_is_the_model_itself_are_unpacked(mode):
    model, target = convert(mode, nn.Linear(80, 8)), nn.Linear(80, 8)
    target.load_state_dict(unpack_state_dict(reloaded(model.state_dict())), strict=True)
    torch.testing.assert_close(target(X), model(X), rtol=1e-5, atol=1e-5)


def test_a_plain_state_dict_is_returned_unchanged():
    state = plain_model().state_dict()
    unpacked = unpack_state_dict(state)
    assert unpacked.keys() == state.keys()
    assert all(unpacked[key] is value for key, value in state.items())


def test_unpacking_does_not_change_the_state_dict():
    state = packed_state("nf4-dq")
    before = {key: value.clone() for key, value in state.items()}
    unpack_state_dict(state)
    assert_same_tensors(before, state)


def test_names_that_look_like_entries_of_packed_weights_stay():
    model = nn.ModuleDict({"weight": nn.Linear(8, 8), "c": weight_norm(nn.Linear(8, 8))})
    unpacked = unpack_state_dict(convert("nf4", model).state_dict())
    assert {"c.parametrizations.weight.original0", "weight.weight", "weight.bias"} <= set(unpacked)
    assert unpacked["weight.weight"].shape == (8, 8)


# Packing


@pytest.mark.parametrize("shape", [(6, 16), (1, 48), (5, 80), (3, 784), (4, 7), (2, 128)])
@pytest.mark.parametrize(("quant_type", "nested"), [("nf4", False), ("nf4", True), ("fp4", False)])
def test_a_weight_is_unpacked_to_its_shape_within_its_blocks_steps(quant_type, nested, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed = pack_4bit(weight, quant_type, nested)
    assert packed.numel() == (weight.numel() + 1) // 2
    for dtype in (torch.float32, torch.bfloat16):
        unpacked = unpack_4bit(packed, packed.quant_state, dtype)
        assert (unpacked.shape, unpacked.dtype) == (weight.shape, dtype)
        # The widest step between two values of nf4 is 0.30 of a block's largest magnitude, of
        # fp4 0.33; rounding moves by half of it, and a scale in 8 bits adds some hundredths.
        blocks = weight.flatten().split(64)
        largest = torch.cat([block.abs().max().expand_as(block) for block in blocks])
        error = (unpacked.float() - weight).abs().flatten()
        assert (error <= (0.17 + 0.05 * nested) * largest + 2**-8 * largest).all()
    assert packed.quant_state.shape == weight.shape


def test_packing_neither_keeps_nor_changes_the_weight():
    weight = nn.Parameter(torch.randn(8, 16).T)  # not contiguous
    before = weight.detach().clone()
    packed = pack_4bit(weight, "nf4", False)
    codes, largest = pack_int8(weight)
    assert torch.equal(weight, before)
    assert not packed.requires_grad
    unpacked = unpack_4bit(packed, packed.quant_state, torch.float32)
    assert relative_error(unpacked, before) < 0.15
    assert relative_error(unpack_int8(codes, largest), before) < 0.15


def test_int8_rounds_each_row_by_its_largest_magnitude():
    weight = torch.tensor([[127.0, -1.0, 64.0], [0.5, 0.25, -0.5], [0.0, 0.0, 0.0]])
    codes, largest = pack_int8(weight)
    assert torch.equal(largest, torch.tensor([127.0, 0.5, 0.0]))
    assert codes.dtype is torch.int8
    assert codes[0].tolist() == [127, -1, 64]
    unpacked = unpack_int8(codes, largest)
    assert torch.equal(unpacked[0], weight[0])
    assert (unpacked[1] - weight[1]).abs().max() <= 0.5 / 127 / 2 + 1e-7
    assert torch.equal(unpacked[2], weight[2])


@pytest.mark.parametrize("mode", ["nf4", "fp4-dq"])
def test_packed_mode_reads_the_packing_from_a_state_dict(mode):
    layer = convert(mode, nn.Linear(80, 48))
    state = layer.state_dict(prefix="layer.")
    prefix = "layer.weight."
    parts = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
    codes = state["layer.weight"]
    quant_type, _, nested = mode.partition("-")
    assert packed_mode(codes, dict(parts)) == (quant_type, bool(nested))
    with pytest.raises(ValueError, match=r"its absmax has 1 values, not \d+"):
        packed_mode(codes, {**parts, "absmax": parts["absmax"][:1]})
    with pytest.raises(ValueError, match="it has 3 bytes, not"):
        packed_mode(codes[:3], dict(parts))
    assert (packing_label("nf4", False), packing_label("fp4", True)) == ("nf4", "fp4-dq")


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8", "bnb-int8-training", "int4", "nvfp4"])
def test_a_weight_that_is_not_finite_is_skipped(name):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight.data[0, 0] = math.nan
    _, report = load_precision(name).convert(model)
    assert skip_reasons(report) == {"0": "its weight is not finite", "1": ""}


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-nf4-dq"])
def test_weights_are_packed_on_the_meta_device_as_in_memory(name):
    facts = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = nn.Linear(96, 70)
        layer, _ = load_precision(name).convert(model, torch.device(device))
        scales = layer.scales
        state2 = scales.state2 and (scales.state2.absmax.shape, scales.state2.blocksize)
        tensors = (layer.weight, scales.absmax, scales.code)
        facts.append([*((t.shape, t.dtype) for t in tensors), state2, scales.blocksize])
        assert layer.weight.device.type == device
    assert facts[0] == facts[1]
