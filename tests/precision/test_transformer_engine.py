"""TransformerEngine's precisions. What needs the library is at the end, and skipped without it;
what needs a GPU is in tests/gpu."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.precision import registry, te_recipes
from runner.precision.conversion import ConversionRules
from runner.precision.layers import te_layers
from runner.precision.layers.padding import pad_rows
from runner.precision.layers.te_layers import convert_layers, find_pairs, te_obstacle, unfit_shape
from runner.precision.te_recipes import KINDS
from runner.precision.transformer_engine import _resized_history
from runner.utils.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NAMES = [name for name in registry.precision_names() if name.startswith("transformer-engine")]
DELAYED, FLOAT16 = "transformer-engine", "transformer-engine-float16"




# The config.
def test_there_is_a_yaml_for_each_recipe_with_all_its_keys_at_their_defaults():
    assert len(NAMES) == 6
    loaded = [registry.load_precision(name) for name in NAMES]
    assert {p.recipe["kind"] for p in loaded} == set(KINDS)
    for precision in loaded:
        keys = {key: entry.default for key, entry in precision.kind.keys.items()}
        assert precision.recipe == {"kind": precision.recipe["kind"], **keys}
        assert precision.storage is precision.compute
        assert (precision.storage is torch.float16) == (precision.name == FLOAT16)
        assert (precision.layout, precision.loss_dtype) == ("", torch.float32)








def test_float16_weights_refuse_an_eps_that_underflows():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    registry.load_precision(DELAYED).check_optimizers([optimizer])
    with pytest.raises(ConfigError, match=r"optimizer\.eps=1e-08"):
        registry.load_precision(FLOAT16).check_optimizers([optimizer])


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_on_a_cpu_only_sets_the_default_dtype(name):
    precision = registry.load_precision(name)
    for _ in range(2):
        with precision.forward(CPU):
            assert torch.get_default_dtype() is precision.storage
    assert precision.cast({"x": torch.ones(1)})["x"].dtype is precision.storage
    assert precision.cast(torch.ones(1).long()).dtype is torch.int64
























# Layers, on stand-ins for the library's that compute the same in plain torch.
class FakeLinear(nn.Module):
    def __init__(self, into, out, bias, params_dtype, device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into, device=device, dtype=params_dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out, device=device, dtype=params_dtype))
        else:
            self.bias = torch.empty(0)
        self.seen = []

    def forward(self, inp):
        self.seen.append(tuple(inp.shape))
        return F.linear(inp, self.weight, self.bias if self.bias is not None else None)

    def get_extra_state(self):
        return torch.empty(0)


class FakeNorm(nn.Module):
    def __init__(self, shape, eps, dtype, device):
        super().__init__()
        self.eps, self.shape = eps, shape

    def forward(self, inp):
        return F.layer_norm(inp, self.shape, self.weight, self.bias, self.eps)

    def get_extra_state(self):
        return torch.empty(0)


class FakeLayerNormLinear(FakeLinear):
    def __init__(self, into, out, eps, **keywords):
        super().__init__(into, out, **keywords)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.empty(into, device="meta"))
        self.layer_norm_bias = nn.Parameter(torch.empty(into, device="meta"))

    def forward(self, inp):
        width = inp.shape[-1:]
        normed = F.layer_norm(inp, width, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return super().forward(normed)


TE = SimpleNamespace(Linear=FakeLinear, LayerNorm=FakeNorm, LayerNormLinear=FakeLayerNormLinear)


def convert(model, fuse=False, **rules):
    find_obstacle = lambda module: te_obstacle(module, 16)  # noqa: E731
    report = convert_layers(
        model, TE, 16, ConversionRules("x", find_obstacle=find_obstacle, **rules), fuse
    )
    return model, {row.module: row.why for row in report.modules}


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.into = nn.LayerNorm(width, eps=1e-3), nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width, bias=False)
        self.norm2, self.gate = nn.LayerNorm(width), nn.Linear(width, width)
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)

    def forward(self, x):
        x = x + self.out(torch.relu(self.into(self.norm1(x))))
        normed = self.norm2(x)
        return normed * self.gate(normed)


@pytest.mark.parametrize(
    ("into", "out", "multiple", "fits"),
    [
        (16, 16, 16, True),
        (48, 1024, 16, True),
        (8, 16, 16, False),
        (16, 8, 16, False),
        (16, 24, 16, False),
        (48, 64, 32, False),
        (64, 32, 32, True),
    ],
)
def test_widths_are_multiples(into, out, multiple, fits):
    assert (unfit_shape(into, out, multiple) == "") == fits


def test_each_layer_is_converted_or_has_a_reason():
    model = nn.ModuleDict(
        {
            "good": nn.Linear(32, 16),
            "norm": nn.LayerNorm(7),
            "odd": nn.Linear(16, 24),
            "flat": nn.LayerNorm((2, 16)),
            "bare": nn.LayerNorm(16, elementwise_affine=False),
            "biasless": nn.LayerNorm(16, bias=False),
            "mine": nn.Linear(16, 16),
            "wide": nn.Linear(16, 16),
        }
    )
    _, whys = convert(model, ignore=["mine"], islands={"wide"})
    assert whys == {
        "good": "",
        "norm": "",
        "odd": "its shape 16 -> 24 is not in multiples of 16",
        "flat": "normalises over 2 dimensions",
        "bare": "has no weight",
        "biasless": "has no bias",
        "mine": "named by precision.ignore_modules",
        "wide": "kept in float32 by precision.keep_fp32",
    }


def test_norms_alone_are_refused_before_anything_changes():
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 3))
    with pytest.raises(ConfigError, match=r"would convert nothing.*16 -> 3 is not in multiples"):
        convert(model)
    assert [type(m) for m in model] == [nn.LayerNorm, nn.Linear]


@pytest.mark.parametrize("fuse", [False, True])
def test_objects_keys_ties_flags_and_hooks_survive(fuse):
    model, seen = nn.Sequential(Block(), nn.Linear(32, 32)), []
    model[1].weight = model[0].gate.weight
    model[1].bias.requires_grad_(False)
    model[0].out.register_forward_hook(lambda *_: seen.append("forward"))
    model[0].into.weight.register_hook(lambda _: seen.append("gradient"))
    model[1].note = "mine"
    plain, before = copy.deepcopy(model), dict(model.named_parameters())
    model.eval()
    model, _ = convert(model, fuse)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[n] is after[n] for n in before)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert model[0].out.bias is None
    assert isinstance(model[0].into, nn.Linear)
    assert isinstance(model[0].norm1, nn.LayerNorm)
    assert (model[1].note, model[1].training) == ("mine", False)
    model(torch.randn(4, 32)).sum().backward()
    assert seen == ["forward", "gradient"]
    assert model[1].bias.grad is None


@pytest.mark.parametrize("shape", [(16, 32), (5, 32), (2, 3, 32), (32,), (2, 8, 32)])
def test_any_number_of_rows(shape):
    model, _ = convert(nn.Linear(32, 16))
    x = torch.randn(shape)
    torch.testing.assert_close(model(input=x), F.linear(x, model.weight, model.bias))
    whole = shape[:-1] in ((16,), (2, 8))
    assert model.seen == [shape if whole else (16, 32)]
    assert pad_rows is te_layers.pad_rows


# Fusing.
@pytest.mark.parametrize("shape", [(16, 32), (3, 5, 32)])
def test_fused_computes_what_unfused_does(shape):
    model = nn.Sequential(Block(), nn.LayerNorm(32), nn.Linear(32, 16))
    x, results = torch.randn(shape), []
    for fuse in (False, True):
        made, whys = convert(copy.deepcopy(model), fuse)
        out = made(x)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in made.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert whys == {
        "0.norm1": "computed in 0.into",
        "0.into": "computes 0.norm1 too",
        "0.out": "",
        "0.norm2": "not fused: its output is not for one converted linear layer alone",
        "0.gate": "",
        "1": "computed in 2",
        "2": "computes 1 too",
    }
    twin = copy.deepcopy(made)
    twin[1].weight.data.zero_()  # its norm is its own
    assert torch.equal(made(x), results[1][0])
    assert not torch.equal(twin(x), results[1][0])


def pairs(model, **changes):
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)]
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return find_pairs(model, **{"norms": norms, "linears": linears, **changes})


def of(forward, **parts):
    kind = type("Made", (nn.Module,), {"forward": forward})
    model = kind()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def two(forward):
    return of(forward, norm=nn.LayerNorm(4), lin=nn.Linear(4, 4), other=nn.LayerNorm(4))


def test_pairs_are_found_through_lists_and_dropout_stops_them():
    forward = lambda self, x: self.parts[1](self.parts[0](x))  # noqa: E731
    parts = nn.ModuleList([nn.LayerNorm(4), nn.Linear(4, 4)])
    assert pairs(nn.Sequential(of(forward, parts=parts)))[0] == {"0.parts.0": "0.parts.1"}
    assert pairs(nn.Sequential(nn.LayerNorm(4), nn.Dropout(), nn.Linear(4, 4)))[0] == {}
    assert pairs(nn.LayerNorm(4), norms=["(model)"])[0] == {}


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda self, x: self.lin(self.norm(x)) + self.norm(x), "it is called 2 times"),
        (lambda self, x: self.lin(self.norm(x)) + self.lin(x), "alone"),
        (lambda self, x: self.lin(self.norm(x) + 1), "alone"),
        (lambda self, x: (self.lin(n := self.norm(x)), n), "alone"),
        (lambda self, x: self.lin(input=self.norm(x)), "lin takes more than its output"),
        (lambda self, x: self.lin(self.norm(x)) if x.sum() > 0 else x, "cannot be traced"),
        (lambda self, x: self.lin(x), "it is called 0 times"),
    ],
)
def test_norms_without_exactly_one_linear_layer_are_not_paired(forward, why):
    found, whys = pairs(two(forward))
    assert found == {}
    assert whys["norm"].endswith(why) or why in whys["norm"]


def test_tracing_does_not_change_the_model():
    def forward(self, x):
        self.count = self.count + 1
        self.saved_input = x
        torch.rand(1)
        return self.lin(self.norm(x))

    model = two(forward)
    model.count, before = 0, torch.get_rng_state()
    assert pairs(model)[0] == {"norm": "lin"}
    assert (model.count, hasattr(model, "saved_input")) == (0, False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("what", ["norm", "lin"])
def test_layers_with_hooks_or_second_names_are_not_fused(what):
    model = two(lambda self, x: self.lin(self.norm(x)))
    model.alias = getattr(model, what)
    assert pairs(model, norms=["norm"])[0] == {}
    model = two(lambda self, x: self.lin(self.norm(x)))
    getattr(model, what).register_forward_hook(lambda *_: None)
    assert pairs(model)[1]["norm"] == "not fused: it or its linear layer has hooks or two names"
    assert pairs(model, linears=[])[0] == {}


def test_a_call_of_a_fused_layer_without_its_norm_raises():
    outer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    model, _ = convert(outer, fuse=True)
    x = torch.randn(2, 16)
    with pytest.raises(RuntimeError, match=r"without its norm.*precision\.fuse=false"):
        model[1](x)
    model(x)
    model[0](x)
    with pytest.raises(RuntimeError, match="called twice in a row"):
        model(x)


def test_a_history_changes_its_length():
    history = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None]
    assert _resized_history(history, 4).flatten().tolist() == [0, 1, 2, 3]
    assert _resized_history(history, 3).flatten().tolist() == [0, 2, 3]
    assert _resized_history(history, 6).flatten().tolist() == [0, 0, 0, 1, 2, 3]
    assert _resized_history(history, 1).flatten().tolist() == [0]
    assert _resized_history(history[:1], 3).flatten().tolist() == [0, 0, 0]


# The library itself. It can be imported and its layers can be made without a GPU where torch is
# patched to report one; they cannot compute.
@pytest.fixture
def te(monkeypatch):
    pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")
    from transformer_engine.pytorch import quantization

    make = quantization.RecipeState.create
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quantization, "_FP8_SUPPORT", (True, ""))
    monkeypatch.setattr(
        quantization.RecipeState,
        "create",
        staticmethod(lambda recipe, **k: make(recipe, **{**k, "device": CPU})),
    )
    monkeypatch.setattr(
        quantization.FP8GlobalStateManager, "quantization_state", quantization.FP8GlobalState()
    )
    return quantization


def first_forward(precision, *layers):
    """What a forward does with the state."""
    with torch.no_grad(), precision._autocast():
        for layer in layers:
            layer.init_fp8_metadata(num_gemms=1)


def trained(precision):
    """Two layers with made-up FP8 state, and one that has not been called."""
    model, _ = precision.convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    first_forward(precision, model[0], model[1])
    for i, layer in enumerate(list(model)[:2]):
        for key in ("scaling_fwd", "scaling_bwd"):
            state = layer.fp8_meta[key]
            state.scale.copy_(torch.arange(len(state.scale)) + 2.0 + i)
            state.amax_history[-1] = 7.0 + i
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("te")
def test_the_library_takes_every_recipe_and_fills_none_from_the_environment(name):
    precision = registry.load_precision(name)
    made = precision._recipe
    assert type(made).__name__ == precision.kind.recipe
    assert precision._recipe is made
    for key, value in precision.recipe.items():
        if key == "format":
            assert made.fp8_format.name == value
        elif key != "kind":
            assert getattr(made, key) == value


@pytest.mark.usefixtures("te")
def test_power_of_two_scales_reach_what_the_library_reads():
    parts = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    for kind, key, wanted in (
        ("current", "use_power_2_scales", {False: False, True: True}),
        ("block", "use_f32_scales", {False: True, True: False}),
    ):
        for value, power_2 in wanted.items():
            made = te_recipes.build_recipe({"kind": kind, key: value})
            assert [getattr(made, part).power_2_scale for part in parts] == [power_2] * 3


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("te")
def test_the_librarys_layers_hold_the_plain_models_parameters(name, fuse):
    model = nn.Sequential(Block(64), nn.Linear(64, 3))
    plain, before = copy.deepcopy(model), dict(model.named_parameters())
    precision = registry.load_precision(name, fuse=fuse, keep_fp32=["0.out"])
    model, report = precision.convert(model)
    assert all(before[n] is p for n, p in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    whys = {row.module: row.why for row in report.modules}
    assert whys["0.out"] == "kept in float32 by precision.keep_fp32"
    assert model[0].out.weight.dtype is torch.float32
    assert {p.dtype for n, p in before.items() if n != "0.out.weight"} == {precision.storage}
    kinds = [type(m).__name__ for m in model[0].children()]
    first = ["PostponedLayerNorm", "TELayerNormLinear"] if fuse else ["TELayerNorm", "TELinear"]
    assert kinds == [*first, "Float32Linear", "TELayerNorm", "TELinear"]
    assert model[0].into.in_features == 64
    twin = copy.deepcopy(model)
    if fuse:
        assert twin[0].into.layer_norm_weight is twin[0].norm1.weight
        assert "norm1.weight" not in dict(twin[0].into.named_parameters())
    with pytest.raises(ConfigError, match="is a TELinear already"):
        registry.load_precision(name).convert(nn.Sequential(model[0].gate))


@pytest.mark.usefixtures("te")
def test_fp8_state_survives_a_resume_without_a_pickle(tmp_path):
    precision = registry.load_precision(DELAYED)
    model = trained(precision)
    state = precision.state_dict(model)
    assert set(state) == {"0", "1"}
    torch.save(state, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh, _ = precision.convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))))
    assert precision.state_dict(fresh) == {}
    precision.load_state_dict(fresh, saved)
    first_forward(precision, *fresh)
    again = precision.state_dict(fresh)
    assert all(torch.equal(again[n][k], v) for n in saved for k, v in saved[n].items())
    assert again["2"]["forward_scale"].tolist() == [1, 1, 1]
    for key in ("scaling_fwd", "scaling_bwd"):  # what the kernels read is what was restored
        quantizer, held = fresh[0].quantizers[key][0], fresh[0].fp8_meta[key]
        assert quantizer.scale.data_ptr() == held.scale.data_ptr()
        assert quantizer.amax.data_ptr() == held.amax_history.data_ptr()
    precision.load_state_dict(fresh, {})
    other = registry.load_precision("transformer-engine-current")
    other.load_state_dict(fresh, saved)
    assert other.state_dict(fresh) == other.gauges(fresh) == {}


@pytest.mark.usefixtures("te")
def test_a_resume_with_another_history_keeps_the_latest():
    model = trained(registry.load_precision(DELAYED))
    for length, last in ((4, 7.0), (1, 0.0)):
        precision = registry.load_precision(
            DELAYED, recipe={"kind": "delayed", "amax_history_len": length}
        )
        fresh, _ = precision.convert(nn.Sequential(nn.Linear(32, 32)))
        precision.load_state_dict(fresh, registry.load_precision(DELAYED).state_dict(model))
        history = precision.state_dict(fresh)["0"]["forward_amax_history"]
        assert (len(history), history[-1, 0].item()) == (length, last)


@pytest.mark.usefixtures("te")
def test_gauges_are_the_inputs_latest_amax_and_scale():
    precision = registry.load_precision(DELAYED)
    gauges = precision.gauges(trained(precision))
    assert {key: value.item() for key, value in gauges.items()} == {
        "fp8/amax/0": 7.0,
        "fp8/scale/0": 2.0,
        "fp8/amax/1": 8.0,
        "fp8/scale/1": 3.0,
    }
    recipe = {"kind": "delayed", "amax_history_len": 1, "margin": 1}
    precision = registry.load_precision(DELAYED, recipe=recipe)
    gauges = precision.gauges(trained(precision))
    assert gauges["fp8/amax/0"].item() == 448 / 2 / 2.0


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.usefixtures("te")
def test_an_evaluation_leaves_the_scales(update):
    precision = registry.load_precision(DELAYED, update_in_eval=update)
    model = trained(precision)
    before = precision.state_dict(model)
    with precision.eval_context(model):
        first_forward(precision, *model)
        for layer in model:
            layer.fp8_meta["scaling_fwd"].amax_history[0] = 99.0
    after = precision.state_dict(model)
    unchanged = all(torch.equal(after[n][k], v) for n in before for k, v in before[n].items())
    assert unchanged == (not update)
    assert (after["2"]["forward_amax_history"].max().item() == 0.0) == (not update)


def test_a_run_updates_its_own_scales_only(te):
    manager, precision = te.FP8GlobalStateManager, registry.load_precision(DELAYED)
    model = trained(precision)
    for layer in model:
        layer.fp8_meta["recipe"] = precision._recipe
    manager.add_fp8_tensors_to_global_buffer(model[0].fp8_meta)
    outer = manager.quantization_state
    assert outer.global_amax_buffer
    with precision.session(model, CUDA):
        assert not manager.quantization_state.global_amax_buffer
        manager.add_fp8_tensors_to_global_buffer(model[0].fp8_meta)  # into the new list
        assert manager.quantization_state.global_amax_buffer
    assert manager.quantization_state is outer
    session = precision.session(model, CUDA)
    session.__enter__()
    assert manager.quantization_state is not outer
    assert not session.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert manager.quantization_state is outer


def test_the_forward_context_on_a_gpu_serves_again(te):
    precision = registry.load_precision(DELAYED)
    for _ in range(2):
        with torch.no_grad(), precision.forward(CUDA):
            assert te.FP8GlobalStateManager.is_fp8_enabled()
            assert torch.get_default_dtype() is torch.bfloat16
        assert not te.FP8GlobalStateManager.is_fp8_enabled()
        assert torch.get_default_dtype() is torch.float32
