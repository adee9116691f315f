"""A trace of modules: what they take, compute in and give, in the forward and in the backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.diagnostics.module_trace import TRACED_KINDS, ModuleTrace


def traced(model, names, step):
    with ModuleTrace({name: model.get_submodule(name) for name in names}) as trace:
        step()
    return {module.name: module for module in trace.traced}


def test_kernels_of_the_backward_belong_to_the_module_that_made_their_nodes():
    """The norm's backward is in float32, that of the layer beside it in bfloat16."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4), nn.GELU())

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.ones(2, 8))
        output.float().sum().backward()

    found = traced(model, ["0", "1", "2"], step)
    assert list(found["0"].backward.kernels) == [("float32", "native_layer_norm_backward")]
    assert list(found["1"].forward.kernels) == [("bfloat16", "addmm")]
    assert list(found["1"].backward.kernels) == [("bfloat16", "mm")]
    assert list(found["1"].backward.gives) == ["float32 [2, 8]"]
    assert found["1"].weight_gradients() == ["float32"]
    assert not found["2"].backward.kernels


def test_a_forward_that_the_backward_repeats_is_traced_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    inputs = torch.ones(2, 8, requires_grad=True)
    found = traced(
        model, ["1"], lambda: checkpoint(model, inputs, use_reentrant=False).sum().backward()
    )
    assert len(found["1"].node_ranges) == 1
    assert [len(found["1"].samples[kind]) for kind in TRACED_KINDS] == [2, 1, 1, 1]


def test_what_float16_loses_of_each_kind():
    """2**16 overflows in float16, and 2**-26 becomes zero."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[0].weight, 2.0**16)
    inputs = torch.full((4, 1), 2.0**-26)
    (module,) = traced(model, ["0"], lambda: model(inputs).sum().backward()).values()
    stats = module.measure()
    assert stats["weights"].formats["float16"].overflow == 1
    assert stats["inputs"].formats["float16"].underflow == 1
    assert stats["outputs"].largest == 2.0**-10


def test_a_module_that_is_not_called_has_its_weights_only():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    found = traced(model, ["idle"], lambda: model["used"](torch.ones(1, 2)).sum().backward())
    assert not found["idle"].was_called
    assert list(found["idle"].measure()) == ["weights"]
