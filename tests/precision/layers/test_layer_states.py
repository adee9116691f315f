"""State dicts, copies and moves of every kind of converted linear layer."""

import copy

import pytest
import torch
from layer_kinds import (
    assert_same_outputs,
    convert,
    every_kind,
    outputs,
    packed_kinds,
    plain_model,
    train_step,
    unpacked_kinds,
)
from precision_models import CPU, assert_same_tensors, reloaded

pytest.importorskip("runner.precision.layers.bnb_linear")
pytestmark = pytest.mark.usefixtures("imitated_library")


@unpacked_kinds
def test_a_state_dict_is_that_of_a_plain_model(kind):
    precision, model = convert(kind)
    plain = plain_model(seed=1)
    assert precision.layout == ""
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)


@packed_kinds
def test_packed_weights_do_not_enter_a_plain_model_nor_one_that_trains(kind):
    precision, model = convert(kind)
    assert precision.layout.removesuffix("-16") == precision.name  # int4's group
    for target in (plain_model(), convert("int8 that trains")[1]):
        with pytest.raises(RuntimeError, match=r"body\.weight\.|body\.SCB|body\.weight_scale"):
            target.load_state_dict(reloaded(model.state_dict()))


@every_kind
def test_a_saved_model_is_restored_bit_by_bit(kind):
    precision, model = convert(kind)
    _, other = convert(kind, plain_model(seed=1))
    assert not torch.equal(outputs(precision, model)[0], outputs(precision, other)[0])
    norm, flags = other.norm.weight, [p.requires_grad for p in other.parameters()]
    other.load_state_dict(reloaded(model.state_dict()), strict=True)
    assert_same_outputs(outputs(precision, model), outputs(precision, other))
    assert_same_tensors(model.state_dict(), other.state_dict())
    assert other.norm.weight is norm
    assert [p.requires_grad for p in other.parameters()] == flags
    train_step(precision, other)
    assert other.body.bias.grad is not None


@every_kind
def test_a_loaded_model_shares_no_memory_with_what_was_loaded(kind):
    state = reloaded(convert(kind)[1].state_dict())
    before = copy.deepcopy(state)
    _, model = convert(kind, plain_model(seed=1))
    model.load_state_dict(state)
    assert_same_tensors(before, state)
    for tensor in state.values():
        tensor.zero_()
    assert_same_tensors(before, model.state_dict())


@every_kind
def test_plain_weights_are_loaded_as_a_conversion_packs_them(kind):
    precision, model = convert(kind)
    model.load_state_dict(plain_model(seed=2).state_dict())
    _, wanted = convert(kind, plain_model(seed=2))
    assert_same_outputs(outputs(precision, model), outputs(precision, wanted))
    assert_same_tensors(model.state_dict(), wanted.state_dict())


@every_kind
def test_a_forward_and_a_backward_do_not_change_the_state_dict(kind):
    precision, model = convert(kind)
    before = copy.deepcopy(model.state_dict())
    outputs(precision, model)
    train_step(precision, model)
    assert_same_tensors(before, model.state_dict())


@every_kind
def test_a_deep_copy_computes_the_same_and_is_independent(kind):
    precision, model = convert(kind)
    before = outputs(precision, model)
    twin = copy.deepcopy(model)
    assert_same_outputs(before, outputs(precision, twin))
    assert_same_tensors(model.state_dict(), twin.state_dict())
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert_same_outputs(before, outputs(precision, model))


MOVES = {
    "a device": lambda model, precision: model.to("cpu"),
    "the CPU": lambda model, precision: model.cpu(),
    "a memory format": lambda model, precision: model.to(memory_format=torch.channels_last),
    "a device, later": lambda model, precision: model.to(CPU, non_blocking=True),
    "its own dtype": lambda model, precision: model.to(precision.storage),
    "frozen weights": lambda model, precision: model.requires_grad_(False),
}


@every_kind
def test_a_move_that_changes_nothing_changes_nothing(kind):
    precision, model = convert(kind)
    state, wanted = copy.deepcopy(model.state_dict()), outputs(precision, model)
    for name, move in MOVES.items():
        assert move(model, precision) is model, name
        assert_same_tensors(state, model.state_dict())
        assert_same_outputs(wanted, outputs(precision, model))
