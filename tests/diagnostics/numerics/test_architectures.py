"""The probe on real architectures: SQNR is that of its definition, computed here in float64, and
no architecture's verdict is against float16 or bfloat16."""

import copy
import functools
import importlib.util
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from architectures import build, data
from numerics_models import TEXT, VOCABULARY, Tokens, bert, tokens
from states import make_state, measure_step

from runner.diagnostics.numerics.measure import MAX_SAMPLE_ELEMENTS
from runner.diagnostics.numerics.numerics_page import judge_precisions
from runner.diagnostics.numerics.probe import MAX_OUTPUT_SAMPLES, modules_holding_tensors
from runner.diagnostics.numerics.results import KINDS, Numerics
from runner.precision.emulation.formats import FORMATS
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import Language

LR = 1e-3


def eager_bert():
    return bert(attn_implementation="eager")


def narrow_bert():
    """The gradients of its key biases are 1 of 17 values of their modules."""
    return bert(hidden_size=16)


def roberta():
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=20, **TEXT)
    return Tokens(RobertaForMaskedLM(config)), tokens()


def albert():
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=16, max_position_embeddings=16, **TEXT
    )
    return Tokens(AlbertForMaskedLM(config)), tokens()


def pretrained_albert():
    """rxnmapper's, of reactions as SMILES: 735,567 weights."""
    found = importlib.util.find_spec("rxnmapper")
    if found is None:
        pytest.skip("the package rxnmapper, which brings a pretrained ALBERT, is missing")
    from transformers import AutoModelForMaskedLM

    folder = Path(found.submodule_search_locations[0]) / "models" / "transformers"
    net = AutoModelForMaskedLM.from_pretrained(
        folder / "albert_heads_8_uspto_all_1310k", local_files_only=True
    )
    return Tokens(net), tokens(net.config.vocab_size)


BERTS = {
    "bert": bert,
    "bert-eager": eager_bert,
    "bert-narrow": narrow_bert,
    "roberta": roberta,
    "albert-padded": albert,
    "albert-pretrained": pretrained_albert,
}
"""Attention with a padded row; the others are in tests/helpers/architectures.py."""
OTHERS = ("gpt2", "llama", "vit", "timm-resnet", "timm-vit", "timm-convnext", "timm-mixer")
NEEDS_SCALE = {"bert-narrow", "albert-padded", "timm-convnext"}
"""Freshly initialised, float16 loses 5 % or more of some module's gradients without a loss scale.
ConvNeXt multiplies its branches by 1e-6."""
every_architecture = pytest.mark.parametrize("name", [*BERTS, *OTHERS])


def state_of(name):
    """Return the state and the batch of an architecture without dropout."""
    torch.manual_seed(0)
    model, batch = BERTS[name]() if name in BERTS else (build(name), data(name)[0].tensors)
    task = Classification() if batch[0].is_floating_point() else Language()
    sgd = functools.partial(torch.optim.SGD, lr=LR)
    return make_state(model, task=task, optimizer=sgd), batch


def sqnr(tensors, fmt, scaled):
    """SQNR in dB of all tensors together, by torch's casts and sums in float64."""
    signal, noise = 0.0, 0.0
    for x in tensors:
        largest = x.abs().max()
        scale = fmt.largest / largest if scaled and largest else torch.ones(())
        held = (x * scale).clamp(-fmt.largest, fmt.largest).to(fmt.dtype).double() / scale.double()
        signal += x.double().square().sum().item()
        noise += (x.double() - held).square().sum().item()
    return 10 * math.log10(signal / noise) if noise else None


def capped(value):
    """Dividing by a scale rounds in float32, where the probe finds a value exact: about 170 dB."""
    return 150.0 if value is None else min(value, 150.0)


def by_hand(state, batch):
    """Every module's tensors of a step, by (module, kind): of a twin, with hooks of its own.
    Activations are those of torch's own modules, whose forward has nothing inside."""
    twin = copy.deepcopy(state.model)
    tensors, owner = defaultdict(list), {}
    for name, module, params in modules_holding_tensors(twin):
        for p in params:
            owner[id(p)] = name
        if type(module).__module__.startswith("torch."):

            def keep(_, args, output, name=name):
                tensors[name, "activations"].append(output.detach().clone())

            module.register_forward_hook(keep)
    before = {id(p): p.detach().clone() for p in twin.parameters()}
    inputs, targets = batch
    state.task.loss(twin(inputs), targets).backward()
    torch.optim.SGD(twin.parameters(), lr=LR).step()
    for p in twin.parameters():
        name = owner[id(p)]
        tensors[name, "weights"].append(before[id(p)])
        if p.grad is not None:
            tensors[name, "gradients"].append(p.grad)
            tensors[name, "updates"].append(p.detach() - before[id(p)])
    for (_, kind), found in tensors.items():
        if kind == "activations":
            del found[MAX_OUTPUT_SAMPLES:]
    return tensors


@functools.cache
def measurements(name):
    """Return the tensors of an architecture's first step, and what the probe measures of it."""
    state, batch = state_of(name)
    return by_hand(state, batch), measure_step(state, [batch])


@every_architecture
def test_sqnr_is_that_of_a_module_s_tensors_together(name):
    wanted, snapshot = measurements(name)
    found = {(m.module, m.kind): m for m in snapshot.measured}
    compared = 0
    for key, tensors in wanted.items():
        if max(t.numel() for t in tensors) > MAX_SAMPLE_ELEMENTS:
            continue  # the probe measures a part of it
        assert found[key].elements == sum(t.numel() for t in tensors)
        for label, fmt in FORMATS.items():
            value = capped(sqnr(tensors, fmt, scaled=label.startswith("float8")))
            by_probe = capped(found[key].formats[label].sqnr_db)
            assert by_probe == pytest.approx(value, abs=0.01), (key, label)
            compared += 1
    assert compared >= len(FORMATS) * len(wanted) / 2
    kinds = {kind for _, kind in wanted}
    assert kinds == set(KINDS)


@every_architecture
def test_mixed_precisions_would_do_for_every_architecture(name):
    numerics = Numerics(1, "32-true", "float32", "float32", (measurements(name)[1],))
    found = {one.precision: one for one in judge_precisions(numerics)}
    assert found["16-mixed"].verdict == found["bf16-mixed"].verdict == "would do"
    needs_scale = found["16-true"].why.startswith("gradients fit only with a loss scale")
    assert needs_scale == (name in NEEDS_SCALE)
