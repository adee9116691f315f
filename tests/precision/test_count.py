"""The count of a conversion on models that were not written here, against counts by hand."""

import pytest
import timm
import torch
from precision_models import load_precision
from torch import nn
from transformers import BertConfig, BertModel, ViTConfig, ViTModel

from runner.core.policy.conversion_report import ConversionReport, Fate, ModuleConversion

LINEAR_ONLY = "precision=float8-rowwise converts linear layers only"
OR_EXPERTS = (
    "precision=float8-rowwise converts linear layers, and stacked experts that precision.experts "
    "names"
)
LOOKUP = "an embedding is a lookup without a product"


def convert(model, name="float8-rowwise"):
    return load_precision(name).convert(model)[1]


def skipped(report):
    return {row.module: (row.elements, row.why) for row in report.modules if not row.is_converted}


def bert():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertModel(
        BertConfig(**sizes, intermediate_size=64, vocab_size=48, max_position_embeddings=16)
    )


def vit():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTModel(ViTConfig(**sizes, intermediate_size=64, image_size=16, patch_size=4))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.apart = nn.MultiheadAttention(32, 2, kdim=16, vdim=16, batch_first=True)
        self.head = nn.Linear(32, 16)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 32, 64))
        self.down = nn.Parameter(torch.randn(4, 64, 32))
        self.gate = nn.Linear(32, 16)


def recurrent():
    return nn.ModuleDict(
        {"lstm": nn.LSTM(16, 32), "gru": nn.GRU(32, 16), "head": nn.Linear(32, 16)}
    )


LAYER = 4 * 32 * 32 + 2 * 32 * 64


@pytest.mark.parametrize(
    ("build", "layers", "converted", "weights", "reasons"),
    [
        # Two layers of 6 and the pooler; words, positions and two kinds of tokens.
        (bert, (13, 16), 2 * LAYER + 32 * 32, 2 * LAYER + 32 * 32 + (48 + 16 + 2) * 32, {LOOKUP}),
        # The class token and the positions are the embeddings' own, patches are a convolution.
        (
            vit,
            (13, 15),
            2 * LAYER + 32 * 32,
            2 * LAYER + 32 * 32 + 3 * 4 * 4 * 32 + (1 + 17) * 32,
            {LINEAR_ONLY, f"holds its own cls_token, position_embeddings; {LINEAR_ONLY}"},
        ),
        (
            Attention,
            (1, 5),
            32 * 16,
            32 * 16 + 4 * 32 * 32 + 2 * 32 * 32 + 2 * 32 * 16,
            {
                "its packed in_proj_weight is read by F.multi_head_attention_forward",
                "its packed q_proj_weight is read by F.multi_head_attention_forward",
                "nn.MultiheadAttention reads its weight and never calls it",
            },
        ),
        (recurrent, (1, 3), 512, 512 + 4 * 32 * (16 + 32) + 3 * 16 * (32 + 16), {LINEAR_ONLY}),
        (Experts, (1, 2), 512, 512 + 2 * 4 * 32 * 64, {f"holds its own up, down; {OR_EXPERTS}"}),
    ],
)
def test_the_count_is_that_by_hand(build, layers, converted, weights, reasons):
    model = build()
    assert weights == sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    report = convert(model)
    assert report.layer_counts == layers
    assert str(report) == f"{layers[0]}/{layers[1]}"
    assert report.weight_counts == (converted, weights)
    assert {why for _, why in skipped(report).values()} == reasons


@pytest.mark.parametrize("name", ["transformer-engine-current", "bnb-nf4", "bnb-int8-training"])
def test_a_packed_weight_counts_by_the_elements_it_had(name):
    model = bert()
    report = convert(model, name)
    assert report.weight_counts[1] == sum(p.numel() for p in bert().parameters() if p.ndim >= 2)
    assert report.weight_counts[0] == 2 * LAYER + 32 * 32


def test_norms_are_counted_apart_from_layers():
    report = convert(bert(), "transformer-engine-current")
    assert next(report.lines()).startswith(
        "converted 13 of 16 layers, 17,408 of 19,520 matrix weights (89 %) and 5 norms: encoder."
    )


def test_many_convolutions_are_reported_in_one_line():
    model = timm.create_model("resnet18", num_classes=16)
    convolutions = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d)]
    report = convert(model)
    assert str(report) == "1/21"
    assert list(report.lines()) == [
        "converted 1 of 21 layers, 8,192 of 11,175,104 matrix weights (under 1 %): fc",
        "  skipped 20 Conv2d (conv1, layer1.0.conv1, layer1.0.conv2, layer1.1.conv1, …, "
        f"11,166,912 weights): {LINEAR_ONLY}",
    ]
    assert sum(convolutions) == 11_166_912


def test_a_shared_weight_counts_once_with_the_layer_that_is_converted():
    model = nn.ModuleDict({"words": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    model["head"].weight = model["words"].weight
    model["body"] = nn.Linear(32, 32)
    report = convert(model)
    assert report.weight_counts == (64 * 32 + 32 * 32, 64 * 32 + 32 * 32)
    assert str(report) == "2/2"
    words = report.modules[0]
    assert (words.is_converted, words.elements, words.counted_with) == (False, 0, "head")


def test_a_parametrized_weight_counts_in_its_layer():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nn.utils.parametrizations.orthogonal(model[0])
    report = convert(model)
    assert [(row.module, row.elements, row.converted) for row in report.modules] == [
        ("0", 256, 0),
        ("1", 256, 256),
    ]


# The report's lines


def rows(done, skipped):
    made = [ModuleConversion(f"a{i}", "Linear", Fate.CONVERTED, "", 8, 8) for i in range(done)]
    skipped_rows = (
        ModuleConversion(f"b{i}", "Own", Fate.SKIPPED, f"reason {i}", 16) for i in range(skipped)
    )
    return (*made, *skipped_rows)


def test_the_report_counts_and_names_the_skipped_layers():
    report = ConversionReport(rows(8, 1))
    assert str(report) == "8/9"
    assert list(report.lines()) == [
        "converted 8 of 9 layers, 64 of 80 matrix weights (80 %): a0, a1, a2, a3, a4, a5, a6, a7",
        "  skipped b0 (Own, 16 weights): reason 0",
    ]
    assert list(ConversionReport(rows(2, 0)).lines()) == [
        "converted 2 of 2 layers, 16 of 16 matrix weights (100 %): a0, a1"
    ]
    assert list(ConversionReport().lines()) == []
    assert report.to_list()[-1] == {
        "module": "b0",
        "kind": "Own",
        "done": False,
        "why": "reason 0",
        "elements": 16,
        "converted": 0,
        "counted_with": "",
    }


def test_the_report_names_a_limited_number_of_modules():
    lines = list(ConversionReport(rows(1, 10)).lines())
    assert len(lines) == 10
    assert lines[-2:] == [
        "  skipped b7 (Own, 16 weights): reason 7",
        "  and 2 more, all in conversion.json",
    ]
    assert len(list(ConversionReport(rows(1, 8)).lines())) == 9
    assert list(ConversionReport(rows(1, 2)).lines(limit=1))[1:] == [
        "  skipped b0 (Own, 16 weights): reason 0",
        "  and 1 more, all in conversion.json",
    ]
