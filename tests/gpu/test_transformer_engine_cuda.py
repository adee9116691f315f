"""What only TransformerEngine on a CUDA device can show."""

import copy
from functools import partial

import pytest
import torch
from precision_models import load_or_skip
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from runner.core.loop.step import train_step
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.precision import registry
from runner.training.tasks.regression import Regression

NAMES = [name for name in registry.precision_names() if name.startswith("transformer-engine")]
DELAYED = "transformer-engine"
DEVICE = torch.device("cuda", 0)
# Bounds on relative errors: 3 bits of mantissa in E4M3, 2 in E5M2, 1 in FP4.
NOISE = {"nvfp4": 0.3}

pytestmark = pytest.mark.gpu


load = partial(load_or_skip, device=DEVICE)


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.out(F.gelu(self.into(self.norm(x))))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Block(), Block(), nn.Linear(64, 8))


def made(name, **changes):
    precision = load(name, **changes)
    model, report = precision.convert(net(), DEVICE)
    return precision, model.to(DEVICE), report


def batch(rows=48, seed=1):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(rows, 64, device=DEVICE, generator=generator)
    return x, torch.tanh(x[:, :8] * 2)


def state_of(precision, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)
    scale = precision.scale(DEVICE)
    return TrainState(
        model, precision, Regression(), scale, [ScheduledOptimizer(optimizer)], DEVICE
    )


def step(precision, layer, x):
    """One forward and backward; the largest relative error of outputs and gradients."""
    x = x.to(precision.storage).requires_grad_()
    with precision.forward(DEVICE):
        out = layer(x)
    out.float().square().mean().backward()
    weight = layer.weight.detach().float().requires_grad_()
    wide = x.detach().float().requires_grad_()
    exact = F.linear(wide, weight, layer.bias.detach().float())
    exact.square().mean().backward()
    pairs = ((out, exact), (x.grad, wide.grad), (layer.weight.grad, weight.grad))
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in pairs)


WIDTHS = [(1, 1), (1, 2), (3, 1), (5, 7), (8, 8), (9, 33)]  # in multiples of the recipe's
ROWS = [1, 3, 8, 15, 16, 17, 24, 31, 33, 100, 128]


@pytest.mark.parametrize(("into", "out"), WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_that_is_converted_runs(name, into, out):
    precision = load(name)
    multiple = precision.kind.multiple
    torch.manual_seed(0)
    layer, _ = precision.convert(nn.Linear(into * multiple, out * multiple))
    layer.to(DEVICE)
    errors = {}
    for rows in ROWS:
        layer.zero_grad()
        x = torch.randn(rows, into * multiple, device=DEVICE)
        errors[rows] = step(precision, layer, x)
    assert max(errors.values()) < NOISE.get(precision.recipe["kind"], 0.15), errors


@pytest.mark.parametrize("name", [name for name in NAMES if "nvfp4" not in name])  # it rolls dice
def test_emulation_computes_what_the_hardware_does(name, record_property):
    hardware, emulated = load(name), registry.load_precision(name, emulate=True)
    torch.manual_seed(0)
    plain = nn.Linear(128, 256)
    inputs = torch.randn(3, 64, 128, device=DEVICE).to(hardware.storage)
    found = []
    for precision in (hardware, emulated):
        layer, _ = precision.convert(copy.deepcopy(plain), DEVICE)
        layer.to(DEVICE)
        for x in inputs:  # delayed scaling goes by the steps before
            layer.zero_grad()
            x = x.clone().requires_grad_()
            with precision.forward(DEVICE):
                out = layer(x)
            (out.float() * torch.linspace(-1, 1, 256, device=DEVICE)).sum().backward()
        found.append([out, x.grad, layer.weight.grad, layer.bias.grad])
    errors = [
        ((a - b).float().norm() / b.float().norm()).item() for a, b in zip(*found, strict=True)
    ]
    record_property("errors", str(errors))
    assert max(errors) < 2**-7  # summed in another order, and rounded to bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_the_library_at_shapes_that_the_rule_refuses(name, record_property, capsys):
    """A table for people: bare layers of the library at shapes that the rule forbids."""
    precision = load(name)
    import transformer_engine.pytorch as te

    fates = {}
    for shape in (
        (8, 16, 16),
        (16, 8, 16),
        (24, 16, 16),
        (16, 24, 16),
        (16, 16, 8),
        (32, 48, 40),
        (16, 16, 1),
        (48, 16, 32),
    ):
        into, out, rows = shape
        layer = te.Linear(into, out, params_dtype=precision.storage, device=DEVICE)
        x = torch.randn(rows, into, device=DEVICE)
        try:
            fates[shape] = f"{step(precision, layer, x):.3f}"
        except Exception as error:
            fates[shape] = f"{type(error).__name__}: {str(error)[:90]}"
    record_property("shapes", str(fates))
    with capsys.disabled():
        print(f"\n{name}: error of (in, out, rows)", *fates.items(), sep="\n  ")


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss_with_a_partial_last_batch(name, fuse):
    precision, model, report = made(name, fuse=fuse)
    assert str(report) == "5/6"
    state = state_of(precision, model)
    with precision.session(model, DEVICE):
        losses = [
            train_step(state, [batch(rows=48 if i % 3 else 13)]).loss.item() for i in range(60)
        ]
    assert losses[-1] < 0.7 * losses[0]
    assert {p.dtype for p in model.parameters()} == {precision.storage}
    assert all(p.grad is None and p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_conv1d_computes_what_a_linear_layer_of_its_transposed_weight_does(name):
    load(name)  # skips where it cannot run
    torch.manual_seed(0)
    linear, transposed = nn.Linear(64, 128), Conv1D(128, 64)
    with torch.no_grad():
        transposed.weight.copy_(linear.weight.t())
        transposed.bias.copy_(linear.bias)
    x, outputs = torch.randn(32, 64, device=DEVICE), []
    for layer in (linear, transposed):
        precision = load(name)
        model = precision.convert(layer, DEVICE)[0].to(DEVICE)
        with precision.session(model, DEVICE), precision.forward(DEVICE):
            outputs.append(model(precision.cast(x)))
    assert torch.equal(*outputs)
    outputs[1].float().sum().backward()
    assert transposed.weight.grad.shape == (64, 128)


@pytest.mark.parametrize("name", NAMES)
def test_the_function_at_initialisation_is_near_float32s(name):
    precision, model, _ = made(name)
    x, _ = batch()
    exact = net().to(DEVICE)(x)
    with torch.no_grad(), precision.forward(DEVICE):
        out = model(precision.cast(x))
    assert out.dtype is precision.storage
    error = ((out.float() - exact).norm() / exact.norm()).item()
    assert 1e-3 < error < NOISE.get(precision.recipe["kind"], 0.15)


@pytest.mark.parametrize("name", NAMES)
def test_fused_computes_what_unfused_does(name):
    results = []
    for fuse in (False, True):
        precision, model, report = made(name, fuse=fuse)
        x, target = batch()
        with precision.session(model, DEVICE), precision.forward(DEVICE):
            out = model(precision.cast(x))
        (out.float() - target).square().mean().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters())])
    assert sum("computes" in row.why for row in report.modules) == 2
    for a, b in zip(*results, strict=True):
        error = ((a.float() - b.float()).norm() / a.float().norm()).item()
        assert error < NOISE.get(precision.recipe["kind"], 0.15)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_continues_as_if_it_had_not_stopped(name, tmp_path):
    """Stochastic rounding draws from the device's generator, so it is part of the state."""
    precision, model, _ = made(name)
    state = state_of(precision, model)
    with precision.session(model, DEVICE):
        for seed in range(4):
            train_step(state, [batch(seed=seed)])
        torch.save(
            {
                "model": model.state_dict(),
                "fp8": precision.state_dict(model),
                "optimizer": state.optimizers[0].optimizer.state_dict(),
                "random": torch.cuda.get_rng_state(DEVICE),
            },
            tmp_path / "last.pt",
        )
        going_on = [train_step(state, [batch(seed=seed)]).loss.item() for seed in (5, 6, 7)]
    saved = torch.load(tmp_path / "last.pt", weights_only=True, map_location="cpu")
    net().load_state_dict(saved["model"], strict=True)
    other, fresh, _ = made(name)
    fresh.load_state_dict(saved["model"], strict=True)
    other.load_state_dict(fresh, saved["fp8"])
    resumed = state_of(other, fresh)
    resumed.optimizers[0].optimizer.load_state_dict(saved["optimizer"])
    torch.cuda.set_rng_state(saved["random"], DEVICE)
    with other.session(fresh, DEVICE):
        assert [train_step(resumed, [batch(seed=s)]).loss.item() for s in (5, 6, 7)] == going_on
    assert bool(saved["fp8"]) == (precision.recipe["kind"] == "delayed")


@pytest.mark.parametrize("update", [False, True])
def test_an_evaluation_leaves_no_trace_in_the_scales(update):
    precision, model, _ = made(DELAYED, update_in_eval=update)
    state = state_of(precision, model)
    with precision.session(model, DEVICE):
        train_step(state, [batch()])
        before = precision.state_dict(model)
        with torch.no_grad(), precision.eval_context(model), precision.forward(DEVICE):
            model(precision.cast(1000 * batch()[0]))
        after = precision.state_dict(model)
    is_unchanged = all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])
    assert is_unchanged == (not update)


def test_an_evaluation_before_the_first_step_leaves_a_fresh_state():
    precision, model, _ = made(DELAYED)
    with precision.session(model, DEVICE):
        with torch.no_grad(), precision.eval_context(model), precision.forward(DEVICE):
            model(precision.cast(batch()[0]))
        for held in precision.state_dict(model).values():
            assert held["forward_amax_history"].max().item() == 0.0
            assert held["forward_scale"].unique().tolist() == [1.0]


def test_gauges_follow_the_inputs_without_a_synchronisation(refused_waits):
    precision, model, _ = made(DELAYED)
    state, (x, target) = state_of(precision, model), batch()
    with precision.session(model, DEVICE):
        train_step(state, [(x, target)])
        with refused_waits():
            gauges = precision.gauges(model)
    assert len(gauges) == 2 * 5
    amax = x.to(precision.storage).abs().max().item()
    assert gauges["fp8/amax/0"].item() == pytest.approx(amax)
    assert gauges["fp8/scale/0"].item() == pytest.approx(448 / amax)


def test_a_second_run_leaves_the_first_ones_scales():
    precision, model, _ = made(DELAYED)
    with precision.session(model, DEVICE):
        train_step(state_of(precision, model), [batch()])
        before = precision.state_dict(model)
        other, second, _ = made(DELAYED)
        with other.session(second, DEVICE):
            train_step(state_of(other, second), [batch(seed=9)])
        after = precision.state_dict(model)
        assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])
        train_step(state_of(precision, model), [batch(seed=2)])
        moved = precision.state_dict(model)
    assert not torch.equal(moved["0"]["forward_scale"], before["0"]["forward_scale"]) or (
        not torch.equal(moved["0"]["forward_amax_history"], before["0"]["forward_amax_history"])
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_step_does_not_synchronise(name, refused_waits):
    precision, model, _ = made(name)
    state, batches = state_of(precision, model), [batch(seed=seed) for seed in range(5)]
    with precision.session(model, DEVICE):
        for b in batches[:2]:
            train_step(state, [b])
        with refused_waits():
            for b in batches[2:]:
                train_step(state, [b])


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_computes_the_same(name):
    precision, model, _ = made(name, fuse=True)
    x = precision.cast(batch()[0])
    with torch.no_grad(), precision.forward(DEVICE):
        assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("name", NAMES)
def test_islands_and_frozen_layers_train_inside(name):
    precision = load(name, keep_fp32=["1", "3"])
    model = net()
    model[2].into.requires_grad_(False)
    model, _ = precision.convert(model, DEVICE)
    model.to(DEVICE)
    state = state_of(precision, model)
    before = model[2].into.weight.clone()
    with precision.session(model, DEVICE):
        losses = [train_step(state, [batch()]).loss.item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert torch.equal(before, model[2].into.weight)
    assert (model[1].out.weight.dtype, model[0].weight.dtype) == (torch.float32, precision.storage)


def test_transformer_encoder_layers_keep_fp8_in_evaluation():
    """torch's fast path reads the weights of the layer's parts and would pass FP8 by."""
    precision = load(DELAYED)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    layer, _ = precision.convert(layer, DEVICE)
    layer.to(DEVICE).eval()
    x = precision.cast(torch.randn(2, 8, 64, device=DEVICE))
    with precision.session(layer, DEVICE), torch.no_grad(), precision.forward(DEVICE):
        layer(x)
        assert layer.linear1.fp8_meta["scaling_fwd"].amax_history.max().item() > 0


@pytest.mark.parametrize("width", [1, 7, 24, 100, 1000, 4104])
@pytest.mark.parametrize("name", NAMES)
def test_norms_of_any_width_compute_what_torchs_do(name, width):
    precision = load(name)
    torch.manual_seed(0)
    norm = nn.LayerNorm(width, eps=0.1)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    model, _ = precision.convert(nn.ModuleList([norm, nn.Linear(32, 32)]), DEVICE)
    model.to(DEVICE)
    assert type(norm).__name__ == "TELayerNorm"
    for rows in (1, 13, 64):
        norm.zero_grad()
        x = precision.cast(torch.randn(2, rows, width, device=DEVICE)).requires_grad_()
        wide = [t.detach().float().requires_grad_() for t in (x, norm.weight, norm.bias)]
        with precision.forward(DEVICE):
            out = norm(x)
        exact = F.layer_norm(wide[0], (width,), *wide[1:], eps=0.1)
        grad = torch.randn_like(exact)
        out.backward(grad.to(out.dtype))
        exact.backward(grad)
        found = (out, x.grad, norm.weight.grad, norm.bias.grad)
        for a, b in zip(found, (exact, *(w.grad for w in wide)), strict=True):
            torch.testing.assert_close(
                a.float(), b, rtol=0.02, atol=0.02 * b.abs().max().item() + 1e-3
            )
