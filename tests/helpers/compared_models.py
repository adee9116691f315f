"""Small models of three kinds with a batch each, and bugs to plant into one of their modules."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from states import CPU
from torch import nn

from models import resnet as resnets
from models.gpt import GPT
from runner.core.config.schema import RunSpec
from runner.core.loop.batch_layout import KeywordInputs
from runner.core.run.run_context import TrainingSetup
from runner.diagnostics.divergence.compare import compare_batch
from runner.diagnostics.divergence.divergence_report import DivergenceReport
from runner.diagnostics.divergence.substitution import Execution
from runner.precision.registry import load_precision
from runner.training.setup import build_state
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import Language, MaskedLM

VOCABULARY = 64


def gpt():
    model = GPT(VOCABULARY, 32, 2, 2, 64, dropout=0.1)
    tokens = torch.randint(VOCABULARY, (4, 33))
    return model, (tokens[:, :-1], tokens[:, 1:]), Language()


def resnet18():
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    return resnets.resnet(18, 10, [3, 16, 16]), (images, labels), Classification()


def resnet():
    """A ResNet-18 without the half of its layers that has 94 % of its weights."""
    model, batch, task = resnet18()
    model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(128, 10)
    return model, batch, task


def bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 256}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(max_position_embeddings=32, **sizes, **layers)
    tokens = torch.randint(VOCABULARY, (4, 32))
    labels = torch.where(torch.rand(4, 32) < 0.3, tokens, -100)
    inputs = KeywordInputs(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    return BertForMaskedLM(config), (inputs, labels), MaskedLM()


MODELS = {"gpt": gpt, "resnet": resnet, "resnet18": resnet18, "bert": bert}
LAYERS = {
    "gpt": ("blocks.1.expand", "blocks.1.norm2", "blocks.0.drop"),
    "resnet": ("fc", "layer2.0.bn1", None),
    "bert": (
        "bert.encoder.layer.1.intermediate.dense",
        "bert.encoder.layer.1.attention.output.LayerNorm",
        "bert.encoder.layer.0.output.dropout",
    ),
}
"""A linear layer, a norm and a dropout of each model."""


@cache
def parts(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def half_inside(layer):
    plain = layer.forward
    layer.forward = lambda x: plain(x.half().float())


def half_sums(layer):
    """A product whose partial sums are rounded to bfloat16."""

    def forward(x):
        total = torch.zeros((), dtype=torch.bfloat16)
        columns = layer.weight.bfloat16().unbind(1)
        for part, column in zip(x.bfloat16().unbind(-1), columns, strict=True):
            total = total + part[..., None] * column
        return (total + layer.bias.bfloat16()).to(x.dtype)

    layer.forward = forward


def scale_off(layer):
    plain = layer.forward
    layer.forward = lambda x: 2 * plain(x)


def permuted(layer):
    with torch.no_grad():
        layer.weight.copy_(layer.weight.flip(0))


def other_dropout(layer):
    layer.forward = lambda x: F.dropout(x, 0.2)


def wrong_gradient(layer):
    plain = layer.forward
    layer.forward = lambda x: _Scaled.apply(plain(x))


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient that is off by 5 %."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.05 * gradient


LINEAR, NORM, DROPOUT = range(3)
BUGS = dict.fromkeys((half_sums, scale_off, permuted, wrong_gradient), LINEAR)
BUGS |= {half_inside: NORM, other_dropout: DROPOUT}
"""Bugs, with the kind of layer that they are planted into."""


extended = partial(pytest.param, marks=pytest.mark.extended)
"""Makes a parameter of a test in the second tier."""


def planted(kind, bug):
    """Return the name of the module of a kind of model that gets a bug, and what plants it."""
    name = LAYERS[kind][BUGS[bug]]
    return name, lambda model: bug(model.get_submodule(name))


def replace_forward(name, change):
    """Return what gives a module `change(plain, x)` in place of its forward, `plain(x)`."""

    def plant(model):
        layer = model.get_submodule(name)
        plain = layer.forward
        layer.forward = lambda x: change(plain, x)

    return plant


def execution(model, task, precision, plant=None, **options):
    """Return an execution of a copy of a model in a precision, with what `plant` changes in it."""
    policy = load_precision(precision, **options)
    model, _ = policy.convert(copy.deepcopy(model))
    if plant is not None:
        plant(model)
    state = build_state(TrainingSetup(RunSpec(), policy, task, CPU), model)
    value = policy.scale(CPU).value
    return Execution(precision, state, 1.0 if value is None else value.item())


def compare(made, precision, plant=None, **options):
    """Return what the comparison of a model in float32 finds in a copy with a bug.

    Args:
        made: model, batch and task.
        precision: of the copy; its options are the other keywords.
        plant: changes the copy.
    """
    model, batch, task = made
    reference = execution(model, task, "32-true")
    other = execution(model, task, precision, plant, **options)
    torch.manual_seed(1)
    return compare_batch(reference, other, (batch, batch), [torch.get_rng_state()])


def sentence(found, precision="one", against="other"):
    """Return the sentence of a report on one step."""
    return DivergenceReport(precision, against, [found]).sentence
