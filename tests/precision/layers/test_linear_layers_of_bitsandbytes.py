"""State dicts, copies and moves of the layers on bitsandbytes' kernels."""

import copy
import io
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

pytest.importorskip("runner.precision.layers.bnb_library")

from runner.precision import registry
from runner.precision.layers.linear_4bit import (
    Linear4bit,
    pack_4bit,
    packed_mode,
    packing_label,
    unpack_4bit,
    unpack_state_dict,
)
from runner.precision.layers.linear_8bit import (
    Linear8bit,
    Linear8bitTrained,
    pack_int8,
    unpack_int8,
)

FOUR = ("nf4", "nf4-dq", "fp4", "fp4-dq")
PACKED = (*FOUR, "int8")
MODES = (*PACKED, "int8-training")
X = torch.linspace(-1, 1, 3 * 80).view(3, 80)


def plain(seed=0, inside=80):
    """80 is a multiple of 16 and not of 64, where the library's kernel on CPUs is wrong."""
    torch.manual_seed(seed)
    parts = {"body": nn.Linear(inside, 48), "norm": nn.LayerNorm(48), "head": nn.Linear(48, 5)}
    return nn.Sequential(OrderedDict(parts))


def convert(model, mode, compute="float32", **changes):
    registry.load_precision(f"bnb-{mode}", compute_dtype=compute, **changes).convert(model)
    return model


def made(mode, seed=0, **changes):
    return convert(plain(seed), mode, **changes)


def saved(model):
    """Return a state dict that was saved to a file and loaded."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(first, second):
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert value.dtype is second[key].dtype, key
        assert torch.equal(value, second[key]), key


def outputs(model, compute=torch.float32):
    """In training and in evaluation."""
    with torch.no_grad():
        return [model.train(train)(X.to(compute)) for train in (True, False)]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(outputs(first), outputs(second), strict=True))


KEYS = {
    "nf4": ["weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"],
    "int8": ["weight", "SCB"],
    "int8-training": ["weight"],
}


def test_what_a_state_dict_holds():
    for mode, keys in KEYS.items():
        assert set(convert(nn.Linear(80, 8), mode).state_dict()) == {*keys, "bias"}
    keys = convert(nn.Linear(80, 8), "fp4-dq").state_dict().keys()
    assert {"weight.nested_absmax", "weight.nested_quant_map"} < keys


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_leaves_the_state_dict_as_it_was(mode):
    model = made(mode)
    before = copy.deepcopy(model.state_dict())
    outputs(model)
    with torch.no_grad():
        model.eval()(X)
    same(before, model.state_dict())
    model(X.clone().requires_grad_()).sum().backward()
    same(before, model.state_dict())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_model_comes_back_bit_for_bit(mode, compute):
    model, other = made(mode, compute=compute), made(mode, seed=1, compute=compute)
    assert not equal(model, other)
    norm = other.norm.weight
    loaded = other.load_state_dict(saved(model), strict=True)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    assert equal(model, other)
    same(model.state_dict(), other.state_dict())
    assert other.norm.weight is norm
    assert other.body.weight.requires_grad == (mode == "int8-training")
    other(X.clone().requires_grad_()).sum().backward()
    assert other.body.bias.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_root_layer_comes_back_bit_for_bit(mode):
    torch.manual_seed(0)
    model, other = (convert(nn.Linear(80, 8), mode) for _ in range(2))
    other.load_state_dict(saved(model))
    assert equal(model, other)


@pytest.mark.parametrize("mode", MODES)
def test_loading_does_not_change_what_is_loaded(mode):
    state = saved(made(mode))
    before = {key: value.clone() for key, value in state.items()}
    other = made(mode, seed=1)
    other.load_state_dict(state)
    same(before, state)
    other.body.bias.data.zero_()
    if mode == "int8-training":
        other.body.weight.data.zero_()
    same(before, state)


@pytest.mark.parametrize("mode", MODES)
def test_plain_weights_are_packed_again(mode):
    fresh = plain(seed=2)
    model = made(mode)
    model.load_state_dict(fresh.state_dict())
    assert equal(model, convert(plain(seed=2), mode))
    same(model.state_dict(), convert(plain(seed=2), mode).state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", PACKED)
def test_plain_weights_of_another_width_are_packed_again(mode, dtype):
    model = made(mode)
    state = plain(seed=2).to(dtype).state_dict()
    model.load_state_dict(state)
    want = plain(seed=2).to(dtype).float()
    assert (outputs(model)[0] - want(X)).norm() < 0.2 * want(X).norm()
    assert (model.body.bias.dtype, model.body.weight.requires_grad) == (torch.float32, False)


@pytest.mark.parametrize("mode", PACKED)
def test_packed_weights_do_not_enter_a_plain_model(mode):
    target = plain()
    with pytest.raises(RuntimeError, match=r"body\.weight\.|body\.SCB"):
        target.load_state_dict(saved(made(mode)))


@pytest.mark.parametrize("mode", PACKED)
def test_packed_weights_do_not_enter_a_model_that_trains_in_int8(mode):
    with pytest.raises(RuntimeError, match=r"body\.weight\.|body\.SCB"):
        made("int8-training").load_state_dict(saved(made(mode)))


def weight_of(model):
    """Return the entries of the body's packed weight; torch loads the bias in any case."""
    state = copy.deepcopy(model.body.state_dict())
    del state["bias"]
    return state


def refused(model, state, strict=True):
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state, strict=strict)
    return str(error.value)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("mode", "part"),
    [
        ("nf4", "absmax"),
        ("nf4", "quant_map"),
        ("nf4", "quant_state.bitsandbytes__nf4"),
        ("fp4-dq", "nested_quant_map"),
        ("fp4-dq", "absmax"),
        ("fp4-dq", "quant_state.bitsandbytes__fp4"),
    ],
)
def test_the_error_of_a_missing_part_of_a_packed_weight_names_its_key(mode, part, strict):
    model, state = made(mode), saved(made(mode, seed=1))
    del state[f"body.weight.{part}"]
    before = weight_of(model)
    missing = "scales are" if part.startswith("quant_state") else f"{part} is"
    assert f"body.weight: it is packed, and its {missing} missing" in refused(model, state, strict)
    same(before, weight_of(model))


def test_the_error_of_missing_scales_names_the_key():
    state = {k: v for k, v in saved(made("nf4")).items() if ".weight." not in k}
    message = refused(made("nf4"), state)
    assert "body.weight: it is packed, and its scales are missing" in message
    assert "head.weight: it is packed, and its scales are missing" in message


def test_the_error_of_missing_int8_scales_names_the_key():
    state = saved(made("int8"))
    del state["body.SCB"]
    assert "body.SCB" in refused(made("int8"), state)


@pytest.mark.parametrize("mode", PACKED)
def test_the_error_of_a_missing_weight_names_its_key(mode):
    state = saved(made(mode))
    del state["body.weight"]
    assert 'Missing key(s) in state_dict: "body.weight"' in refused(made(mode), state)


@pytest.mark.parametrize("mode", PACKED)
def test_an_unexpected_key_is_reported(mode):
    state = {**saved(made(mode)), "body.extra": torch.ones(1)}
    assert 'Unexpected key(s) in state_dict: "body.extra"' in refused(made(mode), state)


@pytest.mark.parametrize(
    ("held", "given"), [(a, b) for a in FOUR for b in FOUR if a != b] + [("nf4", "int8")]
)
def test_the_error_of_another_packing_names_the_key(held, given):
    model = made(held)
    before = weight_of(model)
    message = refused(model, saved(made(given)))
    if given == "int8":
        assert "body.weight: it is packed, and its scales are missing" in message
    else:
        assert f"body.weight: it is packed as {given}, not as {held}" in message
    same(before, weight_of(model))


def test_four_bits_do_not_enter_eight():
    assert "body.weight" in refused(made("int8"), saved(made("nf4")))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mode", PACKED)
def test_the_error_of_another_shape_names_the_key(mode, packed):
    given = plain(inside=96)
    if packed:
        convert(given, mode)
    message = refused(made(mode), given.state_dict())
    if mode == "int8":
        assert "size mismatch for body.weight" in message
    else:
        assert "body.weight: its shape is [48, 96], not [48, 80]" in message


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mode", FOUR)
def test_another_shape_with_as_many_elements_is_refused(mode, packed):
    first, second = nn.Linear(16, 8), nn.Linear(8, 16)
    if packed:
        convert(second, mode)
    message = refused(convert(first, mode), second.state_dict())
    assert "weight: its shape is [16, 8], not [8, 16]" in message


# unpack_state_dict


@pytest.mark.parametrize("mode", MODES)
def test_plain_weights_are_the_numbers_that_packed_ones_stand_for(mode):
    model = made(mode)
    state = unpack_state_dict(saved(model))
    target = plain(seed=3)
    target.load_state_dict(state, strict=True)
    assert {value.dtype for value in state.values()} == {torch.float32}
    want = plain().body.weight
    difference = (target.body.weight - want).norm() / want.norm()
    assert difference < 0.13
    assert (difference > 0) == (mode != "int8-training")
    torch.testing.assert_close(target.train()(X), outputs(model)[0], rtol=0.0, atol=0.02)
    if mode != "int8-training":
        torch.testing.assert_close(target(X), outputs(model)[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(target.norm.weight, model.norm.weight)
    assert torch.equal(target.body.bias, model.body.bias)


@pytest.mark.parametrize("mode", MODES)
def test_plain_weights_of_a_root_layer(mode):
    model = convert(nn.Linear(80, 8), mode)
    target = nn.Linear(80, 8)
    target.load_state_dict(unpack_state_dict(saved(model)), strict=True)
    torch.testing.assert_close(target(X), outputs(model)[0], rtol=0.0, atol=0.02)


def test_a_plain_state_dict_comes_back_as_it_is():
    state = plain().state_dict()
    same(dict(state), unpack_state_dict(state))
    assert all(unpack_state_dict(state)[key] is value for key, value in state.items())


def test_plain_weights_change_nothing_of_what_they_are_given():
    state = saved(made("nf4-dq"))
    before = {key: value.clone() for key, value in state.items()}
    unpack_state_dict(state)
    same(before, state)


@pytest.mark.parametrize(
    ("mode", "part", "message"),
    [
        ("nf4", "weight.absmax", "body.weight: it is packed, and its absmax is missing"),
        (
            "nf4-dq",
            "weight.nested_absmax",
            "body.weight: it is packed, and its nested_absmax is missing",
        ),
        (
            "fp4",
            "weight.quant_state.bitsandbytes__fp4",
            "body.weight: it is packed, and its scales are missing",
        ),
        ("int8", "SCB", r"body.weight: it is int8, and body.SCB is missing"),
    ],
)
def test_plain_weights_without_scales_are_refused(mode, part, message):
    state = saved(made(mode))
    del state[f"body.{part}"]
    with pytest.raises(ValueError) as error:
        unpack_state_dict(state)
    assert str(error.value) == message
    del state["body.weight"]
    unpack_state_dict(state)


# Copies and moves


@pytest.mark.parametrize("mode", MODES)
def test_a_deep_copy_computes_the_same_and_is_independent(mode):
    model = made(mode)
    twin = copy.deepcopy(model)
    before = outputs(model)
    assert equal(twin, model)
    same(dict(model.state_dict()), dict(twin.state_dict()))
    twin.load_state_dict(made(mode, seed=1).state_dict())
    assert not equal(twin, model)
    twin.body.weight.data.zero_()
    for old, new in zip(before, outputs(model), strict=True):
        assert torch.equal(old, new)
    assert twin.body.weight.data_ptr() != model.body.weight.data_ptr()


@pytest.mark.parametrize("mode", MODES)
def test_moves_that_change_nothing_change_nothing(mode):
    model = made(mode)
    before, want = copy.deepcopy(model.state_dict()), outputs(model)
    for move in (
        lambda: model.to("cpu"),
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model.to(torch.device("cpu"), non_blocking=True),
        lambda: model.float(),
        lambda: model.requires_grad_(False),
        model.cpu,
    ):
        assert move() is model
        same(before, model.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(want, outputs(model), strict=True))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("nf4", Linear4bit), ("int8", Linear8bit), ("int8-training", Linear8bitTrained)],
)
def test_a_layer_stays_a_linear_layer_and_the_same_object(mode, kind):
    model = plain()
    body, bias, keys = model.body, model.body.bias, set(vars(model.body))
    body.note, also = "mine", [body]
    convert(model.eval(), mode)
    assert type(body) is kind
    assert isinstance(body, nn.Linear)
    assert model.body is also[0] is body
    assert (body.bias is bias, body.note, body.training) == (True, "mine", False)
    assert (body.in_features, body.out_features) == (80, 48)
    assert keys <= set(vars(body))
    assert "in_features=80, out_features=48, bias=True" in repr(body)


# torch 2.11 warns of itself while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("mode", PACKED)
def test_a_compiled_model_computes_the_same_in_one_graph(mode):
    model = made(mode)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    first, second = compiled(x), model(y)
    assert torch.equal(first, second)
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(x.grad, y.grad)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpointed_forward_has_the_same_gradients(mode):
    from torch.utils.checkpoint import checkpoint

    model = made(mode)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    bias = model.body.bias.grad.clone()
    model.zero_grad()
    model(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(bias, model.body.bias.grad)


# Packing


@pytest.mark.parametrize("shape", [(6, 16), (1, 48), (5, 80), (3, 784), (4, 7), (2, 128)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_weight_is_unpacked_to_its_shape_within_its_blocks_steps(kind, nested, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed = pack_4bit(weight, kind, nested)
    assert packed.numel() == (weight.numel() + 1) // 2
    shape_before = packed.quant_state.shape
    for dtype in (torch.float32, torch.bfloat16):
        made = unpack_4bit(packed, packed.quant_state, dtype)
        assert (made.shape, made.dtype) == (weight.shape, dtype)
        # The widest step between two values of nf4 is 0.30 of a block's largest magnitude, of
        # fp4 0.33; rounding moves by half of it, and a scale in 8 bits adds some hundredths.
        largest = torch.cat([b.abs().max().expand_as(b) for b in weight.flatten().split(64)])
        moved = (made.float() - weight).abs().flatten()
        assert (moved <= (0.17 + 0.05 * nested) * largest + 2**-8 * largest).all()
    assert packed.quant_state.shape == shape_before == weight.shape


def test_packing_neither_keeps_nor_changes_the_weight():
    wide = nn.Parameter(torch.randn(8, 16).T)  # not contiguous
    before = wide.detach().clone()
    packed = pack_4bit(wide, "nf4", False)
    codes, largest = pack_int8(wide)
    assert torch.equal(wide, before)
    assert not packed.requires_grad
    for made in (
        unpack_4bit(packed, packed.quant_state, torch.float32),
        unpack_int8(codes, largest, torch.float32),
    ):
        assert (made - before).norm() < 0.15 * before.norm()


def test_int8_rounds_each_row_by_its_largest_magnitude():
    weight = torch.tensor([[127.0, -1.0, 64.0], [0.5, 0.25, -0.5], [0.0, 0.0, 0.0]])
    codes, largest = pack_int8(weight)
    assert torch.equal(largest, torch.tensor([127.0, 0.5, 0.0]))
    assert codes.dtype is torch.int8
    assert codes[0].tolist() == [127, -1, 64]
    made = unpack_int8(codes, largest, torch.float32)
    assert torch.equal(made[0], weight[0])
    assert (made[1] - weight[1]).abs().max() <= 0.5 / 127 / 2 + 1e-7
    assert torch.equal(made[2], weight[2])
    assert unpack_int8(codes, largest, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("mode", ["nf4", "fp4-dq"])
def test_packed_mode_reads_the_packing_from_a_state_dict(mode):
    state = saved(made(mode))
    parts = {
        k.removeprefix("body.weight."): v
        for k, v in state.items()
        if ".weight." in k and k.startswith("body.")
    }
    kind, _, nested = mode.partition("-")
    assert packed_mode(state["body.weight"], dict(parts)) == (kind, bool(nested))
    with pytest.raises(ValueError, match=r"its absmax has 1 values, not \d+"):
        packed_mode(state["body.weight"], {**parts, "absmax": parts["absmax"][:1]})
    with pytest.raises(ValueError, match="it has 3 bytes, not"):
        packed_mode(state["body.weight"][:3], dict(parts))
    assert (packing_label("nf4", False), packing_label("fp4", True)) == ("nf4", "fp4-dq")


def test_names_that_look_like_packed_parts_stay():
    model = nn.ModuleDict({"weight": nn.Linear(8, 8), "c": weight_norm(nn.Linear(8, 8))})
    convert(model, "nf4")
    plain = unpack_state_dict(model.state_dict())
    assert {"c.parametrizations.weight.original0", "weight.weight", "weight.bias"} <= set(plain)
    assert plain["weight.weight"].shape == (8, 8)


@pytest.mark.parametrize("mode", PACKED)
def test_a_loaded_weight_is_no_view_of_what_it_came_from(mode):
    model, state = made(mode), saved(made(mode, seed=1))
    model.load_state_dict(state)
    before = weight_of(model)
    for tensor in state.values():
        tensor.zero_()
    same(before, weight_of(model))


@pytest.mark.parametrize("mode", MODES)
def test_a_fast_path_does_not_bypass_the_layers(mode):
    """nn.TransformerEncoderLayer reads its parts' weights in evaluation."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    inputs = torch.randn(2, 5, 16)
    exact = layer(inputs)
    convert(layer, mode)
    with torch.no_grad():
        error = (layer(inputs) - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.2


def test_a_users_own_class_keeps_its_methods():
    class Head(nn.Linear):
        def logits(self, x):
            return 2 * self(x)

    for mode in MODES:
        head = Head(8, 8)
        convert(head, mode)
        assert isinstance(head, Head)
        assert head.logits(torch.ones(2, 8)).shape == (2, 8)


def test_a_weight_that_is_not_finite_is_skipped():
    for mode in MODES:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].weight.data[0, 0] = math.nan
        _, report = registry.load_precision(f"bnb-{mode}").convert(model)
        assert [row.why for row in report.modules] == ["its weight is not finite", ""]


def test_meta_weights_are_not_taken_for_packed_ones():
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    with pytest.raises(NotImplementedError):
        registry.load_precision("bnb-nf4").convert(model, torch.device("meta"))
