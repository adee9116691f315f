"""Low-rank additions: where they go, what trains, and what remains after they are merged."""

import copy

import pytest
import torch
from adapted_nets import ADDITIONS, Net, adapted, built, outputs, shake
from states import CPU
from torch import nn

from runner.core.base.errors import ConfigError, Unavailable
from runner.precision import registry
from runner.precision.layers.te_layers import FusedNormLinear
from runner.training import adapters
from runner.training.adapters import Lora
from runner.training.model import build_adapter
from runner.training.setup import build_scheduled_optimizers

PARTS = ("weight", "bias")
LORA = {"_target_": "runner.training.adapters.Lora", "rank": 2, "alpha": 8.0}
DORA = {**LORA, "use_dora": True}
PRECISIONS = ("32-true", "bf16-true", "16-mixed", "bnb-nf4", "bnb-int8")


class Tied(nn.Module):
    """A head that shares its weight with the embedding, and an attention."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        return self.head(self.body(self.attention(x, x, x)[0]))


class Names(nn.Module):
    """Layers whose names are like others' when read as a regular expression."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))
        self.layersx1 = nn.Linear(2, 2)
        self.outer = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))})
        for name in ("a+b", "aab", "(c|d)", "c"):
            self.add_module(name, nn.Linear(2, 2))


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def additions(*names):
    return {f"{name}.{part}" for name in names for part in ADDITIONS}


# Where the additions go


def sharing():
    """Two layers that share a bias, a layer of two names, and one of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    model.first = model.second = nn.Linear(4, 4)
    return model


@pytest.mark.parametrize(
    ("make", "patterns", "names"),
    [
        (Net, None, ["layers.0", "layers.1", "head"]),
        (Tied, None, ["body"]),  # neither a tied head nor the projection of an attention
        (sharing, None, ["2"]),
        (Names, ["layers.1"], ["layers.1"]),
        (Names, ["layers.1*"], ["layers.1", "layers.10", "layers.11"]),
        (Names, ["a+b"], ["a+b"]),
        (Names, ["(c|d)"], ["(c|d)"]),
        (Names, ["outer", "aab"], ["outer.layers.0", "outer.layers.1", "aab"]),
        (Names, ["*.layers.1"], ["layers.1", "outer.layers.1"]),
    ],
)
def test_chosen_linear_layers_get_an_addition_and_nothing_else_trains(make, patterns, names):
    model = make()
    Lora(rank=3, modules=patterns).add(model, torch.float32)
    assert adapted(model) == names
    assert trainable(model) == additions(*names)
    for name in names:
        layer = model.get_submodule(name)
        down, up = (layer.get_parameter(part) for part in ADDITIONS)
        assert down.shape == (3, layer.in_features)
        assert up.shape == (layer.out_features, 3)


@pytest.mark.parametrize(
    ("patterns", "more"),
    [
        ([], set()),
        (["norm"], {"norm.weight", "norm.bias"}),
        (["head", "*.0"], {"head.weight", *(f"layers.0.base_layer.{p}" for p in PARTS)}),
    ],
    ids=["none", "a norm", "a head and a part"],
)
def test_named_modules_also_train_in_full(patterns, more):
    model = Net()
    Lora(modules=["layers"], train=patterns).add(model, torch.float32)
    assert trainable(model) == additions("layers.0", "layers.1") | more


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8"])
def test_packed_weights_that_are_named_to_train_are_refused(name):
    plain = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    model, _ = registry.load_precision(name).convert(plain)
    with pytest.raises(ConfigError, match=r"names 0, whose weight is quantised .*modules=\[0\]"):
        Lora(train=["0"]).add(model, torch.float32)
    assert type(model[1]) is nn.LayerNorm


def test_a_norm_inside_a_linear_layer_is_refused():
    class Fused(FusedNormLinear, nn.Linear):
        pass

    with pytest.raises(ConfigError, match=r"Type precision\.fuse=false"):
        Lora().add(nn.Sequential(Fused(8, 8)), torch.float32)


# Refusals


def test_each_value_out_of_range_is_refused_with_its_key():
    edges = {"rank": 1, "alpha": 1e-6, "dropout": 0}
    Lora(**edges).add(Net(), torch.float32)
    for values in ({"rank": 0, "alpha": 0, "dropout": 1}, {"alpha": -2.0, "dropout": -0.1}):
        with pytest.raises(ConfigError) as caught:
            Lora(**{**edges, **values})
        for problem, (key, value) in zip(caught.value.problems, values.items(), strict=True):
            assert problem.startswith(f"adapter.{key}={value} is out of range. Allowed: ")


@pytest.mark.parametrize("key", ["modules", "train"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(key):
    model = Net()
    with pytest.raises(ConfigError, match=rf"adapter\.{key}: layer\.1 matches no .*layers\.1"):
        Lora(**{key: ["layer.1"]}).add(model, torch.float32)
    assert not adapted(model)
    assert len(trainable(model)) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("model", "patterns", "what"),
    [
        (nn.Sequential(nn.Conv1d(1, 1, 1)), None, "the model"),
        (nn.Linear(2, 2), None, "the model"),
        (Net(), ["head", "norm"], r"adapter\.modules=\['norm'\]"),
        (Net(), ["norm"], r"adapter\.modules=\['norm'\]"),
        (Net(), [], r"adapter\.modules=\[\]"),
        (Tied(), ["attention"], r"adapter\.modules=\['attention'\]"),
    ],
)
def test_a_model_with_nothing_to_adapt_is_refused(model, patterns, what):
    before = trainable(model)
    with pytest.raises(ConfigError, match=f"no linear layer of its own in {what}.*adapter=none"):
        Lora(modules=patterns).add(model, torch.float32)
    assert trainable(model) == before


def test_without_peft_it_says_what_to_install(monkeypatch):
    asked = []
    monkeypatch.setattr(adapters, "find_spec", asked.append)  # returns None
    with pytest.raises(Unavailable) as caught:
        Lora()
    assert asked == ["peft"]
    assert "adapter=lora needs peft" in caught.value.what
    assert 'pip install "precision-runner[lora]"' in caught.value.remedy
    assert caught.value.exit_status == 2


def test_the_config_makes_one_with_its_values(compose):
    for node in ({}, {"_target_": None}, compose("model=mlp").adapter):
        assert build_adapter(node) is None
    spec = compose("model=mlp", "adapter=lora", "adapter.rank=3", "adapter.train=[head]")
    made = build_adapter(spec.adapter)
    assert isinstance(made, Lora)
    assert (made.rank, made.alpha, made.dropout, made.modules) == (3, 16.0, 0.0, None)
    assert list(made.train) == ["head"]


# In every precision


@pytest.mark.parametrize(
    ("name", "node"),
    [*((name, LORA) for name in PRECISIONS), ("32-true", DORA), ("16-mixed", DORA)],
)
def test_training_changes_the_additions_only(name, node):
    model, precision, spec = built(name, node)
    (driven,) = build_scheduled_optimizers(spec, model, precision, steps=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first = outputs(model, precision).detach().clone()
    for _ in range(2):
        driven.optimizer.zero_grad()
        outputs(model, precision).float().square().mean().backward()
        driven.optimizer.step()
    after = model.state_dict()
    assert after.keys() == before.keys()
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    layers = ("layers.0", "layers.1", "head")
    magnitudes = {f"{layer}.lora_magnitude_vector.default.weight" for layer in layers}
    assert changed == additions(*layers) | (magnitudes if node is DORA else set())
    assert len(driven.params) == len(changed)
    assert not torch.equal(outputs(model, precision), first)


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_addition_is_scaled_by_alpha_over_rank(name):
    model, precision, _ = built(name, LORA)
    shake(model)
    layer, base = model.head, built(name, {})[0].head
    x = precision.cast(torch.randn(5, 64, generator=torch.Generator().manual_seed(3)))
    down, up = (dict(layer.named_parameters())[part].double() for part in ADDITIONS)
    with torch.no_grad(), precision.session(model, CPU), precision.forward(CPU):
        addition = layer(x).double() - base(x).double()
    wanted = 4 * x.double() @ down.T @ up.T  # alpha / rank = 8 / 2
    error = (addition - wanted).norm() / wanted.norm()
    assert error < (1e-5 if name == "32-true" else 0.03)


def test_dropout_acts_in_training_only():
    model = Net()
    Lora(dropout=0.5).add(model, torch.float32)
    shake(model)
    x = torch.randn(4, 64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


# Merging


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"alpha": 1.0, "rank": 5},
        {"modules": ["layers.1"]},
        {"train": ["head", "norm"]},
        {"dropout": 0.3},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "rank": 3, "init": "pissa"},
        {"init": "olora", "rank": 2},
    ],
    ids=str,
)
def test_a_merged_model_is_plain_and_computes_the_same(keywords):
    model, lora = Net().eval(), Lora(**keywords)
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    keys = list(model.state_dict())
    float32 = registry.load_precision("32-true")
    start = outputs(model, float32)
    lora.add(model, torch.float32)
    shake(model)
    wanted = outputs(model.eval(), float32)
    assert (wanted - start).abs().max() > 0.1
    lora.merge(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == kinds
    assert list(model.state_dict()) == keys
    again = copy.deepcopy(model)
    lora.add(again, torch.float32)  # a merged model can be adapted again
    assert adapted(again)
    torch.testing.assert_close(outputs(model, float32), wanted)


def test_merging_keeps_ties():
    model, lora = Tied().eval(), Lora()
    lora.add(model, torch.float32)
    shake(model)
    tokens = torch.arange(6)[None]
    wanted = model(tokens)
    lora.merge(model)
    assert model.head.weight is model.words.weight
    torch.testing.assert_close(model(tokens), wanted)


def test_additions_are_in_the_dtype_that_is_asked_for():
    """peft would take the compute dtype of a layer of bitsandbytes, in which Adam's eps is 0."""
    precision = registry.load_precision("bnb-nf4", compute_dtype="float16")
    model, _ = precision.convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
    Lora().add(model, precision.storage)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}


def test_a_tied_layer_that_is_named_is_refused():
    model = nn.Module()
    model.table, model.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    model.head.weight = model.table.weight
    with pytest.raises(ConfigError, match="names head, which shares its weight with table: "):
        Lora(modules=["head"]).add(model, torch.float32)
