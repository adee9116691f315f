"""A model through its life: built, converted and adapted, saved, and restored in any precision."""

from dataclasses import replace

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from states import CPU
from torch import nn
from torch.nn import functional as F

from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec
from runner.core.loop.train_state import TrainState
from runner.core.record import checkpoint_file
from runner.core.record.checkpoint_file import LoadedCheckpoint
from runner.precision import registry
from runner.training.adapters import Lora
from runner.training.model import ModelBuilder, restore_precision_state, restoring_builder
from runner.training.setup import build_scheduled_optimizers
from runner.training.state_dict import checkpoint_state_dict
from runner.training.tasks.classification import Classification

PACKED = ("bnb-nf4", "bnb-nf4-dq", "bnb-fp4", "bnb-fp4-dq", "bnb-int8")
LORA = {"_target_": "runner.training.adapters.Lora", "rank": 2, "alpha": 8.0}
ADAPTERS = pytest.mark.parametrize("node", [{}, LORA], ids=["plain", "lora"])


class Net(nn.Module):
    """Widths that blocks of 64 divide, without and with biases, and a norm where asked for."""

    def __init__(self, width=64, bias=True, norm=True):
        super().__init__()
        self.body = nn.Linear(64, width, bias=bias)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, 4, bias=bias)

    def forward(self, x):
        return self.head(self.norm(F.relu(self.body(x))))


class PartlyFrozen(Net):
    """A body that its author froze."""

    def __init__(self):
        super().__init__()
        self.body.requires_grad_(False)


def make_spec(node=None, target="Net", **keywords):
    return RunSpec(
        model={"_target_": f"{__name__}.{target}", **keywords},
        adapter=node or {},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
        scheduler={"_target_": None},
    )


def build(name, spec, seed=0, **changes):
    torch.manual_seed(seed)
    precision = registry.load_precision(name, **changes)
    return ModelBuilder(spec, precision).build(CPU), precision


def train_and_save(folder, name, spec, **changes):
    """(a model whose trainable numbers have moved, its precision, its checkpoint)."""
    (model, *_), precision = build(name, spec, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape) / 8).to(parameter.dtype))
    state = TrainState(model, precision, Classification(), precision.scale(CPU), [], CPU)
    path = checkpoint_file.save(folder, checkpoint_state_dict(state, spec), keep=1)
    return model.eval(), precision, LoadedCheckpoint(path, checkpoint_file.load(path))


def edit_weights(saved, edit):
    """The checkpoint with a change to its weights."""
    weights = dict(saved.content["model"])
    edit(weights)
    return LoadedCheckpoint(saved.path, {**saved.content, "model": weights})


def restore(name, spec, saved, **changes):
    torch.manual_seed(99)  # the weights must come from the checkpoint
    precision = registry.load_precision(name, **changes)
    built = restoring_builder(spec, precision, saved).build(CPU)
    built.model.eval()
    return built, precision


@torch.no_grad()
def outputs(model, precision):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    with precision.session(model, CPU), precision.forward(CPU):
        return model(precision.cast(x)).float()


def stands_for(weights, key):
    """The float32 weight that a state dict's packed one stands for, by the library's own code."""
    value = weights[key]
    if value.dtype is torch.int8:
        return value.float() * weights[f"{key.removesuffix('weight')}SCB"][:, None] / 127
    parts = {k.removeprefix(f"{key}."): v for k, v in weights.items() if k.startswith(f"{key}.")}
    return dequantize_4bit(value, QuantState.from_dict(parts, CPU)).float()


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype is value.dtype, key
        assert torch.equal(found[key], value), key


# Building


@pytest.mark.parametrize("name", PACKED)
def test_a_model_that_is_frozen_whole_is_refused_with_what_to_type(name):
    spec = make_spec(bias=False, norm=False)
    built, precision = build(name, spec)
    with pytest.raises(ConfigError) as caught:
        build_scheduled_optimizers(spec, built.model, precision, steps=1)
    (problem,) = caught.value.problems
    parts = (f"={name}", "adapter=lora", "=bnb-int8-training", "precision.ignore_modules=")
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize(
    ("name", "node", "changes", "count"),
    [
        ("bnb-nf4", LORA, {}, 4),
        ("bnb-nf4", {}, {"ignore_modules": ["head"]}, 1),
        ("bnb-nf4", {}, {"keep_fp32": ["head"]}, 1),
        ("bnb-int8-training", {}, {}, 2),
    ],
)
def test_what_the_refusal_names_does_help(name, node, changes, count):
    spec = make_spec(node, bias=False, norm=False)
    built, precision = build(name, spec, **changes)
    (driven,) = build_scheduled_optimizers(spec, built.model, precision, steps=1)
    assert len(driven.params) == count


@pytest.mark.parametrize("name", [*PACKED, "bnb-int8-training"])
def test_every_precision_starts_from_the_same_seeded_weights(name):
    plain = build("32-true", make_spec())[0].model
    converted, _ = build(name, make_spec())
    assert str(converted.report) == "2/2"
    weights = converted.model.state_dict()
    for key in ("body.weight", "head.weight"):
        wanted = plain.get_parameter(key)
        exact = weights[key].dtype is torch.float32
        found = weights[key] if exact else stands_for(weights, key)
        least = wanted.abs().max() * (0 if exact else 0.01 if name == "bnb-int8" else 0.26)
        assert (found - wanted).abs().max() <= least, key
    for key in ("body.bias", "norm.weight", "head.bias"):
        assert torch.equal(weights[key], plain.get_parameter(key)), key


def test_the_plain_size_is_that_before_conversion_and_additions():
    numbers = 64 * 64 + 64 + 2 * 64 + 64 * 4 + 4
    for name, node in (("32-true", {}), ("bf16-true", {}), ("bnb-nf4", {}), ("bnb-nf4", LORA)):
        assert build(name, make_spec(node))[0].plain_bytes == numbers * 4, name


# Restoring in the precision of the training


PLAIN = ("32-true", "64-true", "bf16-true", "16-true", "16-mixed", "bf16-mixed")


def check_restored(folder, name, node, **changes):
    """Check that a precision restores every bit; return what it restored."""
    spec = make_spec(node)
    model, precision, saved = train_and_save(folder, name, spec, **changes)
    restored, _ = restore(name, spec, saved, **changes)
    assert_same(restored.model.state_dict(), model.state_dict())
    assert torch.equal(outputs(restored.model, precision), outputs(model, precision))
    return restored


@ADAPTERS
@pytest.mark.parametrize("name", [*PACKED, "bnb-int8-training", *PLAIN])
def test_the_same_precision_restores_every_bit(tmp_path, name, node):
    check_restored(tmp_path, name, node)


def test_modules_that_were_ignored_in_training_are_ignored_in_the_restored_model(tmp_path):
    restored = check_restored(tmp_path, "bnb-nf4", {}, ignore_modules=["head"])
    assert str(restored.report) == "1/2"


@pytest.mark.parametrize(("name", "takes"), [("32-true", True), ("bf16-mixed", False)])
def test_a_precision_takes_back_its_own_state_only(tmp_path, monkeypatch, name, takes):
    _, _, saved = train_and_save(tmp_path, "32-true", make_spec())
    saved = LoadedCheckpoint(saved.path, {**saved.content, "precision_state": {"seen": 7}})
    taken = []
    precision = registry.load_precision(name)
    monkeypatch.setattr(
        type(precision), "load_state_dict", lambda self, model, state: taken.append(state)
    )
    built = restoring_builder(make_spec(), precision, saved).build(CPU)
    restore_precision_state(built.model, precision, saved)
    assert taken == ([{"seen": 7}] if takes else [])


# Restoring in another


@ADAPTERS
@pytest.mark.parametrize("to", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_come_back_as_the_numbers_they_stand_for(tmp_path, name, to, node):
    spec = make_spec(node)
    _, _, saved = train_and_save(tmp_path, name, spec)
    restored, _ = restore(to, spec, saved)
    assert restored.report.modules == ()
    assert [type(m) for m in restored.model.modules()] == [Net, nn.Linear, nn.LayerNorm, nn.Linear]
    weights = saved.content["model"]
    for layer in ("body", "head"):
        base = f"{layer}.base_layer" if node else layer
        wanted = stands_for(weights, f"{base}.weight")
        if node:
            down, up = (weights[f"{layer}.lora_{x}.default.weight"].double() for x in "AB")
            wanted = (wanted.double() + 4 * up @ down).float()  # alpha / rank = 8 / 2
        found = restored.model.get_submodule(layer)
        torch.testing.assert_close(found.weight.detach(), wanted)
        assert torch.equal(found.bias, weights[f"{base}.bias"])
    assert torch.equal(restored.model.norm.weight, weights["norm.weight"])


def test_a_tuned_model_computes_the_same_packed_and_merged(tmp_path):
    spec = make_spec(LORA)
    model, nf4, saved = train_and_save(tmp_path, "bnb-nf4", spec, compute_dtype="float32")
    wanted = outputs(model, nf4)
    packed, _ = restore("bnb-nf4", spec, saved, compute_dtype="float32")
    assert torch.equal(outputs(packed.model, nf4), wanted)
    merged, float32 = restore("32-true", spec, saved)
    torch.testing.assert_close(outputs(merged.model, float32), wanted, atol=1e-5, rtol=1e-4)
    unmoved = build("bnb-nf4", spec, compute_dtype="float32")[0].model.eval()
    assert (outputs(unmoved, nf4) - wanted).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "to"), [(a, b) for a in ("bnb-nf4", "bnb-int8") for b in PACKED if a != b]
)
def test_packed_weights_are_not_packed_a_second_time_in_another_way(tmp_path, name, to):
    _, _, saved = train_and_save(tmp_path, name, make_spec())
    with pytest.raises(ConfigError) as caught:
        restore(to, make_spec(), saved)
    assert caught.value.exit_status == 2
    for part in (f"packed as {name}", f"precision={to} ", f"Type precision={name}", "bf16-mixed"):
        assert part in str(caught.value)


@ADAPTERS
@pytest.mark.parametrize("name", [*PACKED, "bnb-int8-training"])
def test_float_weights_are_restored_in_every_mode(tmp_path, name, node):
    spec = make_spec(node)
    model, float32, saved = train_and_save(tmp_path, "32-true", spec)
    restored, precision = restore(name, spec, saved)
    assert str(restored.report) == "2/2"
    if node and precision.layout:  # its weights are packed with what the adapter adds
        Lora(rank=2, alpha=8.0).merge(model)
    same, _ = restore("32-true", spec, saved)
    torch.testing.assert_close(outputs(same.model, float32), outputs(model, float32))
    if node and not precision.layout:
        assert_same(restored.model.state_dict(), same.model.state_dict())
        return
    wanted, _ = precision.convert(model)
    assert_same(restored.model.state_dict(), wanted.state_dict())


@pytest.mark.parametrize("to", ["64-true", "bf16-true", "16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["32-true", "bf16-true"])
def test_an_adapter_stays_one_between_precisions_that_pack_nothing(tmp_path, name, to):
    spec = make_spec(LORA)
    _, _, saved = train_and_save(tmp_path, name, spec)
    restored, precision = restore(to, spec, saved)
    weights = restored.model.state_dict()
    assert weights.keys() == saved.content["model"].keys()
    for key, value in saved.content["model"].items():
        assert torch.equal(weights[key], value.to(precision.storage)), key


def test_a_trained_model_is_tuned_from_its_packed_weights(tmp_path):
    """What init.weights does: the start is the trained model, and fresh additions do nothing."""
    _, _, saved = train_and_save(tmp_path, "32-true", make_spec())
    torch.manual_seed(5)
    precision = registry.load_precision("bnb-nf4")
    tuned = ModelBuilder(make_spec(LORA), precision, start=saved).build(CPU).model.eval()
    packed, _ = restore("bnb-nf4", make_spec(), saved)
    assert torch.equal(outputs(tuned, precision), outputs(packed.model, precision))
    assert {n for n, p in tuned.named_parameters() if p.requires_grad} == {
        f"{layer}.lora_{x}.default.weight" for layer in ("body", "head") for x in "AB"
    }


def test_what_the_models_author_froze_is_frozen_after_a_merge(tmp_path):
    spec = make_spec(LORA, target="PartlyFrozen")
    _, _, saved = train_and_save(tmp_path, "32-true", spec)
    float32 = registry.load_precision("32-true")
    built = ModelBuilder(replace(spec, adapter={}), float32, start=saved).build(CPU)
    trains = {name for name, p in built.model.named_parameters() if p.requires_grad}
    assert trains == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


# Refusals


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("32-true", "32-true"),
        ("32-true", "bnb-nf4"),
        ("bnb-nf4", "bnb-nf4"),
        ("bnb-nf4", "bf16-mixed"),
        ("bnb-int8", "bnb-int8"),
        ("bnb-int8", "32-true"),
    ],
)
@pytest.mark.parametrize(
    ("other", "what"), [({"width": 32}, "shape"), ({"norm": False}, r"norm\.weight")]
)
def test_weights_of_another_model_are_refused(tmp_path, name, to, other, what):
    _, _, saved = train_and_save(tmp_path, name, make_spec())
    with pytest.raises(ConfigError, match=rf"checkpoint=.* does not fit the model: .*{what}"):
        restore(to, make_spec(**other), saved)


@pytest.mark.parametrize(("name", "scale"), [("bnb-nf4-dq", "weight.absmax"), ("bnb-int8", "SCB")])
@pytest.mark.parametrize("to", ["", "32-true"], ids=["packed", "plain"])
def test_a_packed_weight_without_one_of_its_scales_is_refused(tmp_path, name, scale, to):
    _, _, saved = train_and_save(tmp_path, name, make_spec())
    broken = edit_weights(saved, lambda weights: weights.pop(f"body.{scale}"))
    with pytest.raises(ConfigError, match=r"does not fit the model: .*body\.(weight|SCB)"):
        restore(to or name, make_spec(), broken)
    restore(to or name, make_spec(), saved)
    if not to:  # a layer that is not converted takes no packed weight
        with pytest.raises(ConfigError, match=r"does not fit the model: .*head\."):
            restore(name, make_spec(), saved, ignore_modules=["head"])


def test_a_packed_checkpoint_needs_its_own_adapter(tmp_path):
    _, _, saved = train_and_save(tmp_path, "bnb-nf4", make_spec(LORA))
    with pytest.raises(ConfigError, match=r"Type precision=bnb-nf4 with the adapter that it was"):
        restore("bnb-nf4", make_spec({}), saved)


@pytest.mark.parametrize("adapter", [{}, LORA])
def test_a_packed_run_resumes_from_its_own_weights(tmp_path, adapter):
    model, _, saved = train_and_save(tmp_path, "bnb-nf4", make_spec(adapter))
    built = ModelBuilder(make_spec(adapter), registry.load_precision("bnb-nf4"), start=saved).build(
        CPU
    )
    before, after = model.state_dict(), built.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_float64_weights_start_another_run_as_they_are(tmp_path):
    model, _, saved = train_and_save(tmp_path, "64-true", make_spec())
    built = ModelBuilder(make_spec(), registry.load_precision("64-true"), start=saved).build(CPU)
    assert_same(built.model.state_dict(), model.state_dict())
