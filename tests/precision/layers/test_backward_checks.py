"""Backwards that are more than one pass over what the forward stored: a model's own activation
checkpointing, and gradients of gradients."""

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from precision_models import CPU, DELAYED_SCALING, load_precision, precisions_on_cpu, train_state
from run_folders import copy_files
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import GPT2Config, GPT2LMHeadModel

from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec, TrainSpec
from runner.core.loop.step import train_step
from runner.training.compile import prepare_model

HERE = precisions_on_cpu()
REPEATABLE = [name for name in HERE if name not in DELAYED_SCALING]
FIRST_ORDER = [
    name
    for name in HERE
    if name.startswith(("transformer-engine", "float8", "torchao-")) or name == "bnb-int8-training"
]
# Of qat-*, whose rounding is far above float64's, in test_qat.py.
TWICE = [
    name
    for name in HERE
    if name not in FIRST_ORDER
    and not load_precision(name).freezes
    and not load_precision(name).trains_for
]

# One precision for each way of computing a layer.
CHECKPOINTED = (
    "64-true 16-true bf16-mixed transformer-engine-current float8-rowwise "
    "torchao-mxfp8 bnb-nf4 bnb-int8-training"
).split()


class Block(nn.Module):
    """A residual block that makes tensors of no given dtype."""

    def __init__(self):
        super().__init__()
        self.norm, self.into = nn.LayerNorm(32), nn.Linear(32, 64)
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        shift = torch.linspace(0, 0.1, 64)
        return x + self.out(torch.tanh(self.into(self.norm(x)) + shift * torch.ones(64)))


def saved_products():
    aten = torch.ops.aten
    return create_selective_checkpoint_contexts([aten.mm.default, aten.addmm.default])


class Net(nn.Module):
    """Blocks under torch.utils.checkpoint, or not: use_reentrant True, False or None, or that
    saves products."""

    def __init__(self, reentrant=None, blocks=2):
        super().__init__()
        self.inlet, self.head = nn.Linear(32, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = block(x)
            elif self.reentrant == "products":
                x = checkpoint(block, x, use_reentrant=False, context_fn=saved_products)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def batches(count=1, width=32):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, width, generator=generator), torch.randint(4, (8,), generator=generator))
        for _ in range(count)
    ]


class Gradients(torch.optim.SGD):
    """Keeps the gradients of its last step."""

    def step(self, closure=None):
        self.stored = [
            p.grad.clone()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        return super().step(closure)


def gradients(precision, model, micros, prepare=lambda model: None):
    """Of one training step, by parameter."""
    model, _ = precision.convert(model)
    prepare(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = Gradients(params, lr=0.0)
    state = train_state(precision, model, optimizer)
    model.train()
    with precision.session(model, CPU):
        train_step(state, micros)
    return optimizer.stored


def seeded(kind, *args):
    torch.manual_seed(0)
    return kind(*args)


def same(found, wanted):
    return len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("name", REPEATABLE)
def test_a_model_that_computes_blocks_twice_has_the_same_gradients(name):
    plain = gradients(load_precision(name), seeded(Net), batches(2))
    for reentrant in (True, False, "products"):
        assert same(gradients(load_precision(name), seeded(Net, reentrant), batches(2)), plain)


@pytest.mark.parametrize("name", ["bf16-true", "bf16-mixed", "transformer-engine-current"])
@pytest.mark.parametrize("kept", ["blocks.1", "blocks.1.norm"])
def test_a_module_of_keep_fp32_inside_a_checkpointed_block(name, kept):
    keep = {"keep_fp32": [kept]}
    plain = gradients(load_precision(name, **keep), seeded(Net), batches())
    for reentrant in (True, False):
        again = gradients(load_precision(name, **keep), seeded(Net, reentrant), batches())
        assert same(again, plain)


@pytest.mark.parametrize(
    "name", ["64-true", "bf16-true", "bf16-mixed", "transformer-engine-current"]
)
def test_a_checkpointed_block_inside_a_module_of_keep_fp32(name):
    keep = {"keep_fp32": ["body"]}

    def whole(reentrant):
        model = seeded(Net, reentrant)
        return nn.Sequential(OrderedDict(first=nn.Linear(32, 32), body=model))

    plain = gradients(load_precision(name, **keep), whole(None), batches())
    for reentrant in (True, False):
        assert same(gradients(load_precision(name, **keep), whole(reentrant), batches()), plain)


@pytest.mark.parametrize("name", DELAYED_SCALING)
def test_scales_of_past_steps_refuse_a_second_forward(name):
    ignored = load_precision(name, ignore_modules=["*blocks.*"])
    plain = gradients(ignored, seeded(Net), batches())
    for reentrant in (True, False):
        with pytest.raises(ConfigError, match="Type precision=transformer-engine-current"):
            gradients(load_precision(name), seeded(Net, reentrant), batches())
        assert same(gradients(ignored, seeded(Net, reentrant), batches()), plain)


@pytest.mark.parametrize("name", ["32-true", "bf16-true", "transformer-engine-current"])
def test_the_runs_own_checkpointing_around_the_models(name):
    """Both at once: a recompute inside a recompute."""

    def whole(model):
        prepare_model(
            replace(RunSpec(), train=TrainSpec(activation_checkpointing=["*"])),
            precision,
            CPU,
            model,
        )

    precision = load_precision(name)
    plain = gradients(precision, seeded(Net), batches())
    assert same(gradients(precision, seeded(Net, False), batches(), whole), plain)


class Gpt(nn.Module):
    """transformers' GPT-2 on token ids that the inputs stand for."""

    def __init__(self, checkpointing=None):
        super().__init__()
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
        self.body = GPT2LMHeadModel(GPT2Config(**sizes, **drops, tie_word_embeddings=False))
        if checkpointing is not None:
            self.body.gradient_checkpointing_enable({"use_reentrant": checkpointing})

    def forward(self, x):
        tokens = (x[:, :16] > 0).long() + 2 * (x[:, 16:] > 0).long()
        return self.body(tokens).logits[:, -1, :4]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_of_transformers(name):
    """Within rounding: PyTorch's attention takes another kernel in a forward without gradients."""
    plain = _drawn(load_precision(name), seeded(Gpt))
    eps = torch.finfo(load_precision(name).compute).eps
    for reentrant in (True, False):
        again = _drawn(load_precision(name), seeded(Gpt, reentrant))
        assert len(again) == len(plain) > 0
        errors = norms(a.double() - b.double() for a, b in zip(again, plain, strict=True))
        assert errors.norm() <= 4 * eps * norms(plain).norm()


def _drawn(precision, model):
    """Gradients, with the same dropout each time."""

    def prepare(model):
        torch.manual_seed(3)

    return gradients(precision, model, batches(2), prepare)


class Field(nn.Module):
    """The derivative of a small network by its input, as in physics-informed networks."""

    def __init__(self, create_graph=True):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32)
        )
        self.head, self.create_graph = nn.Linear(32, 32), create_graph

    def forward(self, x):
        with torch.enable_grad():  # an evaluation runs without
            x = x.detach().requires_grad_()
            y = self.body(x)
            total, graph = y.sum(), {"create_graph": self.create_graph}
            slope = torch.autograd.grad(total, x, retain_graph=True, **graph)[0]
        return self.head(y + 10 * slope)


def norms(grads):
    return torch.stack([g.double().norm() for g in grads])


def unscaled(name):
    """Without a loss scale whose first step may overflow."""
    return load_precision(name, **({"loss_scale": {"fixed": 64.0}} if name == "16-mixed" else {}))


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients_are_those_of_float64(name):
    exact = norms(gradients(load_precision("64-true"), seeded(Field), batches()))
    found = norms(gradients(unscaled(name), seeded(Field), batches()))
    assert found.allclose(exact, rtol=0.02)


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_every_converted_layer_has_first_derivatives_in_a_forward(name):
    assert gradients(load_precision(name), seeded(Field, False), batches())


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_layers_with_first_derivatives_refuse_gradients_of_gradients(name):
    with pytest.raises(ConfigError, match=r"Type precision.ignore_modules=\["):
        gradients(load_precision(name), seeded(Field), batches())
    ignored = load_precision(name, ignore_modules=["*body*"])
    exact = norms(gradients(load_precision("64-true"), seeded(Field), batches()))
    assert norms(gradients(ignored, seeded(Field), batches())).allclose(exact, rtol=0.1)


@pytest.fixture
def run(main, tmp_path):
    """Two steps of a model of the user's own."""
    copy_files("derivatives", tmp_path)

    def run(precision, twice):
        words = f"model._target_=own.Net +model.twice={twice} precision={precision}"
        data = "data=synthetic_images data.shape=[1,8,8] data.count=64"
        emulated = precision.startswith(("float8", "transformer-engine"))
        switch = ["precision.emulate=true"] if emulated else []
        return main(*f"{words} {data} tracking=none train.max_steps=2".split(), *switch)

    return run


@pytest.mark.parametrize(
    ("precision", "twice", "typed"),
    [
        ("transformer-engine", "false", "Type precision=transformer-engine-current, or"),
        ("float8-tensorwise", "true", "Type precision.ignore_modules=[<its layers>]"),
    ],
)
def test_a_run_stops_with_one_message(run, precision, twice, typed):
    run(precision, twice).check_refused(typed)


def test_a_run_with_gradients_of_gradients_trains_and_evaluates(run):
    run("bf16-mixed", "true").check_ok()
