"""torchao's float8 training, emulated, so that a CPU shows all but the hardware's kernels."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.diagnostics.dtype_trace import DtypeProbe
from runner.models.gpt import GPT
from runner.models.mlp import MLP
from runner.precision import float8, registry
from runner.precision.layers.padding import pad_rows
from runner.precision.loss_scale import NoLossScale
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.step import loss_of, train_step
from runner.training.tasks.classification import Classification
from runner.utils.errors import ConfigError

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")
TENSORWISE, ROWWISE, HP = NAMES = ("float8-tensorwise", "float8-rowwise", "float8-rowwise-hp")
BF16, F32 = torch.bfloat16, torch.float32
# e4m3 has 3 mantissa bits, so rounding moves a value by 2**-4 of it at most (Micikevicius et al.
# 2022, "FP8 Formats for Deep Learning"). Weights and inputs are rounded independently, and the
# sum of a product averages: 0.045 to 0.049 was measured for these recipes.
E4M3 = 2**-4


def load(name, **changes):
    return registry.load_precision(name, emulate=True, **changes)


def convert(name, model, **changes):
    precision = load(name, **changes)
    return precision, *precision.convert(model)


def run(precision, model, inputs):
    with precision.forward(CPU):
        return model(precision.cast(inputs))


def linear(name, rows=32, **changes):
    """A converted layer, inputs and the gradient of its outputs."""
    torch.manual_seed(0)
    precision, layer, _ = convert(name, nn.Linear(64, 32), **changes)
    return precision, layer, torch.randn(rows, 64), torch.randn(rows, 32)


def mlp():
    torch.manual_seed(0)
    return MLP([8, 8], 16, [64, 32]), torch.randn(24, 8, 8), torch.randint(16, (24,))


def gpt():
    torch.manual_seed(0)
    tokens = torch.randint(32, (3, 9))
    return GPT(32, 8, layers=2, heads=2, width=32), tokens[:, :-1], tokens[:, 1:]


class Tokens(Classification):
    def loss(self, output, target):
        return F.cross_entropy(output.flatten(0, -2), target.flatten())


def state_of(precision, model):
    driven = [ScheduledOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))]
    return TrainState(model, precision, Tokens(), precision.scale(CPU), driven, CPU)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [mlp, gpt])
@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_a_loss_that_starts_as_float32s(name, build, weights):
    model, *batch = build()
    with torch.no_grad():
        exact = loss_of(state_of(registry.load_precision("32-true"), model), *batch).item()
    precision, model, report = convert(name, model, weights=weights)
    assert all(row.done or "Embedding" in row.kind for row in report.modules)
    state = state_of(precision, model)
    with precision.session(model, CPU):
        losses = [train_step(state, [tuple(batch)]).loss.item() for _ in range(20)]
    assert abs(losses[0] - exact) < E4M3 * exact
    assert losses[0] != exact
    assert losses[-1] < 0.7 * losses[0]
    assert {p.dtype for p in model.parameters()} == {getattr(torch, weights)}


@pytest.mark.parametrize("name", NAMES)
def test_a_product_is_rounded_as_e4m3_is(name):
    precision, layer, x, _ = linear(name)
    exact = F.linear(x, layer.weight, layer.bias)
    error = (run(precision, layer, x) - exact).norm() / exact.norm()
    assert E4M3 / 4 < error < E4M3


def gradients(name):
    precision, layer, x, g = linear(name, weights="bfloat16")
    x, g = x.bfloat16().requires_grad_(), g.bfloat16()
    out = run(precision, layer, x)
    out.backward(g)
    exact = (g @ layer.weight, g.t() @ x)
    return out.detach(), (x.grad, layer.weight.grad), exact


@pytest.mark.parametrize("name", NAMES)
def test_the_weight_gradient_is_bfloat16s_in_the_hp_recipe_only(name):
    _, (dx, dw), (exact_dx, exact_dw) = gradients(name)
    assert torch.equal(dw, exact_dw) == (name == HP)
    # Output gradients have e5m2's 2 bits under tensorwise, so twice the rounding.
    assert 0.01 < (dx - exact_dx).norm() / exact_dx.norm() < 2 * E4M3
    assert (dw - exact_dw).norm() / exact_dw.norm() < 2 * E4M3


def test_the_recipes_are_three():
    tensor, row, hp = (gradients(name) for name in NAMES)
    assert not torch.equal(tensor[0], row[0])
    assert torch.equal(row[0], hp[0])  # they differ in the backward
    assert not torch.equal(tensor[1][0], row[1][0])
    for a, b in ((tensor, row), (row, hp), (tensor, hp)):
        assert not torch.equal(a[1][1], b[1][1])


def test_a_scale_per_row_spares_the_others_an_outlier():
    """A row that is 2**18 smaller than another falls below e4m3's range (448 to 2**-9) where they
    share a scale."""
    for name in NAMES:
        precision, layer, x, _ = linear(name)
        layer.bias.data.zero_()
        x[0] *= 2**18
        small = run(precision, layer, x)[1:].float()
        exact = F.linear(x, layer.weight)[1:]
        assert ((small - exact).norm() / exact.norm() < E4M3) == (name != TENSORWISE)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_dtypes_flow_as_in_bfloat16(weights):
    model, *batch = mlp()
    precision, model, _ = convert(TENSORWISE, model, weights=weights)
    assert (precision.storage, precision.compute) == (getattr(torch, weights), BF16)
    with DtypeProbe(model) as probe:
        train_step(state_of(precision, model), [tuple(batch)])
    rows = {row["module"]: row for row in probe.table()}
    for part in ("layers.0", "layers.1", "head"):
        row = rows[part]
        assert (row["stores"], row["gradients"], row["outputs"]) == (weights, weights, "bfloat16")
    assert isinstance(precision.scale(CPU), NoLossScale)
    assert precision.loss_dtype is F32
    wide = precision.cast({"x": torch.ones(1, dtype=torch.float64), "n": torch.ones(1).long()})
    assert (wide["x"].dtype, wide["n"].dtype) == (precision.storage, torch.int64)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_the_forward_context_serves_again(weights):
    precision = load(TENSORWISE, weights=weights)
    assert precision.forward(CPU) is precision.forward(CPU)
    for _ in range(2):
        with precision.forward(CPU):
            assert torch.is_autocast_enabled("cpu") == (weights == "float32")
            assert (torch.get_default_dtype() is BF16) == (weights == "bfloat16")


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.odd = nn.Linear(16, 16), nn.Linear(16, 24)
        self.wide, self.twin = nn.Linear(24, 64), nn.Linear(64, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 64)
        self.head.weight = self.twin.weight

    def forward(self, x):
        return self.head(self.norm(self.twin(self.wide(self.odd(self.narrow(x))))))


def fates(**changes):
    _, _, report = convert(TENSORWISE, Zoo(), **changes)
    return {row.module: row.why for row in report.modules}


def test_each_layer_is_converted_or_has_a_reason():
    whys = fates()
    assert [name for name, why in whys.items() if not why] == ["narrow", "twin", "head"]
    assert whys["odd"] == "its shape 16 -> 24 is not in multiples of 16"
    assert whys["wide"] == "its shape 24 -> 64 is not in multiples of 16"
    whys = fates(min_features=32, ignore_modules=["head"])
    assert whys["narrow"] == "its shape 16 -> 16 is below precision.min_features=32"
    assert (whys["head"], whys["twin"]) == ("named by precision.ignore_modules", "")


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_keep_fp32_is_not_converted_and_computes_in_float32(weights):
    precision, model, report = convert(
        ROWWISE, Zoo(), keep_fp32=["narrow", "norm"], weights=weights
    )
    (island_row,) = (row for row in report.modules if row.module == "narrow")
    assert island_row.why == "kept in float32 by precision.keep_fp32"
    with DtypeProbe(model) as probe:
        run(precision, model, torch.randn(2, 16)).sum().backward()
    rows = {row["module"]: row for row in probe.table()}
    for part in ("narrow", "norm"):
        assert (rows[part]["stores"], rows[part]["computes"]) == ("float32", "float32")
    assert rows["head"]["stores"] == weights


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_is_the_model_is_converted_in_place(name):
    layer = nn.Linear(32, 16, bias=False)
    _, made, report = convert(name, layer)
    assert made is layer
    assert str(report) == "1/1"
    assert type(made).__name__ == "Float8Linear"
    assert copy.deepcopy(made).weight.shape == (16, 32)


def test_objects_flags_hooks_ties_and_the_users_own_survive():
    model, seen = Zoo(), []
    model.twin.register_forward_hook(lambda *_: seen.append("module"))
    model.twin.weight.register_hook(lambda _: seen.append("weight"))
    model.head.bias.requires_grad_(False)
    model.head.register_buffer("mask", torch.ones(1), persistent=False)
    model.head.gate = nn.Parameter(torch.ones(1))
    model.head.note = "mine"
    model.eval()
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    precision, model, _ = convert(ROWWISE, model, weights="bfloat16")
    after = dict(model.named_parameters())
    assert all(before[n] is after[n] for n in before)
    assert (before.keys(), keys) == (after.keys(), list(model.state_dict()))
    assert model.head.weight is model.twin.weight
    assert (model.head.note, model.head.mask.dtype, model.head.training) == ("mine", BF16, False)
    run(precision, model, torch.randn(3, 16)).sum().backward()
    assert seen[0] == "module"
    assert "weight" in seen
    assert model.head.bias.grad is None


def test_both_ends_of_a_tied_weight_train_it():
    """The embedding reads and the head multiplies one parameter; it gets both gradients."""
    grads = {}
    for part in ("both", "head"):
        model, tokens, target = gpt()
        precision, model, _ = convert(TENSORWISE, model)
        assert model.head.weight is model.token_embedding.weight
        if part == "head":  # the embedding's gradient is detached
            model.token_embedding.register_forward_hook(lambda m, a, out: out.detach())
        loss_of(state_of(precision, model), tokens, target).backward()
        grads[part] = model.head.weight.grad
    assert grads["head"].abs().sum() > 0
    assert not torch.equal(grads["both"], grads["head"])


class Mine(nn.Linear):
    def double(self):
        return 2 * self.weight


class Own(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


def test_subclasses_keep_their_class_and_those_with_a_forward_are_skipped():
    model = nn.Sequential(Mine(16, 16), Own(16, 16), nn.Linear(16, 16))
    model[2].child = nn.Linear(1, 1)
    _, model, report = convert(TENSORWISE, model)
    assert isinstance(model[0], Mine)
    assert type(model[0]).__name__ == "Float8Mine"
    assert torch.equal(model[0].double(), 2 * model[0].weight)
    assert type(model[1]) is Own
    assert {row.module: row.why for row in report.modules} == {
        "0": "",
        "1": "Own has a forward of its own",
        "2": "holds modules of its own",
        "2.child": "its shape 1 -> 1 is not in multiples of 16",
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_state_dict_is_a_plain_models(name):
    model, inputs, _ = mlp()
    precision, made, _ = convert(name, copy.deepcopy(model))
    assert precision.layout == ""
    model.load_state_dict(made.state_dict(), strict=True)
    other = convert(name, mlp()[0].requires_grad_(False))[1]
    for p in other.parameters():
        p.zero_()
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(run(precision, made, inputs), run(precision, other, inputs))


def test_nothing_to_convert_is_refused():
    with pytest.raises(ConfigError, match=r"float8-rowwise would convert nothing.*8 -> 8 is not"):
        convert(ROWWISE, nn.Linear(8, 8))
    with pytest.raises(ConfigError, match=r"convert nothing.*is a Float8Linear already"):
        convert(ROWWISE, convert(ROWWISE, nn.Linear(16, 16))[1])
    with pytest.raises(ConfigError, match=r"ignore_modules: tail matches no module"):
        convert(ROWWISE, Zoo(), ignore_modules=["tail"])














def test_the_library_is_imported_late_and_without_a_word():
    script = """
import sys
from torch import nn
from runner.precision import registry
precision = registry.load_precision("float8-rowwise", emulate=True)
assert "torchao" not in sys.modules
precision.convert(nn.Linear(16, 16))
assert "torchao" in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Rows. Small whole numbers up to 7 are exact in both formats, scales of 448/7 and 57344/7 are
# powers of two, and so every sum is exact in float32, whatever its order.
def whole(*shape):
    made = torch.randint(-7, 8, shape).float()
    made[..., 0] = 7.0
    return made


def products(layer, call, x, g):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = call(x)
    out.backward(g)
    return out.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("rows", [1, 5, 16, 17])
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_neither_outputs_nor_gradients(name, rows):
    _, layer, *_ = linear(name)
    with torch.no_grad():
        layer.weight.copy_(whole(32, 64))
    unpadded = super(float8._Float8, layer).forward
    x, g = whole(rows, 64), whole(rows, 32)
    for a, b in zip(products(layer, layer, x, g), products(layer, unpadded, x, g), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_padding_adds_only_noise_to_any_numbers(name):
    _, layer, x, g = linear(name, rows=13)
    unpadded = super(float8._Float8, layer).forward
    for a, b in zip(products(layer, layer, x, g), products(layer, unpadded, x, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((16, 3), (16, 3)),
        ((2, 8, 3), (2, 8, 3)),  # as it is
        ((5, 3), (16, 3)),
        ((2, 3, 3, 3), (32, 3)),
        ((3,), (16, 3)),
        ((0, 3), (16, 3)),
        ((2, 0, 3), (16, 3)),
    ],
)
def test_rows_are_padded_to_the_multiple(shape, seen):
    def forward(x):
        assert x.shape == seen
        return x @ torch.ones(3, 2)

    x = torch.randn(shape)
    torch.testing.assert_close(pad_rows(forward, x, 16), x @ torch.ones(3, 2))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (2, 3, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_layer_takes_what_a_plain_one_takes(name, shape):
    precision, layer, *_ = linear(name)
    x = torch.randn(shape, requires_grad=True)
    out = run(precision, layer, x)
    out.sum().backward()
    assert (out.shape, out.dtype) == ((*shape[:-1], 32), BF16)
    assert x.grad.shape == shape
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_in_one_graph(name, weights):
    torch._dynamo.reset()  # its limit of recompilations is for all layers of a process
    precision, layer, x, _ = linear(name, weights=weights)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (32, 13, 5):
        eager, traced = run(precision, layer, x[:rows]), run(precision, compiled, x[:rows])
        assert torch.equal(eager, traced)
        grads = []
        for out in (eager, traced):
            layer.zero_grad()
            out.sum().backward()
            grads.append(layer.weight.grad)
        assert torch.equal(*grads)
