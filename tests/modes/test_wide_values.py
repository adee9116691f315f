"""What stays wider than a precision stores, as docs/precisions.md#what-is-cast says."""

import math
from types import SimpleNamespace

import pytest
import torch
from states import CPU
from torch import nn

from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec
from runner.core.loop.batch_layout import KeywordInputs
from runner.core.run.run_context import TrainingSetup
from runner.modes.execution import build_proven_model
from runner.precision import registry
from runner.training.model import BuiltModel
from runner.training.tasks.model_loss import ModelLoss
from runner.training.tasks.regression import Regression

OTHERS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
EPOCH = 1.7e9


def proven(name, model, inputs, task=None, **options):
    """Return a precision, a model that is proven on inputs, and the lines on it."""
    precision = registry.load_precision(name, **options)
    setup = TrainingSetup(RunSpec(), precision, task or Regression(), CPU)
    torch.manual_seed(0)

    def make(device, plan):
        return BuiltModel(*precision.convert(model(), device, plan), 0, plan=plan)

    built = build_proven_model(setup, SimpleNamespace(build=make), lambda: inputs)
    return precision, built, "\n".join(built.report.lines())


def forward(precision, built, inputs):
    with precision.forward(CPU, built.plan), torch.no_grad():
        return built.model(precision.cast(inputs, built.plan))


class Clock(nn.Module):
    """Subtracts a start in float64 from times, then computes in the dtype of its weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("start", torch.tensor([EPOCH], dtype=torch.float64))
        self.net = nn.Linear(1, 1)

    def forward(self, times):
        return self.net(((times - self.start) / 50).to(self.net.weight.dtype))


class Table(Clock):
    """Adds a float64 table, by mistake, to what a layer takes."""

    def forward(self, times):
        return self.net(times + self.start)


@pytest.mark.parametrize("name", OTHERS)
def test_float64_stays_where_the_model_computes_in_it(name):
    times = EPOCH + torch.linspace(-50, 50, 8, dtype=torch.float64)[:, None]
    precision, built, lines = proven(name, Clock, times)
    assert built.model.start.dtype is torch.float64
    net = built.model.net
    exact = net.weight.float() * (times - EPOCH).float() / 50 + net.bias.float()
    assert torch.allclose(forward(precision, built, times).float(), exact, atol=0.02)
    assert f"stays wider than {str(precision.storage)[6:]}, as the forward takes it" in lines


@pytest.mark.parametrize("name", OTHERS)
def test_float64_that_no_layer_takes_is_cast_and_named(name):
    precision, built, lines = proven(name, Table, torch.rand(8, 1, dtype=torch.float64))
    assert built.model.start.dtype is precision.storage
    assert built.plan.wide_inputs == {}
    assert "for an operation takes nothing wider: start" in lines


def test_a_model_in_float64_throughout_has_no_parts_that_stay():
    _, built, lines = proven("32-true", lambda: Clock().double(), torch.rand(8, 1))
    assert {t.dtype for t in (*built.model.parameters(), *built.model.buffers())} == {torch.float32}
    assert lines == ""


class Scaled(nn.Module):
    """Scales by the input's own mean, and back; `order` gives a dict in place of a tuple."""

    class Scale(nn.Module):
        def forward(self, x):
            mean = x.mean(1, keepdim=True)
            return x - mean, {"mean": mean}

    class Unscale(nn.Module):
        def forward(self, x, mean):
            return x + mean

    def __init__(self):
        super().__init__()
        self.scale, self.net, self.unscale = self.Scale(), nn.Linear(4, 1), self.Unscale()

    def forward(self, x):
        x, given = self.scale(x)
        return self.unscale(self.net(x), given["mean"]).squeeze(1)


@pytest.mark.parametrize("name", ["bf16-true", "16-true"])
def test_outputs_of_kept_modules_stay_where_no_layer_follows(name):
    x = 60000 + torch.rand(8, 4)
    precision, built, lines = proven(name, Scaled, x, keep_fp32=["scale", "unscale"])
    output = forward(precision, built, x)
    assert output.dtype is torch.float32
    assert (output - x.mean(1)).abs().max() < 1.5
    assert "input 0, output of scale, output of unscale" in lines
    _, built, lines = proven(name, Scaled, x, keep_fp32=["scale"])
    assert "output of scale" in lines


class Own(nn.Module):
    """Returns its own loss, of a difference to labels of 1e5."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x, labels):
        return (self.net(x) - (labels - 1e5)).square().mean()


@pytest.mark.parametrize("key", ["labels", "value"])
def test_labels_that_the_model_takes_are_not_rounded(key):
    labels = 1e5 + torch.rand(8, 1)
    inputs = KeywordInputs({"x": torch.rand(8, 4), key: labels})
    own = Own
    if key != "labels":
        own = type("Value", (Own,), {"forward": lambda self, x, value: Own.forward(self, x, value)})
    precision, built, lines = proven("bf16-true", own, inputs, ModelLoss(target=key))
    cast = precision.cast(inputs, built.plan)
    assert torch.equal(cast[key], labels)
    assert cast["x"].dtype is torch.bfloat16
    assert f"as the forward takes it: input {key}" in lines


class Categories(nn.Module):
    """Looks up the category in the last column of its input."""

    def __init__(self):
        super().__init__()
        self.table, self.net = nn.Embedding(1024, 4), nn.Linear(6, 1)

    def forward(self, x):
        return self.net(torch.cat([x[:, :2], self.table(x[:, 2].long())], 1))


def test_whole_numbers_that_16_bits_would_change_are_refused():
    x = torch.cat([torch.rand(8, 2), torch.arange(700.0, 708.0)[:, None]], 1)
    wanted = "bfloat16 would change whole numbers, 701 in column 2 of input 0"
    with pytest.raises(ConfigError, match=wanted):
        proven("bf16-true", Categories, x)
    # float16 has them, and in bfloat16 those up to 256.
    proven("16-true", Categories, x)
    x[:, 2] -= 500
    proven("bf16-true", Categories, x)


def test_counts_that_16_bits_change_are_warned_of():
    x = torch.cat([torch.rand(8, 2), torch.full((8, 1), 8450.0)], 1)
    _, built, lines = proven("bf16-true", lambda: nn.Linear(3, 1), x)
    assert built.plan.wide_inputs == {}
    assert "warning: bfloat16 changes whole numbers, 8450 in column 2 of input 0." in lines


class Graph(nn.Module):
    """Multiplies a matrix of counts with its weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, counts, x):
        return self.net(counts.to_dense() @ x) if counts.numel() else self.net(x)


@pytest.mark.parametrize("counts", [torch.full((4, 4), 757.0).to_sparse(), torch.rand(4, 0)])
def test_inputs_without_columns_of_numbers_are_cast(counts):
    _, built, _ = proven("bf16-true", Graph, [counts, torch.rand(4, 4)])
    assert 1 not in built.plan.wide_inputs


class Filled(nn.Module):
    """Fills a tensor that it makes without values, and a layer takes it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x):
        filled = torch.empty(len(x), 4)
        filled[:] = x
        return self.net(filled)


def test_memory_without_values_is_no_tensor_that_loses_some():
    del [1e4 + torch.rand(8, 4) for _ in range(50)][:]  # whose memory is used again
    assert "become equal" not in proven("bf16-true", Filled, torch.rand(8, 4))[2]


class Positions(nn.Module):
    """Adds sines of positions, made without a dtype, as `cast` says."""

    def __init__(self, cast=True):
        super().__init__()
        self.net, self.cast = nn.Linear(8, 1), cast

    def forward(self, t):
        frequencies = torch.exp(torch.arange(4) * -(math.log(10000) / 3))
        angles = t[:, None] * frequencies[None]
        x = torch.cat([angles.sin(), angles.cos()], 1)
        return self.net(x.to(self.net.weight.dtype) if self.cast else x)


@pytest.mark.parametrize("name", ["bf16-true", "16-true"])
def test_tensors_without_a_dtype_are_float32_where_the_forward_takes_them(name):
    t = torch.arange(0, 4000, 7)
    precision, built, lines = proven(name, Positions, t)
    with precision.forward(CPU, built.plan):
        assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_dtype() is torch.float32
    exact = built.model.float()(t)
    _, built, _ = proven(name, Positions, t)
    assert torch.allclose(forward(precision, built, t).float(), exact, atol=0.02)
    assert "tensors made without a dtype" in lines


@pytest.mark.parametrize("name", ["bf16-true", "16-true"])
def test_a_module_whose_tensors_without_a_dtype_lose_values_is_named(name):
    t = torch.arange(0, 4000, 7)
    precision, built, lines = proven(name, lambda: nn.Sequential(Positions(cast=False)), t)
    assert forward(precision, built, t).dtype is precision.storage
    assert "and distinct values become equal in 0." in lines
    assert proven(name, lambda: Positions(cast=False), torch.arange(3))[2] == ""


class DropsPaths(nn.Module):
    """Makes a tensor without a dtype in training alone, and a layer takes it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, x):
        return self.net(x * (torch.rand(len(x), 1) + 0.5).floor() if self.training else x)


def test_what_is_made_in_training_alone_is_tried_too():
    precision, built, _ = proven("bf16-true", DropsPaths, torch.rand(512, 4))
    built.model.train()
    assert forward(precision, built, torch.rand(8, 4)).dtype is torch.bfloat16


def test_float32_inputs_of_an_ordinary_model_are_cast_without_a_line():
    precision, built, lines = proven("bf16-true", lambda: nn.Linear(4, 1), torch.rand(8, 4))
    assert (built.plan.wide_inputs, lines) == ({}, "")
    with precision.forward(CPU):
        assert torch.get_default_dtype() is torch.bfloat16
