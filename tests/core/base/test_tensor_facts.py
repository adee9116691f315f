import pytest
import torch
from torch import nn

from runner.core.base.tensor_facts import count_elements, stored_bytes, tensor_bytes
from runner.precision import registry

BNB = ("bnb-nf4", "bnb-nf4-dq", "bnb-fp4", "bnb-fp4-dq", "bnb-int8", "bnb-int8-training")


def test_bytes_are_those_of_the_dtype():
    assert tensor_bytes() == 0
    assert tensor_bytes(torch.ones(10)) == 40
    assert tensor_bytes(torch.ones(10, dtype=torch.bfloat16), torch.ones(3).bool()) == 23


def test_a_storage_counts_once_and_whole():
    whole = torch.ones(8)
    assert tensor_bytes(whole, whole, whole[:4], whole.view(2, 4)) == 32
    assert tensor_bytes(whole[:1]) == 32
    assert tensor_bytes(whole, whole.clone()) == 64


def test_a_model_counts_parameters_and_buffers_and_what_is_shared_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model.register_buffer("table", torch.ones(5, dtype=torch.float64))
    assert stored_bytes(model) == 2 * 64 + 40
    model[1].weight = model[0].weight
    model.append(model[0])
    assert stored_bytes(model) == 64 + 40


def test_the_meta_device_counts_what_it_would_hold():
    assert tensor_bytes(torch.ones(10, device="meta")) == 40


def test_sparse_tensors_count_their_numbers():
    assert tensor_bytes(torch.eye(4).to_sparse()) == 64


def test_a_weight_stands_for_its_own_elements():
    assert count_elements(torch.ones(3, 4)) == 12


class Codes:
    """Tensors of a 4-bit weight of bitsandbytes other than its codes."""

    def __init__(self, shape=(), **parts):
        self.shape = shape
        vars(self).update(parts)


def test_a_packed_weights_scales_count_and_those_of_the_scales():
    packed = torch.zeros(8, dtype=torch.uint8)
    inner = Codes(absmax=torch.ones(1), code=torch.ones(256), shape=None)
    packed.quant_state = Codes(
        torch.Size((4, 4)),
        absmax=torch.ones(2, dtype=torch.uint8),
        code=torch.ones(16),
        offset=torch.ones(()),
        state2=inner,
    )
    assert tensor_bytes(packed) == 8 + 2 + 64 + 4 + 4 + 1024
    assert count_elements(packed) == 16
    packed.quant_state.state2 = None
    assert tensor_bytes(packed) == 8 + 2 + 64 + 4


def test_the_librarys_own_int8_weight_counts_its_copy_and_scales():
    weight = torch.zeros(8, dtype=torch.int8)
    weight.CB, weight.SCB = weight, torch.ones(2)
    assert tensor_bytes(weight) == 8 + 8
    weight.CB = torch.zeros(8, dtype=torch.int8)
    assert tensor_bytes(weight) == 16 + 8


def test_a_wrapper_counts_what_is_inside():
    torchao = pytest.importorskip("torchao.optim.subclass_8bit")
    state = torchao.OptimState8bit.zeros((4, 256))
    assert state.dtype is torch.float32
    parts = state.codes, state.scale, state.qmap
    assert tensor_bytes(state) == sum(p.numel() * p.element_size() for p in parts) < 4 * 1024 + 16


def converted(name, width=512):
    pytest.importorskip("runner.precision.layers.bnb_linear")
    model = nn.Linear(width, width, bias=False)
    before = stored_bytes(model)
    registry.load_precision(name).convert(model)
    return model, stored_bytes(model) / before


# Per weight 4 bits of 32 and a float32 scale per 64 weights: 0.125 + 0.0156; nested, the scale has
# 8 bits and float32 scales per 256 of its own. int8: 8 bits of 32 and a float32 scale per row.
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("bnb-nf4", 0.125 + 1 / 64, 0.15),
        ("bnb-fp4", 0.125 + 1 / 64, 0.15),
        ("bnb-nf4-dq", 0.125 + 1 / 256, 0.14),
        ("bnb-fp4-dq", 0.125 + 1 / 256, 0.14),
        ("bnb-int8", 0.25 + 1 / 512, 0.27),
        ("bnb-int8-training", 1, 1),
    ],
)
def test_what_a_converted_layer_holds(name, least, most):
    _, ratio = converted(name)
    assert least <= ratio <= most


@pytest.mark.parametrize("name", BNB)
def test_a_forward_and_a_backward_leave_no_more_behind(name):
    model, before = converted(name, 64)
    x = torch.ones(2, 64, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
        model.eval()(x)
    held = stored_bytes(model) / (4 * 64 * 64)
    assert held == before
    (weight,) = model.parameters()
    assert count_elements(weight) == 64 * 64


def test_an_odd_number_of_elements_is_counted_rightly():
    model, _ = converted("bnb-nf4", 5)
    assert (model.codes.numel(), count_elements(model.codes)) == (13, 25)
