"""TransformerEngine's precisions. What needs the library is at the end, and skipped without it;
what needs a GPU is in tests/gpu."""

import copy

import pytest
import torch
from precision_models import CPU, CUDA, ResidualBlock
from torch import nn

from runner.precision import registry, te_recipes
from runner.precision.te_recipes import KINDS
from runner.precision.transformer_engine import _resized_history
from runner.utils.errors import ConfigError

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


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_on_a_cpu_only_sets_the_default_dtype(name):
    precision = registry.load_precision(name)
    for _ in range(2):
        with precision.forward(CPU):
            assert torch.get_default_dtype() is precision.storage
    assert precision.cast({"x": torch.ones(1)})["x"].dtype is precision.storage
    assert precision.cast(torch.ones(1).long()).dtype is torch.int64


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
    model = nn.Sequential(ResidualBlock(64), nn.Linear(64, 3))
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
