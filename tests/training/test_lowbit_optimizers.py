import re
import sys

import pytest
import torch
from states import CPU, are_equal
from torch import nn
from torch.utils._pytree import tree_leaves
from training_states import MLP, resume_halfway, save

from runner.core.base.errors import ConfigError
from runner.core.base.tensor_facts import tensor_bytes
from runner.core.config.schema import RunSpec
from runner.core.config.targets import check_targets
from runner.core.loop.train_state import ScheduledOptimizer
from runner.precision import registry
from runner.precision.dynamic_loss_scale import DynamicLossScale
from runner.training import lowbit_optimizers
from runner.training.setup import build_optimizer, build_scheduled_optimizers, embedding_parameters

BLOCKWISE = ("adam8bit", "adamw8bit", "lion8bit")
OPTIONS = (*BLOCKWISE, *(f"paged_{name}" for name in BLOCKWISE), "adamw4bit", "adamwfp8")
IN_BOTH = ("adamw8bit", "adamw4bit")
"""Optimizers that are tried with bfloat16 weights, too; the others there are extended."""
CASES = [
    pytest.param(
        name,
        precision,
        marks=[pytest.mark.extended] * (precision == "bf16-true" and name not in IN_BOTH),
    )
    for name in OPTIONS
    for precision in ("32-true", "bf16-true")
]
ADAMW8 = {"_target_": "runner.training.lowbit_optimizers.AdamW8bit", "lr": 0.01}
ADAMW4 = {"_target_": "runner.training.lowbit_optimizers.AdamW4bit", "lr": 0.01}


class Net(nn.Module):
    """An embedding and matrices of 8192 elements and more, biases of 128 and fewer."""

    def __init__(self, tied=False):
        super().__init__()
        self.words = nn.Embedding(64, 128)
        self.body = nn.Linear(128, 128)
        self.head = nn.Linear(128, 64)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.body(self.words(tokens))))


def build(optimizer, precision="32-true", scheduler=None, steps=20, **keywords):
    spec = RunSpec(optimizer=optimizer, scheduler=scheduler or {"_target_": None})
    chosen = registry.load_precision(precision)
    torch.manual_seed(0)
    model, _ = chosen.convert(Net(**keywords), CPU)
    return model, build_scheduled_optimizers(spec, model, chosen, steps)


def train(model, parts, steps, batch=16):
    """Next-token-like fits of batches that the step's number seeds; the last loss."""
    loss = torch.zeros(())
    for step in steps:
        generator = torch.Generator().manual_seed(step % 3)
        tokens = torch.randint(0, 64, (batch,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
        for d in parts:
            d.optimizer.zero_grad()
        loss.backward()
        for d in parts:
            d.optimizer.step()
            if d.scheduler:
                d.scheduler.step()
    return loss.item()


def states(model, optimizer):
    """Each parameter's name and its state tensors but for counters and tables."""
    named = {p: n for n, p in model.named_parameters()}
    keys = ("state1", "state2", "exp_avg", "exp_avg_sq")
    return {named[p]: [v for k, v in s.items() if k in keys] for p, s in optimizer.state.items()}


def low(state):
    """Whether a state tensor is held in few bits."""
    return tensor_bytes(state) < 1.1 * state.numel()


def all_tensors(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


# What keeps how many bits


@pytest.mark.parametrize("name", OPTIONS)
def test_matrices_have_few_bits_embeddings_and_small_tensors_32(compose, name):
    model, (d,) = build(compose(f"optimizer={name}").optimizer)
    train(model, [d], range(1))
    for parameter, stored in states(model, d.optimizer).items():
        wanted = parameter in ("body.weight", "head.weight")
        assert [low(state) for state in stored] == [wanted] * len(stored), parameter
        if not wanted:
            assert {state.dtype for state in stored} == {torch.float32}


@pytest.mark.parametrize("name", ["adamw8bit", "adamw4bit"])
def test_a_tied_head_counts_as_the_embedding(compose, name):
    model, (d,) = build(compose(f"optimizer={name}").optimizer, tied=True)
    assert [g.get("optim_bits") for g in d.optimizer.param_groups] == [None, 32]
    train(model, [d], range(1))
    assert [low(s) for s in states(model, d.optimizer)["words.weight"]] == [False, False]
    assert [low(s) for s in states(model, d.optimizer)["body.weight"]] == [True, True]


@pytest.mark.parametrize("node", [ADAMW8, ADAMW4])
def test_several_optimizers(node):
    muon = {"_target_": "torch.optim.Muon", "match": "matrices", "lr": 0.02}
    model, both = build({"matrices": muon, "rest": {**node, "match": None}})
    assert [type(d.optimizer).__name__ for d in both] == ["Muon", node["_target_"].split(".")[-1]]
    train(model, both, range(2))
    rest = states(model, both[1].optimizer)
    assert [low(s) for s in rest["words.weight"]] == [False, False]
    assert [low(s) for s in rest["head.weight"]] == [True, True]


def test_a_model_without_embeddings_and_one_of_embeddings_only_have_one_group():
    linear, table = nn.Linear(64, 64), nn.Embedding(64, 64)
    for module, bits in ((linear, None), (table, 32)):
        params = [*module.parameters()]
        made = build_optimizer("optimizer", ADAMW8, params, embedding_parameters(module))
        assert [g.get("optim_bits") for g in made.param_groups] == [bits]
    _, (d,) = build({"_target_": "torch.optim.AdamW", "lr": 0.1})  # not one of these optimizers
    assert [g.get("optim_bits") for g in d.optimizer.param_groups] == [None]


@pytest.mark.parametrize(
    ("name", "share"),
    [("adamw8bit", 0.27), ("adamw4bit", 0.15), ("adamwfp8", 0.27), ("lion8bit", 0.14)],
)
def test_the_share_of_32_bit_adam(compose, name, share):
    sizes = {}
    for option in ("adamw", name):
        model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
        node = compose(f"optimizer={option}").optimizer
        made = build_optimizer("optimizer", node, [*model.parameters()])
        model(torch.randn(4, 256)).square().mean().backward()
        made.step()
        sizes[option] = tensor_bytes(*all_tensors(list(made.state.values())))
    assert sizes[name] / sizes["adamw"] <= share


# The process-wide overrides of bitsandbytes


def test_overrides_of_other_code_do_not_reach_a_run():
    """By index, by id and by module, stale and new."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    try:
        model, (d,) = build(ADAMW8)
        for key in ((0, 0), (1, 0)):
            manager.index2config[key] = {"optim_bits": 32, "lr": 7.0}
        manager.override_config(model.body.weight, "optim_bits", 32)
        manager.override_config(model.words.weight, "optim_bits", 8)
        manager.register_module_override(model.head, "weight", {"optim_bits": 32})
        twin, (other,) = build(ADAMW8)
        train(model, [d], range(3))
    finally:
        manager.initialize()
    train(twin, [other], range(3))
    for made, part in ((model, d), (twin, other)):
        stored = states(made, part.optimizer)
        found = [low(stored[f"{n}.weight"][0]) for n in ("words", "body", "head")]
        assert found == [False, True, True]
    assert are_equal(model.parameters(), twin.parameters())


def test_a_library_that_ignores_the_group_is_noticed(monkeypatch):
    def config(self, gindex, pindex, group):
        narrow = {"optim_bits": 8, "min_8bit_size": 1, "max_unorm": 0.0, "skip_zeros": False}
        return {**group, **narrow}

    monkeypatch.setattr(lowbit_optimizers.Blockwise, "get_config", config)
    model, (d,) = build(ADAMW8)
    message = (
        r"AdamW8bit made the state of a \[64, 128\] parameter in torch\.uint8, "
        r"and its group 1 asks for optim_bits=32"
    )
    with pytest.raises(RuntimeError, match=message):
        train(model, [d], range(1))


# The arithmetic


@pytest.mark.parametrize("name", ["adam8bit", "adamw8bit", "adamw4bit", "adamwfp8"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_in_32_bits_it_is_adamw(compose, name, decay):
    """Decoupled decay, in Adam8bit too."""
    pair = []
    for option in (name, "adamw"):
        node = {**compose(f"optimizer={option}").optimizer, "lr": 0.01, "weight_decay": decay}
        torch.manual_seed(0)
        model = Net()
        params = [*model.parameters()]
        made = build_optimizer("optimizer", node, params, embeddings=params)
        train(model, [ScheduledOptimizer(made)], range(5))
        pair.append([p.detach() for p in model.parameters()])
    for mine, theirs in zip(*pair, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_it_trains(compose, name, precision):
    node = {**compose(f"optimizer={name}").optimizer, "lr": 1e-3 if "lion" in name else 5e-3}
    model, (d,) = build(node, precision)
    assert train(model, [d], range(40)) < (1.0 if "lion" in name else 0.02)  # from 4.3


def test_torchaos_step_is_not_compiled_on_the_cpu():
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    model, (d,) = build(ADAMW4)
    train(model, [d], range(2))
    assert counters["stats"]["unique_graphs"] == before
    twice = torch.compile(lambda x: 2 * x, backend="eager")
    twice(torch.ones(2))
    assert counters["stats"]["unique_graphs"] == before + 1  # the stance is back


# Schedules, loss scale, checkpoints


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("adamw8bit", "cosine"), ("lion8bit", "linear"), ("adamw4bit", "onecycle")],
)
def test_schedules_move_both_groups(compose, name, schedule):
    composed = compose(f"optimizer={name}", f"scheduler={schedule}")
    model, (d,) = build(composed.optimizer, scheduler=composed.scheduler, steps=6)
    rates = []
    for step in range(6):
        rates.append(d.lr)
        train(model, [d], [step])
    assert all(type(rate) is float for rate in rates)
    assert len(set(rates)) > 3
    assert len({g["lr"] for g in d.optimizer.param_groups}) == 1


@pytest.mark.parametrize("node", [ADAMW8, ADAMW4])
def test_a_rate_of_zero_moves_nothing(node):
    model, (d,) = build(node)
    d.optimizer.param_groups[0]["lr"] = 0.0
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, [d], range(2))
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"words.weight"}


@pytest.mark.parametrize("node", [ADAMW8, ADAMW4])
def test_an_overflow_is_skipped(node):
    model, (d,) = build(node)
    scale = DynamicLossScale(CPU, init_scale=4.0)
    for fill, applied in ((float("inf"), False), (4.0, True)):
        before = model.body.weight.detach().clone()
        for p in d.params:
            p.grad = torch.full_like(p, fill)
        flag = scale.unscale([p.grad for p in d.params])
        scale.step(d.optimizer, flag)
        scale.update([flag])
        assert torch.equal(model.body.weight, before) != applied
        assert bool(d.optimizer.state) == applied


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_resumed_run_is_bit_exact(compose, name, precision):
    spec = compose(*MLP, f"optimizer={name}", f"precision={precision}", "scheduler=cosine")
    state, _ = resume_halfway(spec, 4, 4)
    saved = all_tensors(save(state, spec).content["optimizers"])
    assert {type(t) for t in saved} == {torch.Tensor}  # no library is needed
    assert any(t.dtype.itemsize == 1 for t in saved)


# What is refused


@pytest.mark.parametrize("name", ["adamw8bit", "lion8bit", "adamw4bit"])
def test_float64_and_complex_parameters_are_refused(compose, name):
    node = compose(f"optimizer={name}").optimizer
    with pytest.raises(
        ConfigError,
        match=r"computes in float32 and the model holds float64 par.*"
        r"Allowed: bfloat16, float16, float32\. Type optimizer=adamw",
    ):
        build(node, "64-true")
    with pytest.raises(ConfigError, match="complex64"):
        build_optimizer("optimizer", node, [nn.Parameter(torch.ones(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({**ADAMW8, "min_8bit_size": -1}, "min_8bit_size=-1 is not a whole number of elements, 0"),
        ({**ADAMW8, "min_8bit_size": 0.5}, "min_8bit_size=0.5 is not"),
        ({**ADAMW8, "betas": [0.9]}, r"betas=\[0.9\] is not two numbers from 0 to below 1, as in"),
        ({**ADAMW8, "betas": [0.9, 0.9, 0.9]}, "betas="),
        ({**ADAMW8, "betas": [0.9, 1.0]}, "betas="),
        ({**ADAMW8, "betas": 0.9}, "betas=0.9 is not"),
        ({**ADAMW8, "lr": -0.1}, "lr=-0.1 is not a number, 0 and up"),
        ({**ADAMW8, "lr": None}, "lr=None is not"),
        ({**ADAMW8, "lr": "high"}, "lr=high is not a number, 0 and up"),
        ({**ADAMW8, "eps": float("nan")}, "eps=nan is not"),
        ({**ADAMW8, "weight_decay": True, "lr": -1}, "lr=-1 is not .*; weight_decay=True"),
        ({**ADAMW4, "block_size": 100}, "block_size="),
        ({**ADAMW4, "block_size": 128.0}, "block_size="),
        ({**ADAMW4, "amsgrad": 1}, "amsgrad="),
        ({**ADAMW4, "bf16_stochastic_round": None}, "bf16_stochastic_round="),
    ],
)
def test_bad_keywords_are_refused_in_one_message(node, message):
    kind = node["_target_"].rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"^optimizer: runner.*{kind} refuses .*: {message}"):
        build(node)


def test_unknown_keywords_are_refused_before_anything_is_built(compose):
    (problem,) = check_targets(compose("optimizer=adamw8bit", "+optimizer.amsgrad=true"))
    assert problem.startswith("optimizer.amsgrad=True")


@pytest.mark.parametrize(
    ("name", "library"), [("adamw8bit", "bitsandbytes"), ("adamw4bit", "torchao")]
)
def test_the_message_without_the_library_names_what_to_install(compose, monkeypatch, name, library):
    lowbit_optimizers.__getattr__.cache_clear()
    monkeypatch.setitem(sys.modules, f"{library}.optim", None)
    try:
        (problem,) = check_targets(compose(f"optimizer={name}"))
    finally:
        lowbit_optimizers.__getattr__.cache_clear()
    assert re.search(
        rf"needs {library}, which does not import here: .*Type pip install {library} "
        r".* or optimizer=adamw\.$",
        problem,
    )
