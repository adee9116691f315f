"""Additions to layers that compute their weight in each forward, in every way that weights leave or
enter."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import TensorDataset

import runner
from runner.core.base.errors import ConfigError
from runner.precision.layers.derived_weight import current_weight, set_weight
from runner.training.adapters import Lora
from runner.training.pretrained_folder import plain_weights

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


def by(parametrization):
    def change(layer):
        register_parametrization(layer, "weight", parametrization())
        return layer

    return change


def pruned(layer):
    return prune.random_unstructured(layer, "weight", 0.3)


HOLDS_ANY = {
    "weight_norm": parametrizations.weight_norm,
    "own": by(Doubled),
    "two": lambda layer: by(Doubled)(parametrizations.weight_norm(layer)),
    "old weight_norm": weight_norm,
}
HOLDS_SOME = {
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own without right_inverse": by(Symmetric),
    "old spectral_norm": spectral_norm,
    "pruning": pruned,
}
KINDS = pytest.mark.parametrize("kind", [*HOLDS_ANY, *HOLDS_SOME])


def make(kind):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the older functions
        layer = {**HOLDS_ANY, **HOLDS_SOME}[kind](nn.Linear(16, 16))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 4))


def evaluated(model):
    training = model.training
    with torch.no_grad():
        output = model.eval()(X)
    model.train(training)
    return output


def shake(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)


@KINDS
@pytest.mark.parametrize("keywords", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_merged_model_computes_the_same_and_keeps_its_names(kind, keywords):
    model = make(kind)
    names = [*model.state_dict()]
    start = evaluated(model)
    lora = Lora(rank=4, **keywords)
    lora.add(model, torch.float32)
    torch.testing.assert_close(evaluated(model), start)
    shake(model)
    wanted = evaluated(model)
    assert (wanted - start).abs().max() > 0.05
    weights = plain_weights(model, dict(model.state_dict()))
    if kind in HOLDS_ANY:
        exact = copy.deepcopy(model)
        lora.merge(exact, exact=True)
        torch.testing.assert_close(evaluated(exact), wanted)
        assert not exact[0]._forward_hooks
    lora.merge(model)
    assert [*model.state_dict()] == names
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(evaluated(copy.deepcopy(model)), wanted)
    # A folder of transformers holds plain layers.
    by_hand = torch.tanh(F.linear(X, weights["0.weight"], weights["0.bias"]))
    torch.testing.assert_close(F.linear(by_hand, weights["2.weight"], weights["2.bias"]), wanted)


@KINDS
@pytest.mark.parametrize("keywords", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_start_from_the_base_keeps_the_function_or_is_refused(kind, keywords):
    # As init.weights loads them: what an old hook has computed before is not in the state.
    doubled = {name: 2 * value for name, value in make(kind).state_dict().items()}
    model, other = make(kind), make(kind)
    for each in (model, other):
        each.load_state_dict(doubled)
    start = evaluated(other)
    if kind in HOLDS_ANY:
        Lora(rank=4, init="pissa", **keywords).add(model, torch.float32)
        torch.testing.assert_close(evaluated(model), start)
    else:
        with pytest.raises(ConfigError, match=r"^0 \[16, .*Type adapter\.init=default"):
            Lora(rank=4, init="pissa", **keywords).add(model, torch.float32)


@KINDS
def test_a_weight_that_does_not_fit_leaves_the_layer_as_it_was(kind):
    layer = make(kind)[0].train()
    before = copy.deepcopy(layer.state_dict())
    wanted = 3 * torch.randn(16, 16)
    if kind in HOLDS_ANY:
        set_weight("body.0", layer, wanted)
        torch.testing.assert_close(current_weight(layer), wanted)
    else:
        with pytest.raises(ConfigError, match=r"^body\.0 \[16, 16\] derives its weight"):
            set_weight("body.0", layer, wanted)
        torch.testing.assert_close(dict(layer.state_dict()), dict(before), rtol=0, atol=0)
    assert layer.training


def test_a_run_evaluates_merges_and_refuses(tmp_path):
    y = X.argmax(1) % 4
    given = {"data": (TensorDataset(X, y), TensorDataset(X, y)), "quiet": True}
    own = ["tracking=none", "accelerator=cpu", "train.batch_size=8", "task=classification"]
    lora = ["adapter=lora", "adapter.rank=4", "optimizer=sgd", "optimizer.lr=0.3"]
    for kind in ("weight_norm", "spectral_norm"):
        given["model"] = lambda kind=kind: make(kind)
        trained = runner.run([*own, *lora, "train.max_steps=8"], **given, out=tmp_path / kind)
        evaluate = [*own, "mode=evaluate", f"checkpoint={tmp_path / kind}", "precision=bnb-int8"]
        packed = runner.run(evaluate, **given, out=tmp_path / f"{kind}-8")
        assert packed.metrics["val/loss"] == pytest.approx(trained.metrics["val/loss"], abs=0.03)
    start = [*own, f"init.weights={tmp_path / 'spectral_norm'}", "train.max_steps=1"]
    with pytest.raises(ConfigError, match=r"no addition is merged into it.*checkpoint\.resume="):
        runner.run(start, **given, out=tmp_path / "start")
    longer = f"checkpoint.resume={tmp_path / 'spectral_norm'}"
    runner.run([*own, *lora, longer, "train.max_steps=9"], **given)


def test_an_encoder_computes_with_additions_in_evaluation():
    """torch's fused encoder layers read the weights of their parts, and not the additions."""
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    Lora(rank=4).add(model, torch.float32)
    shake(model)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(X[None]), model.train()(X[None]))
