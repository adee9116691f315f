"""Converted layers are those that run, and packed weights are read by their layers alone.

tests/real_models/test_every_precision.py shows so for whole runs of more architectures.
"""

from types import SimpleNamespace

import architectures
import pytest
import torch
import transformers
from precision_models import CPU, load_precision, relative_error, run_forward
from torch import nn

from runner.core.config.schema import RunSpec
from runner.core.run.run_context import TrainingSetup
from runner.modes.execution import build_proven_model
from runner.precision.conversion import ROOT_NAME, is_converted
from runner.precision.conversion_proof import BYPASSED_REASON
from runner.training.adapters import Lora
from runner.training.model import BuiltModel
from runner.training.tasks.regression import Regression

CONVERTING = ("bnb-nf4", "bnb-int8", "bnb-int8-training", "float8-tensorwise", "transformer-engine")


class Bert(nn.Module):
    """A BERT that returns its pooled output."""

    def __init__(self):
        super().__init__()
        self.bert = transformers.BertModel(transformers.BertConfig(**architectures.TRANSFORMER))

    def forward(self, tokens):
        return self.bert(tokens, attention_mask=torch.ones_like(tokens)).pooler_output


def checkpointed_bert():
    model = Bert()
    model.bert.activation_checkpointing_enable()
    return model


class Encoder(nn.Module):
    """torch's encoder, which reads its parts' weights in evaluation."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.inlet, self.encoder = nn.Linear(16, 32), nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(self.inlet(x))


def tokens():
    return torch.randint(64, (2, 8))


def vectors():
    return torch.randn(2, 8, 16)


def architecture(name):
    train, _ = architectures.data(name)
    return architectures.ARCHITECTURES[name].model, lambda: train[:2][0]


def build_proven(name, make_model, x, adapter=None):
    """Return a precision and a model that it converted, after its proof by these inputs."""
    precision = load_precision(name)

    def build(device, plan):
        torch.manual_seed(0)
        model, report = precision.convert(make_model(), device, plan)
        if adapter:
            adapter.add(model, precision.storage)
        return BuiltModel(model, report, 0, plan=plan)

    setup = TrainingSetup(RunSpec(), precision, Regression(), CPU)
    return precision, build_proven_model(setup, SimpleNamespace(build=build), lambda: x)


def names_of_called_layers(model, precision, x):
    """Return the names of the converted layers whose forward runs, and the model's output."""
    called = set()
    for name, module in model.named_modules():
        if is_converted(module):
            plain_name = name.replace(".base_layer", "") or ROOT_NAME
            module.register_forward_hook(lambda *_, name=plain_name: called.add(name))
    with torch.no_grad():
        output = run_forward(precision, model.eval(), x)
    return called, output


@pytest.mark.parametrize("name", CONVERTING)
@pytest.mark.parametrize(
    ("make_model", "make_inputs", "adapter"),
    [
        (checkpointed_bert, tokens, None),
        (Bert, tokens, Lora(rank=2)),
        (Encoder, vectors, None),
        (*architecture("whisper"), None),
    ],
    ids=["checkpointed", "lora", "encoder", "whisper"],
)
def test_layers_that_count_as_converted_are_those_that_run(make_model, make_inputs, adapter, name):
    torch.manual_seed(0)
    x = make_inputs()
    precision, built = build_proven(name, make_model, x, adapter)
    called, output = names_of_called_layers(built.model, precision, x)
    converted = {row.module for row in built.report.modules if row.is_converted}
    assert converted == called
    assert converted
    torch.manual_seed(0)
    plain = make_model().eval()
    with torch.no_grad():
        assert relative_error(output, plain(x)) < 0.35


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8", "float8-tensorwise"])
def test_torchvisions_swin_does_not_call_its_attentions_layers(name):
    make_model, make_inputs = architecture("torchvision-swin")
    _, built = build_proven(name, make_model, make_inputs())
    rows = [row for row in built.report.modules if row.why == BYPASSED_REASON]
    assert {row.module.rpartition(".")[2] for row in rows} == {"qkv", "proj"}


class IdleHead(nn.Module):
    """A model with a layer that it never calls, whose weight an embedding reads."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight, self.out = self.table.weight, nn.Linear(32, 16)

    def forward(self, x):
        return self.out(self.table(x))


def test_an_embedding_may_read_the_weight_that_it_shares_with_an_idle_layer():
    _, built = build_proven("float8-tensorwise", IdleHead, tokens())
    assert built.plan.bypassed == {}
    assert str(built.report) == "1/2"
