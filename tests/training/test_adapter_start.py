"""DoRA, rsLoRA and start values of additions: as peft's, in every precision; what is refused."""

import peft
import pytest
import torch
from adapted_nets import Net, built, outputs, shake
from torch import nn

from runner.core.base.errors import ConfigError
from runner.precision import registry
from runner.training.adapters import CHANGES_BASE, INITS, Lora

RANK = 2
LORA = {"_target_": "runner.training.adapters.Lora", "rank": RANK, "alpha": 8.0}
LAYERS = ["layers.0", "layers.1", "head"]
PLAIN = ("64-true", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
PACKED = ("bnb-nf4", "bnb-nf4-dq", "bnb-fp4", "bnb-int8")
CONVERTED = ("bnb-int8-training", "float8-rowwise", "transformer-engine-current")
VARIANTS = [
    {"use_dora": True},
    {"use_rslora": True},
    {"use_dora": True, "use_rslora": True},
    {"init": "gaussian"},
    {"init": "gaussian", "use_dora": True},
]
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))


def seeded(seed=0):
    torch.manual_seed(seed)
    return Net()


def by_peft(init=True, **variant):
    """The same net with the same adapter, by peft alone."""
    model = seeded()
    usual = {"r": RANK, "lora_alpha": 8, "target_modules": LAYERS}
    config = peft.LoraConfig(**usual, init_lora_weights=init, **variant)
    peft.inject_adapter_in_model(config, model)
    return model


def by_runner(**variant):
    model = seeded()
    Lora(rank=RANK, alpha=8.0, **variant).add(model, torch.float32)
    return model


def step(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    model(X).square().sum().backward()
    optimizer.step()


def addition(model, name):
    """A layer of peft, and the product of its addition in float64."""
    layer = model.get_submodule(name)
    up, down = layer.lora_B["default"].weight.double(), layer.lora_A["default"].weight.double()
    return layer, layer.scaling["default"] * up @ down


# As peft's


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_forward_and_step_are_those_of_peft_by_hand(variant):
    words = {key: value for key, value in variant.items() if key != "init"}
    theirs, ours = by_peft(variant.get("init", True), **words), by_runner(**variant)
    for _ in range(2):
        assert torch.equal(ours(X), theirs(X))
        step(ours)
        step(theirs)
    state = theirs.state_dict()
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in ours.state_dict().items())


@pytest.mark.parametrize("words", [{}, {"use_dora": True}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_from_the_base_is_that_of_peft_by_hand(init, words):
    theirs, ours = by_peft(init, **words), by_runner(init=init, **words)
    torch.testing.assert_close(ours(X), theirs(X), rtol=1e-5, atol=1e-5)
    state = ours.state_dict()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16"])
def test_pissa_starts_with_the_largest_singular_vectors(init):
    base, model = seeded(), by_runner(init=init)
    assert (model(X) - base(X)).abs().max() < 1e-5
    for name in LAYERS:
        weight = base.get_submodule(name).weight.detach().double()
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        layer, found = addition(model, name)
        rest = (weight - found).norm() / values[RANK:].norm()
        assert rest < (1 + 1e-6 if init == "pissa" else 1.1)
        if init == "pissa":
            # Each row of A is a right singular vector times the root of its value, and so on.
            down = layer.lora_A["default"].weight.double()
            up = layer.lora_B["default"].weight.double()
            roots = (values[:RANK] / 4).sqrt()
            along = [(down * right[:RANK]).sum(1).abs(), (up * left[:, :RANK]).sum(0).abs()]
            for length in (*along, down.norm(dim=1), up.norm(dim=0)):
                torch.testing.assert_close(length, roots, rtol=1e-5, atol=1e-6)


# In every precision


def converted(name, node):
    if not name.startswith(("float8", "torchao-", "transformer")):
        return built(name, node)
    precision = registry.load_precision(name, emulate=True)
    model, _ = precision.convert(seeded())
    if node:
        words = {key: value for key, value in node.items() if key != "_target_"}
        Lora(modules=["layers"], **words).add(model, precision.storage)
    return model, precision, None


@pytest.mark.parametrize(
    ("name", "dora"),
    [
        *((name, True) for name in (*PLAIN, *CONVERTED)),
        *((name, False) for name in ("32-true", "16-mixed", *PACKED)),
    ],
)
def test_an_adapter_leaves_the_function_as_it_was(name, dora):
    plain, precision, _ = converted(name, {})
    model, _, _ = converted(name, {**LORA, "use_dora": dora})
    assert torch.equal(outputs(model, precision), outputs(plain, precision))


def distance(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


STARTS = [(init, dora) for init in CHANGES_BASE for dora in (False, True)]
STARTED = [
    # Each precision with two of the six starts, and each start in three of the nine precisions.
    pytest.param(name, *start, marks=[pytest.mark.extended] * ((i - j) % 3 != 0))
    for i, name in enumerate((*PLAIN, *CONVERTED))
    for j, start in enumerate(STARTS)
]


@pytest.mark.parametrize(("name", "init", "dora"), STARTED)
def test_a_start_from_the_base_leaves_the_function_up_to_rounding(name, init, dora):
    plain, precision, _ = converted(name, {})
    model, _, _ = converted(name, {**LORA, "init": init, "use_dora": dora})
    exact = seeded().double()(X.double())
    limits = {"64-true": 1e-12, "32-true": 1e-5}
    # About as far from the exact outputs as the precision is without an adapter.
    limit = limits.get(name) or 4 * distance(outputs(plain, precision), exact)
    assert distance(outputs(model, precision), exact) < limit
    assert name not in limits or distance(outputs(plain, precision), exact) < 1e-6


@pytest.mark.parametrize("name", [*PACKED, "bnb-fp4-dq"])
def test_loftq_starts_as_the_best_addition_for_what_the_packing_rounds_away(name):
    base = seeded()
    packed, _, _ = built(name, {})
    model, precision, _ = built(name, {**LORA, "init": "loftq"})
    for part in LAYERS:
        codes = packed.get_submodule(part)
        assert torch.equal(model.get_submodule(part).get_base_layer().codes, codes.codes)
        error = base.get_submodule(part).weight.detach() - codes.unpacked_weight()
        left, values, right = torch.linalg.svd(error.double(), full_matrices=False)
        nearest = left[:, :RANK] * values[:RANK] @ right[:RANK]
        _, found = addition(model, part)
        assert (found - nearest).norm() / nearest.norm() < 1e-3
    x = X.double()
    with torch.no_grad():
        wanted = base.double()(x)
        errors = [(outputs(m, precision).double() - wanted).norm() for m in (model, packed)]
    # bfloat16 products hide the gain of int8 in a net this small.
    assert name == "bnb-int8" or errors[0] < errors[1]


def test_loftq_leaves_layers_that_are_not_packed_with_an_addition_of_zero():
    precision = registry.load_precision("bnb-nf4", ignore_modules=["head"])
    model = seeded()
    lora = Lora(rank=RANK, init="loftq")
    lora.read_plain_weights(model)
    precision.convert(model)
    lora.add(model, torch.float32)
    assert not addition(model, "head")[1].any()
    assert addition(model, "layers.0")[1].any()


# Training


def test_the_start_is_kept_frozen_beside_the_addition():
    model = by_runner(init="pissa")
    start = {name: p for name, p in model.named_parameters() if ".start_" in name}
    assert [*start] == [f"{layer}.start_{part}" for layer in LAYERS for part in "AB"]
    assert not any(p.requires_grad for p in start.values())
    shake(model)
    layer, _ = addition(model, "head")
    assert not torch.equal(layer.start_A, layer.lora_A["default"].weight)


def test_for_a_checkpoint_nothing_is_computed_and_the_names_are_the_same(monkeypatch):
    wanted = by_runner(init="pissa", use_dora=True)
    monkeypatch.setattr(torch.linalg, "svd", None)
    model = seeded(1)
    base = model.head.weight.detach().clone()
    Lora(rank=RANK, alpha=8.0, init="pissa", use_dora=True).add_for_checkpoint(model, torch.float32)
    assert torch.equal(model.head.get_base_layer().weight, base)
    model.load_state_dict(wanted.state_dict())
    assert torch.equal(model(X), wanted(X))


# Refusals


@pytest.mark.parametrize(
    ("name", "init", "message"),
    [
        ("bnb-nf4", "pissa", "init=pissa .*precision=bnb-nf4 packs .*Type adapter.init=loftq"),
        ("bnb-int8", "olora", "init=olora .*precision=bnb-int8 packs .*Allowed here: default, ga"),
        ("32-true", "loftq", "init=loftq .*precision=32-true packs no.*Type adapter.init=pissa"),
        ("bnb-int8-training", "loftq", "init=loftq .*packs no weights"),
    ],
)
def test_a_start_that_the_precision_cannot_have_is_refused(name, init, message):
    with pytest.raises(ConfigError, match=message):
        Lora(init=init).check_precision(registry.load_precision(name))


def test_every_other_start_is_allowed():
    plain = ("default", "gaussian", *CHANGES_BASE)
    packed = ("default", "gaussian", "loftq")
    for name, allowed in (("bf16-mixed", plain), ("float8-rowwise", plain), ("bnb-fp4", packed)):
        for init in allowed:
            Lora(init=init).check_precision(registry.load_precision(name))


def test_an_unknown_start_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        Lora(init="pisa", rank=0)
    assert [p.split(".")[1].split("=")[0] for p in caught.value.problems] == ["rank", "init"]
    assert ", ".join(INITS) in caught.value.problems[1]


@pytest.mark.parametrize("init", [*CHANGES_BASE, "loftq"])
def test_a_rank_above_the_number_of_singular_vectors_is_refused_before_anything_changes(init):
    model = seeded()
    lora = Lora(rank=4, init=init)
    with pytest.raises(ConfigError, match=rf"init={init} takes 4 .*of head, 64 -> 3, has 3\. Type"):
        lora.read_plain_weights(model) if init == "loftq" else lora.add(model, torch.float32)
    assert type(model.head) is nn.Linear
    assert model.head.weight.requires_grad


def test_rows_of_zeros_are_refused_for_dora():
    model = seeded()
    model.head.weight.data[1] = 0
    with pytest.raises(ConfigError, match=r"head has rows of zeros.*adapter\.train=\[head\]"):
        Lora(use_dora=True).add(model, torch.float32)
    assert type(model.head) is nn.Linear
    Lora(use_dora=True, modules=["layers"], train=["head"]).add(model, torch.float32)
    assert model(X).isfinite().all()


@pytest.mark.parametrize("name", PACKED)
def test_dora_of_packed_weights_is_refused_before_anything_changes(name):
    precision = registry.load_precision(name, ignore_modules=["head"])
    model, _ = precision.convert(seeded())
    message = r"that of layers\.0 is packed.*Type adapter\.use_dora=false, or .*=bf16-true\."
    with pytest.raises(ConfigError, match=message):
        Lora(use_dora=True).add(model, torch.float32)
    assert model.head.weight.requires_grad
    Lora(use_dora=True, modules=["head"]).add(model, torch.float32)
    assert hasattr(model.head, "lora_magnitude_vector")


def test_dora_of_a_layer_of_transformer_engine_is_refused():
    class Linear(nn.Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

    with pytest.raises(ConfigError, match=r"no DoRA for TransformerEngine's layers, of which 0 is"):
        Lora(use_dora=True).add(nn.Sequential(Linear(4, 4)), torch.float32)


def test_on_the_meta_device_the_shapes_are_those_of_the_run():
    wanted = by_runner(init="pissa", use_dora=True)
    with torch.device("meta"):
        model = Net()
    Lora(rank=RANK, alpha=8.0, init="pissa", use_dora=True).add(model, torch.float32)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes == {name: p.shape for name, p in wanted.named_parameters()}
    assert all(p.is_meta for p in model.parameters())
