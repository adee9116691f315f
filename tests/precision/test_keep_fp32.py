import copy

import pytest
import torch
from one_off_nets import net
from precision_models import CPU
from torch import nn

from runner.core.base.errors import ConfigError
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.precision import registry
from runner.precision.casting import KeptInFloat32, find_kept_modules, keep_in_float32
from runner.training.strategies.fsdp import _modules_of_other_dtype

OTHERS = ("16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true")
TRUE = ("16-true", "bf16-true", "64-true")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.inner1 = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner1(self.inner(x)))


def converted(name, model, *patterns):
    precision = registry.load_precision(name, keep_fp32=list(patterns))
    return precision, precision.convert(model)[0]


def forward(precision, model, *inputs):
    with precision.forward(CPU):
        return model(*precision.cast(inputs))


@pytest.mark.parametrize("name", OTHERS)
def test_a_kept_module_computes_in_float32_and_casts_at_its_border(name):
    precision, model = converted(name, Net(), "inner")
    with DtypeProbe(model) as probe:
        forward(precision, model, torch.randn(3, 4)).float().sum().backward()
    rows = {row["module"]: row for row in probe.table()}
    storage, compute = (str(d)[6:] for d in (precision.storage, precision.compute))
    for part in ("inner.0", "inner.1"):
        assert {rows[part][k] for k in ("stores", "computes", "gradients")} == {"float32"}
    assert rows["inner.1"]["outputs"] == "float32"
    assert rows["inner"]["outputs"] == storage
    assert rows["inner1"]["stores"] == rows["inner1"]["gradients"] == storage
    assert rows["inner1"]["computes"] == rows["head"]["computes"] == compute


@pytest.mark.parametrize("name", OTHERS)
def test_a_kept_module_gives_float32_results(name):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 4)
    exact = model.inner(x)
    precision, model = converted(name, model, "inner")
    made = forward(precision, model.inner, x)
    assert torch.equal(made, model.inner(precision.cast(x)))  # whatever surrounds it
    rounded = precision.cast(x).float()
    reference = copy.deepcopy(model.inner).to(torch.float32)
    assert torch.allclose(exact, made.float(), atol=0.05)
    assert torch.equal(made, nn.Sequential.forward(reference, rounded).to(precision.storage))


def test_tensors_made_inside_are_float32_and_the_default_is_restored():
    class Maker(nn.Module):
        def forward(self, x, fail=False):
            if fail:
                raise RuntimeError("inside")
            return torch.get_default_dtype(), x + torch.ones(1)

    precision, model = converted("16-true", nn.Sequential(Maker()), "0")
    x = torch.ones(1, dtype=torch.float16)
    with precision.forward(CPU):
        default, made = model[0](x)
        assert torch.get_default_dtype() is torch.float16
        with pytest.raises(RuntimeError, match="inside"):
            model[0](x, fail=True)
        assert torch.get_default_dtype() is torch.float16
    assert (default, made.dtype) == (torch.float32, torch.float16)


def test_autocast_is_restored_after_an_exception():
    class Fails(nn.Module):
        def forward(self, x):
            assert not torch.is_autocast_enabled("cpu")
            raise RuntimeError("inside")

    precision, model = converted("bf16-mixed", nn.Sequential(Fails()), "0")
    with precision.forward(CPU):
        with pytest.raises(RuntimeError, match="inside"):
            model(torch.ones(1))
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", OTHERS)
def test_the_optimizer_keeps_float32_state_for_a_kept_module(name):
    precision, model = converted(name, Net(), "inner", "head")
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4, fused=True)
    forward(precision, model, torch.randn(3, 4)).float().sum().backward()
    optimizer.step()
    for key, p in model.named_parameters():
        wanted = precision.storage if key.startswith("inner1") else torch.float32
        assert {p.dtype, p.grad.dtype, optimizer.state[p]["exp_avg"].dtype} == {wanted}


def test_names_class_hooks_and_copies_survive():
    model, seen = Net(), []
    names, parameters = list(model.state_dict()), list(model.parameters())
    model.inner[1].register_forward_hook(lambda *_: seen.append(1))
    precision, model = converted("bf16-true", model, "inner.1", "head")
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model.inner[1], nn.LayerNorm)
    assert isinstance(model.head, nn.Linear)
    assert type(model.inner[0]) is nn.Linear
    x = torch.randn(3, 4)
    assert torch.equal(forward(precision, model, x), forward(precision, copy.deepcopy(model), x))
    assert len(seen) == 2
    assert isinstance(copy.deepcopy(model).head, KeptInFloat32)


def test_modules_of_one_class_share_one_new_class_and_are_wrapped_once():
    model = Net()
    for _ in range(2):
        keep_in_float32(model, ["inner1", "head"], torch.bfloat16)
    assert type(model.inner1) is type(model.head)
    assert type(model.head).__mro__.count(KeptInFloat32) == 1
    assert len(model.head._forward_pre_hooks) == 1


def test_patterns_go_segment_by_segment_and_outermost_modules_are_kept():
    assert find_kept_modules(Net(), ["inner", "inner.0"], torch.bfloat16) == {"inner"}


def test_a_pattern_that_matches_nothing_names_near_modules():
    with pytest.raises(ConfigError, match=r"keep_fp32: iner matches.*Nearest names: inner"):
        converted("bf16-true", Net(), "iner")


@pytest.mark.parametrize("model", [Net(), nn.Linear(4, 2)], ids=["Net", "Linear"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_root_itself_can_be_kept(name, model):
    precision, model = converted(name, copy.deepcopy(model), "*")
    assert [m for m in model.modules() if isinstance(m, KeptInFloat32)] == [model]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert forward(precision, model, torch.randn(3, 4)).dtype is precision.storage


@pytest.mark.parametrize("pattern", ["0", "1.0"])
def test_a_shared_module_may_be_meant_by_any_of_its_names(pattern):
    shared = nn.Linear(4, 4)
    precision, model = converted(
        "bf16-true", nn.Sequential(shared, nn.Sequential(shared), nn.Linear(4, 4)), pattern
    )
    assert shared.weight.dtype is torch.float32
    assert model[2].weight.dtype is torch.bfloat16
    assert forward(precision, model, torch.randn(3, 4)).dtype is torch.bfloat16


def tied():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("name", TRUE)
def test_a_kept_module_that_shares_a_parameter_with_a_module_outside_is_refused(name):
    with pytest.raises(ConfigError, match=r"2 shares a parameter with 0, .* Add 0\."):
        converted(name, tied(), "2")


@pytest.mark.parametrize(
    ("name", "patterns"), [("bf16-true", ["0", "2"]), ("bf16-mixed", ["2"]), ("16-true", ["1"])]
)
def test_tied_parameters_inside_a_kept_module_stay_tied(name, patterns):
    precision, model = converted(name, tied(), *patterns)
    assert model[2].weight is model[0].weight
    assert forward(precision, model, torch.tensor([1, 2])).shape == (2, 5)


@pytest.mark.parametrize("name", OTHERS)
def test_integers_pass_and_tuples_are_cast(name):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.lstm = nn.Embedding(5, 4), nn.LSTM(4, 3, batch_first=True)
            self.head = nn.Linear(3, 2)

        def forward(self, tokens):
            out, (hidden, cell) = self.lstm(self.words(tokens))
            return self.head(out), hidden, cell

    precision, model = converted(name, Words(), "words", "lstm")
    tokens = torch.tensor([[1, 2, 3]])
    with DtypeProbe(model) as probe:
        outputs = forward(precision, model, tokens)
        outputs[0].float().sum().backward()
    assert outputs[0].dtype is precision.compute
    assert {t.dtype for t in outputs[1:]} == {precision.storage}
    rows = {row["module"]: row for row in probe.table()}
    assert rows["words"]["inputs"] == "int64"
    assert {rows["words"]["computes"], rows["lstm"]["computes"]} == {"float32"}
    assert {p.dtype for p in model.lstm.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.lstm.parameters()} == {torch.float32}


def test_complex_parameters_of_a_kept_module_are_complex64():
    weight = nn.Parameter(torch.ones(4, dtype=torch.complex128))
    wave = net(lambda net, x: net.wave * x, wave=weight)
    precision, model = converted("64-true", nn.Sequential(wave, nn.Identity()), "0")
    assert model[0].wave.dtype is torch.complex64
    assert forward(precision, model, torch.ones(4)).dtype is torch.complex128


@pytest.mark.parametrize("part", ["*.norm1", "*.self_attn"])
@pytest.mark.parametrize("name", ["bf16-true", "64-true"])
def test_the_fast_path_of_a_transformer_calls_a_kept_module(name, part, monkeypatch):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    precision, model = converted(name, nn.Sequential(layer), part)
    calls, real = [], KeptInFloat32.forward
    monkeypatch.setattr(KeptInFloat32, "forward", lambda *a, **k: calls.append(1) or real(*a, **k))
    model.eval()
    with torch.no_grad():
        out = forward(precision, model, torch.randn(2, 3, 8))
    assert (calls, out.dtype) == ([1], precision.storage)


@pytest.mark.parametrize("name", ["bf16-mixed", "16-true"])
def test_torch_compile_sees_one_graph(name):
    torch._dynamo.reset()
    precision, model = converted(name, Net(), "inner", "head")
    x = torch.randn(3, 4)
    wanted = forward(precision, model, x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    made = forward(precision, compiled, x)
    assert made.dtype is wanted.dtype
    assert torch.equal(made, wanted)
    made.float().sum().backward()
    assert model.head.weight.grad.dtype is torch.float32


def test_a_kept_module_without_tensor_arguments_asks_its_parameters(monkeypatch):
    table = net(lambda net: net.table @ net.table, table=nn.Parameter(torch.ones(2, 2)))
    model = nn.Sequential(table)
    keep_in_float32(model, ["0"], torch.float32)
    asked = []
    real = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda kind, **k: asked.append(kind) or real("cpu", **k))
    model[0].to("meta")()
    assert asked == ["meta"]


class Decay(nn.Module):
    """A state-space layer's decay and a router's counter, which a forward updates."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.a_log = nn.Parameter(torch.linspace(0.1, 1.0, 16))
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.tokens += 1.01
        return self.proj((x * -self.a_log.exp()).to(x.dtype))


@pytest.mark.parametrize("name", [*OTHERS, "transformer-engine", "float8-rowwise"])
def test_a_parameter_and_a_buffer_are_kept_by_name(name):
    options = {} if name in OTHERS else {"emulate": True}
    precision = registry.load_precision(name, keep_fp32=["0.a_log", "*.tokens"], **options)
    model, _ = precision.convert(nn.Sequential(Decay(), nn.Linear(16, 16)))
    expected = torch.linspace(0.1, 1.0, 16)
    assert torch.equal(model[0].a_log, expected)
    for _ in range(300):
        forward(precision, model, torch.randn(32, 16))
    # bfloat16 would stop at 256.
    assert float(model[0].tokens) == pytest.approx(303, rel=1e-5)
    assert model[0].proj.weight.dtype is model[1].weight.dtype
    assert model[0].a_log.dtype is model[0].tokens.dtype is torch.float32


def test_a_layer_whose_weight_is_kept_is_not_converted():
    precision = registry.load_precision("bnb-nf4", keep_fp32=["0.weight"])
    layers = [nn.Linear(64, 64), nn.Linear(64, 64)]
    _, report = precision.convert(nn.Sequential(*layers))
    assert [row.is_converted for row in report.modules] == [False, True]


def test_a_module_of_which_one_weight_is_kept_is_not_sharded():
    _, model = converted("bf16-true", nn.Sequential(nn.Linear(4, 4)), "0.bias")
    with pytest.raises(ConfigError, match="weights of a Linear have several dtypes"):
        _modules_of_other_dtype(model)
