from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.torch_version import TorchVersion

from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec
from runner.core.config.targets import build_group
from runner.precision import registry
from runner.training import setup
from runner.training.model import ModelBuilder
from runner.training.schedules import build_scheduler
from runner.training.setup import (
    build_optimizer,
    build_scheduled_optimizers,
    parameters_by_optimizer,
)

CPU, META = torch.device("cpu"), torch.device("meta")
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1}
MUON = {
    "matrices": {"_target_": "torch.optim.Muon", "match": "matrices", "lr": 0.02},
    "rest": {"_target_": "torch.optim.AdamW", "match": None, "lr": 0.001},
}
OPTIMIZERS = ("adagrad", "adam", "adamw", "nadam", "rmsprop", "sgd")


def here(name, **keywords):
    """A node whose target is in this file."""
    return {"_target_": f"{__name__}.{name}", **keywords}


class Net(nn.Module):
    made_as: torch.dtype

    def __init__(self, width=4):
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width} is below 1")
        self.words = nn.Embedding(5, width)
        self.body = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)
        type(self).made_as = self.body.weight.dtype
        type(self).made_on = self.body.weight.device

    def forward(self, tokens):
        return self.head(self.norm(self.body(self.words(tokens))))


class Own(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))


NAMES = [name for name, _ in Net().named_parameters()]


def text():
    return "no module"


def spec(**parts):
    usual = RunSpec(model=here("Net"), optimizer=ADAMW, scheduler={"_target_": None})
    return replace(usual, **parts)


def build_optimizers(name="32-true", steps=10, **parts):
    chosen = spec(**parts)
    precision = registry.load_precision(name)
    model = ModelBuilder(chosen, precision).build(CPU).model
    return build_scheduled_optimizers(chosen, model, precision, steps)


# The model


def test_a_model_is_made_in_float32_and_cast():
    for name in ("64-true", "bf16-true", "16-mixed"):
        precision = registry.load_precision(name)
        model = ModelBuilder(spec(), precision).build(CPU).model
        assert Net.made_as is torch.float32
        assert model.body.weight.dtype is precision.storage


@pytest.mark.parametrize("name", ["64-true", "bf16-true", "16-true", "32-true", "bf16-mixed"])
def test_low_memory_makes_it_in_the_dtype_and_on_the_device(name):
    low = replace(spec().init, low_memory=True)
    precision = registry.load_precision(name)
    model = ModelBuilder(spec(init=low), precision).build(META).model
    assert (Net.made_as, Net.made_on.type) == (precision.storage, "meta")
    assert {p.dtype for p in model.parameters()} == {precision.storage}
    assert torch.get_default_dtype() is torch.float32


def test_a_refusal_of_a_target_names_its_group():
    with pytest.raises(ConfigError, match=r"optimizer: torch\.optim\.AdamW refuses.*learning rate"):
        build_optimizers(optimizer={**ADAMW, "lr": -1.0})
    with pytest.raises(ConfigError, match=r"model: .*\.Net refuses its arguments: width=0 is"):
        ModelBuilder(spec(model=here("Net", width=0)), registry.load_precision("32-true")).build(
            CPU
        )
    with pytest.raises(ConfigError, match="unexpected keyword argument 'depth'"):
        build_group("model", here("Net", depth=3))
    with pytest.raises(ConfigError, match=r"text made a str, not a torch\.nn\.Module"):
        ModelBuilder(spec(model=here("text")), registry.load_precision("32-true")).build(CPU)


# Optimizers


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_fused_where_torch_has_it(compose, name, precision):
    node = compose(f"optimizer={name}").optimizer
    (d,) = build_optimizers(precision, optimizer={**node, "lr": 0.1})
    fused = name in ("adagrad", "adam", "adamw", "sgd")
    if not setup._loses_updates(type(d.optimizer), d.params):  # by torch's version
        assert bool(d.optimizer.defaults.get("fused")) == fused
    before = [p.detach().clone() for p in d.params]
    for p in d.params:
        p.grad = torch.full_like(p, 100.0)
    d.optimizer.step()
    assert all((p != old).all() for p, old in zip(d.params, before, strict=True))


def test_a_fused_kernel_that_loses_updates_is_refused_and_not_chosen(monkeypatch):
    monkeypatch.setattr("runner.core.base.tensor_facts.TORCH_VERSION", TorchVersion("2.13.0"))
    node = {"_target_": "torch.optim.SGD", "lr": 0.1}
    (d,) = build_optimizers("bf16-true", optimizer=node)
    assert not d.optimizer.defaults["fused"]
    assert build_optimizers("32-true", optimizer=node)[0].optimizer.defaults["fused"]
    with pytest.raises(ConfigError, match=r"Type optimizer\.fused=false"):
        build_optimizers("bf16-true", optimizer={**node, "fused": True})


@pytest.mark.parametrize("said", [False, True])
def test_what_the_config_says_of_fused_holds(said):
    (d,) = build_optimizers(optimizer={**ADAMW, "fused": said})
    assert d.optimizer.defaults["fused"] is said


def test_a_refused_fused_kernel_leaves_no_trace_in_the_groups():
    divided = {**ADAMW, "foreach": True, "no_decay_on": "norms_and_biases"}
    (d,) = build_optimizers(optimizer=divided)
    assert len(d.optimizer.param_groups) == 2
    for group in d.optimizer.param_groups:
        assert not group["fused"]
        assert group["foreach"] is True


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_parameters_are_not_fused(compose, name):
    """torch refuses them in the first step only."""
    node = compose(f"optimizer={name}").optimizer
    (d,) = build_optimizers(model=here("Wave"), optimizer=node)
    d.params[0].grad = torch.ones(2, dtype=torch.complex64)
    d.optimizer.step()
    assert (d.params[0] != 1).all()


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="no trainable parameter: every one is frozen"):
        build_optimizers(model=here("Frozen"))


def test_frozen_parameters_are_left_out():
    chosen, precision = spec(), registry.load_precision("32-true")
    model = ModelBuilder(chosen, precision).build(CPU).model
    model.words.requires_grad_(False)
    (d,) = build_scheduled_optimizers(chosen, model, precision, 10)
    assert [id(p) for p in d.params] == [id(p) for p in model.parameters()][1:]


def test_lbfgs(compose):
    node = compose("optimizer=lbfgs").optimizer
    with pytest.raises(ConfigError, match="lbfgs evaluates the loss several times"):
        build_optimizers("16-mixed", optimizer=node)
    clipped = replace(spec().train, clip_norm=1.0)
    for bad in (
        {"optimizer": node, "train": clipped},
        {"optimizer": {"a": {**node, "match": ["body"]}, "b": {**ADAMW, "match": None}}},
    ):
        with pytest.raises(ConfigError, match=r"works alone and without train\.clip_norm"):
            build_optimizers(**bad)
    (d,) = build_optimizers("64-true", optimizer=node)
    assert isinstance(d.optimizer, torch.optim.LBFGS)


def split(model, node):
    rows = parameters_by_optimizer(node, model, dict(model.named_parameters()))
    return {key: [*named] for key, _, named in rows}


def test_muon_takes_the_hidden_matrices():
    assert split(Net(), MUON) == {
        "optimizer.matrices": ["body.weight"],
        "optimizer.rest": [name for name in NAMES if name != "body.weight"],
    }
    own = nn.Module()  # it has no linear layer
    own.matrix, own.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    assert split(own, MUON) == {"optimizer.matrices": ["matrix"], "optimizer.rest": ["bias"]}


@pytest.mark.parametrize(
    ("norm", "weight"),
    [
        (parametrizations.weight_norm, "parametrizations.weight.original1"),
        (parametrizations.spectral_norm, "parametrizations.weight.original"),
        (parametrizations.orthogonal, "parametrizations.weight.original"),
        (weight_norm, "weight_v"),
        (spectral_norm, "weight_orig"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the older functions
def test_muon_takes_no_gain_and_no_output_layer_of_normed_layers(norm, weight):
    layers = {"table": nn.EmbeddingBag(5, 8), "body": norm(nn.Linear(8, 8))}
    model = nn.Sequential(OrderedDict(layers, head=norm(nn.Linear(8, 3))))
    assert split(model, MUON)["optimizer.matrices"] == [f"body.{weight}"]


@pytest.mark.parametrize("model", ["mlp", "gpt", "vit"])
def test_muon_and_the_rest_cover_every_parameter_once(compose, model):
    data = "synthetic_tokens" if model == "gpt" else "digits"
    composed = compose(f"model={model}", "optimizer=muon", f"data={data}")
    precision = registry.load_precision("32-true")
    made = ModelBuilder(composed, precision).build(META).model
    named = {n: p for n, p in made.named_parameters() if p.requires_grad}
    split_up = parameters_by_optimizer(composed.optimizer, made, named)
    taken = [id(p) for _, _, params in split_up for p in params.values()]
    assert sorted(taken) == sorted(id(p) for p in named.values())
    shares = {key: params.values() for key, _, params in split_up}
    matrices = shares["optimizer.matrices"]
    assert {p.ndim for p in matrices} == {2}
    linears = [m for m in made.modules() if isinstance(m, nn.Linear)]
    tables = [m for m in made.modules() if isinstance(m, nn.Embedding)]
    assert not {id(p) for p in matrices} & {id(m.weight) for m in (linears[-1], *tables)}


def test_muon_is_refused_where_there_is_no_matrix(compose):
    node = compose("optimizer=muon").optimizer
    with pytest.raises(ConfigError, match=r"matrices\.match=matrices takes no parameter"):
        split(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(4, 2)), node)


def test_optimizers_choose_by_patterns_and_the_first_wins():
    node = {
        "rest": {**ADAMW, "match": None},
        "words": {**ADAMW, "match": "words"},
        "outer": {**ADAMW, "match": ["words", "head", "*.bias"]},
    }
    assert split(Net(), node) == {
        "optimizer.words": ["words.weight"],
        "optimizer.outer": ["body.bias", "norm.bias", "head.weight", "head.bias"],
        "optimizer.rest": ["body.weight", "norm.weight"],
    }


def test_an_optimizer_without_parameters_and_parameters_without_one_are_refused():
    with pytest.raises(ConfigError, match=r"a\.match: tail matches no parameter .*words"):
        split(Net(), {"a": {**ADAMW, "match": ["tail"]}})
    with pytest.raises(ConfigError, match=r"No optimizer takes: words\.weight, .*match: null"):
        split(Net(), {"a": {**ADAMW, "match": ["body", "head"]}})
    with pytest.raises(ConfigError, match="Left for it: none"):
        split(Net(), {"a": {**ADAMW, "match": None}, "b": {**ADAMW, "match": None}})


def test_an_optimizer_of_ones_own_takes_no_fused():
    weights = [nn.Parameter(torch.ones(1))]
    assert build_optimizer("optimizer", here("Own", lr=0.1), weights).defaults["fused"] is None


def test_a_key_outside_of_several_optimizers_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.eps belongs to one of matrices, rest\."):
        split(Net(), {**MUON, "eps": 1e-4})
    with pytest.raises(ConfigError, match=r"Type optimizer\.<name>\.eps=1e-4"):
        build_optimizers("16-true", optimizer=MUON)


# Schedules


@pytest.mark.parametrize(
    ("name", "attribute"),
    [("cosine", "T_max"), ("linear", "total_iters"), ("onecycle", "total_steps")],
)
def test_lengths_are_filled_in(compose, name, attribute):
    node = compose(f"scheduler={name}", "optimizer=sgd").scheduler
    for given, wanted in ((None, 7), (3, 3)):
        (d,) = build_optimizers(scheduler={**node, attribute: given}, steps=7)
        assert getattr(d.scheduler, attribute) == wanted
    (d,) = build_optimizers(scheduler=node, steps=7)
    rates = []
    for _ in range(7):
        rates.append(d.lr)
        d.optimizer.step()
        d.scheduler.step()
    assert rates[-1] < max(rates) / 2


def test_a_constant_rate_has_no_schedule(compose):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert build_scheduler(compose("scheduler=constant").scheduler, optimizer, 5) is None
    assert build_scheduler({}, optimizer, 5) is None


def test_every_optimizer_has_a_schedule_of_its_own(compose):
    node = compose("scheduler=cosine").scheduler
    first, second = build_optimizers(optimizer=MUON, scheduler=node)
    assert first.scheduler.optimizer is first.optimizer
    assert second.scheduler.optimizer is second.optimizer
    assert first.scheduler is not second.scheduler
