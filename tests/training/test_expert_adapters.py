"""Additions to experts: only where they are named, and the same ones in every precision."""

import pytest
import torch
from adapted_nets import adapted
from layer_kinds import load
from precision_models import run_forward
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import runner
from runner.core.base.errors import ConfigError
from runner.precision import registry
from runner.precision.layers.quantized_linear import unpack_state_dict
from runner.training.adapters import Lora
from runner.training.pretrained_folder import plain_weights

WIDTH, INNER, COUNT, RANK = 16, 32, 4, 2
LAYOUTS = {"moe.first": True, "moe.second": False}
PRECISIONS = ("32-true", "bf16-mixed", "4-bit", "packed int4", "float8 by row", "rounded to int4")
X = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(2))


class Mixture(nn.Module):
    """Experts whose first weight is [experts, in, out] and whose second one [experts, out, in]."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT)
        self.first = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 4)
        self.second = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 4)
        self.shift = nn.Parameter(torch.zeros(2, 3, WIDTH))

    def forward(self, x):
        choice = self.router(x).argmax(-1)
        output = x + self.shift.sum((0, 1))
        for expert in choice.unique():
            inner = torch.relu(x[expert == choice] @ self.first[expert])
            output[expert == choice] += F.linear(inner, self.second[expert]).to(output.dtype)
        return output


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.moe = Mixture()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.moe(x))


def build(name, **words):
    """(a converted model with an adapter, its precision, the adapter)."""
    if name in ("32-true", "bf16-mixed"):
        precision = registry.load_precision(name)
    else:
        precision = load(name, experts=["moe.first:in_out", "moe.second"])
    lora = Lora(rank=RANK, alpha=8.0, **words)
    plain = Net()
    lora.read_plain_weights(plain)
    model, _ = precision.convert(plain)
    lora.split_experts(model, LAYOUTS)
    torch.manual_seed(1)
    lora.add(model, torch.float32)
    return model, precision, lora


def additions(model):
    return {n: p for n, p in model.named_parameters() if ".lora_" in n}


@pytest.mark.parametrize("name", PRECISIONS)
def test_experts_get_additions_where_they_are_named_and_the_same_in_every_precision(name):
    assert adapted(build(name)[0]) == ["moe.router", "head"]
    for pattern, count in (("moe", 2 * COUNT + 1), ("*.second", COUNT)):
        found = additions(build(name, modules=[pattern])[0])
        wanted = additions(build("32-true", modules=[pattern])[0])
        assert len(found) == 2 * count
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in found)


@pytest.mark.parametrize("name", ["32-true", "4-bit", "packed int4"])
def test_training_is_that_of_additions_by_hand_to_the_unpacked_weights(name):
    model, precision, _ = build(name, modules=[*LAYOUTS])
    own = {key: p.detach().clone().requires_grad_() for key, p in additions(model).items()}
    base = {k: v for k, v in model.state_dict().items() if ".lora_" not in k}
    base, by_hand = unpack_state_dict(base), Net()

    def forward(x):
        weights = dict(base)
        for stack, transposed in LAYOUTS.items():
            kind = "_as_experts_transposed" if transposed else "_as_experts"
            parts = [
                [own[f"{stack}{kind}.{e}.lora_{part}.default.weight"] for e in range(COUNT)]
                for part in "AB"
            ]
            change = torch.einsum("eri,eor->eoi", *map(torch.stack, parts)) * 8 / RANK
            weights[stack] = weights[stack] + (change.mT if transposed else change)
        return functional_call(by_hand, weights, (x,))

    losses = []
    for call, trained in (
        (lambda x: run_forward(precision, model, x), [*additions(model).values()]),
        (forward, [*own.values()]),
    ):
        optimizer = torch.optim.SGD(trained, lr=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            loss = (call(X).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3] < 0.9 * losses[0]
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-5)


@pytest.mark.parametrize("words", [{}, {"init": "pissa"}, {"use_rslora": True, "dropout": 0.1}])
def test_a_merged_mixture_is_plain_and_computes_the_same(words):
    model, _, lora = build("32-true", modules=["moe"], **words)
    with torch.no_grad():
        for parameter in additions(model).values():
            parameter.add_(0.1)
        expected = model.eval()(X)
        before = (expected - Net()(X)).abs().max()
        weights = plain_weights(model, model.state_dict())
        lora.merge(model)
        fresh = Net()
        fresh.load_state_dict(weights)
        assert before > 0.1
        assert type(model.moe) is Mixture
        assert model.state_dict().keys() == weights.keys()
        for merged in (model, fresh):
            torch.testing.assert_close(merged(X), expected, rtol=1e-4, atol=1e-5)


def test_loftq_starts_an_expert_from_what_the_packing_rounds_away():
    plain, found = Net().moe, {}
    for init in ("default", "loftq"):
        model, _, _ = build("4-bit", modules=["moe"], init=init)
        weights = plain_weights(model, model.state_dict())
        found[init] = [
            (weights[f"moe.{n}"] - getattr(plain, n)).norm() for n in ("first", "second")
        ]
    assert all(new < 0.95 * old for new, old in zip(found["loftq"], found["default"], strict=True))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("32-true", {"use_dora": True}, "no DoRA for experts, of which moe.first.*leave the expe"),
        ("4-bit", {"use_dora": True}, "no DoRA for experts"),
        (
            "4-bit",
            {"init": "loftq", "rank": 17},
            "of moe.first_as_experts_transposed.0, 16 -> 32, has",
        ),
        ("32-true", {"modules": ["moe.shift"]}, "moe.shift matches no module"),
        ("4-bit", {"modules": ["*.3"]}, r"\*\.3 matches no module"),
    ],
)
def test_what_experts_cannot_have_is_refused(name, words, message, monkeypatch):
    monkeypatch.setattr(f"{__name__}.RANK", words.pop("rank", RANK))
    with pytest.raises(ConfigError, match=message):
        build(name, **{"modules": ["moe.first"], **words})


def test_a_run_is_evaluated_in_other_precisions_and_resumed(tmp_path, capsys):
    given = {"model": Net, "data": (TensorDataset(X, X.roll(1)), TensorDataset(X, X.roll(1)))}
    own = ["tracking=none", "task=regression"]
    lora = ["adapter=lora", "adapter.rank=2", "optimizer.lr=0.1", "train.batch_size=8"]

    def train(name, *words):
        words = [*own, *lora, "train.max_steps=4", *words]
        return runner.run(words, **given, out=tmp_path / name)

    train("all but experts", "precision=bnb-nf4")
    assert "the adapter leaves out the 4,096 weights of experts; adapter.modules=[*.moe," in (
        capsys.readouterr().out
    )
    words = [*own, *lora, "adapter.modules=[moe]", "mode=diff", "against=bf16-true"]
    assert runner.run(words, **given, out=tmp_path / "diff").status == "finished"
    for name in ("32-true", "bnb-nf4"):
        words = (f"precision={name}", "adapter.modules=[moe]")
        trained = train(name, *words)
        for other in ("32-true", "bnb-nf4"):
            evaluate = [
                *own,
                "mode=evaluate",
                f"precision={other}",
                f"checkpoint={tmp_path / name}",
            ]
            found = runner.run(evaluate, **given, out=tmp_path / f"{name} {other}")
            wanted = trained.metrics["val/loss"]
            assert found.metrics["val/loss"] == pytest.approx(
                wanted, rel=1e-6 if other == name else 0.1
            )
        half = train(f"{name} half", *words, "train.max_seconds=1e-6")
        resume = [f"checkpoint.resume={half.folder}", "train.max_steps=4", "train.max_seconds=null"]
        resumed = runner.run(resume, **given)
        assert resumed.steps == 4 > half.steps
        assert resumed.metrics["val/loss"] == trained.metrics["val/loss"]
