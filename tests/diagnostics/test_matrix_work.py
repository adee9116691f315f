"""The share of each format in a forward's matrix work, and what is said of what was not asked."""

import pytest
import torch
from one_off_nets import net
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5ForConditionalGeneration

from runner.config.messages import CPU_CASTS
from runner.diagnostics.dtype_trace import DtypeProbe, computation
from runner.precision import precision


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, groups=2)
        self.back = nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2)
        self.line = nn.Linear(9, 5)

    def forward(self, x):
        hidden = self.line(self.back(self.conv(x)))
        q = hidden.flatten(0, 1).unsqueeze(1)
        return torch.baddbmm(q[:, 0], q[:, 0], torch.ones(q.shape[0], 5, 5))


class Experts(nn.Module):
    """Two experts in one kernel, under autocast or outside it, beside a layer under it."""

    def __init__(self, autocasts):
        super().__init__()
        self.autocasts = autocasts
        self.line = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(2, 16, 48))

    def forward(self, x):
        ends = torch.tensor([2, len(x)], dtype=torch.int32)
        hidden = self.line(x).float()
        with torch.autocast("cpu", enabled=self.autocasts):
            return torch._grouped_mm(hidden, self.experts, offs=ends)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 8)

    def forward(self, x):
        return F.layer_norm(self.line(x), (8,)) + torch.mv(self.wide.weight, torch.ones(8))


class Texts(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, decoder_input_ids=ids).logits


def watched(model, name, x, **keys):
    policy = precision(name, **keys)
    model = policy.convert(model)
    with policy.session(), DtypeProbe(model) as probe, policy.forward():
        model(policy.cast(x))
    return probe, computation(probe, policy.precision, policy.report)


def test_the_work_is_that_of_torchs_own_counter():
    model, x = Products(), torch.randn(2, 4, 6, 6)
    with FlopCounterMode(display=False) as counter:
        model(x)
    probe, found = watched(model, "32-true", x)
    assert sum(probe.work.values()) == counter.get_total_flops()
    assert found == ("100.0% float32", ["float32"], [], "")


def test_complex_products_and_layers_that_a_model_declares_float32_count_as_asked():
    layer, x = nn.Linear(8, 8, dtype=torch.complex64), torch.randn(4, 8, dtype=torch.complex64)
    for name, kind in (("32-true", "complex64"), ("64-true", "complex128")):
        assert watched(layer, name, x)[1] == (f"100.0% {kind}", [kind], [], "")
    config = T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=64, num_layers=1, num_heads=2)
    ids = torch.ones(1, 4, dtype=torch.long)
    _, found = watched(Texts(T5ForConditionalGeneration(config)), "16-true", ids)
    assert "float32" in found.matrix_work
    assert not found.caveats


def test_experts_that_compute_in_float32_are_named_with_their_share():
    assert (
        watched(Experts(True), "bf16-mixed", torch.randn(4, 16))[1].matrix_work == "100.0% bfloat16"
    )
    _, found = watched(Experts(False), "bf16-mixed", torch.randn(4, 16))
    # 16 x 48 products a row beside 16 x 16.
    assert found.matrix_work == "75.0% float32, 25.0% bfloat16"
    text = "75.0% of the matrix work was not in bfloat16: grouped_mm in float32 ((model))."
    assert found.caveats[0] == text


def test_an_expert_counts_with_the_rows_that_it_was_given():
    model = nn.Sequential(Experts(True))
    keys = {"emulate": True, "experts": ["0.experts:in_out"], "ignore_modules": ["0.line"]}
    _, found = watched(model, "float8-rowwise", torch.randn(4, 16), **keys)
    # 16 x 48 products a row, by one of the experts, beside 16 x 16.
    assert found.matrix_work == "75.0% FP8, 25.0% bfloat16"
    assert not found.caveats


@pytest.mark.parametrize(
    ("name", "label"),
    [("float8-rowwise", "FP8"), ("torchao-mxfp8", "FP8"), ("transformer-engine-nvfp4", "FP4")],
)
def test_converted_layers_count_as_their_format_and_kept_ones_as_asked(name, label):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    keys = {"ignore_modules": ["1"], "keep_fp32": ["2"], "emulate": True}
    _, found = watched(model, name, torch.randn(16, 32), **keys)
    shares = {f"33.3% {each}" for each in (label, "bfloat16", "float32")}
    assert {*found.matrix_work.split(", ")} == shares
    assert not found.caveats


def test_autocast_on_a_cpu_says_that_cudas_list_differs_unless_it_is_emulated():
    x = torch.randn(4, 8)
    _, found = watched(Norm(), "bf16-mixed", x)
    assert found.caveats == [
        "20.0% of the matrix work was not in bfloat16: mv in float32 ((model))."
    ]
    assert found.cast_note == f"{CPU_CASTS} Type precision.emulate=true for CUDA's casts."
    for name, keys in (("bf16-mixed", {"emulate": True}), ("bf16-true", {})):
        found = watched(Norm(), name, x, **keys)[1]
        assert (found.caveats, found.cast_note) == ([], "")


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed"])
def test_an_lstm_of_emulated_kernels_counts_as_asked(name):
    last = net(lambda net, x: net.lstm(x)[0], lstm=nn.LSTM(8, 8))
    probe, found = watched(last, name, torch.randn(3, 2, 8), emulate=True)
    assert sum(probe.work.values()) == 2 * 6 * (32 * 8 + 32 * 8)
    assert found.caveats == []
