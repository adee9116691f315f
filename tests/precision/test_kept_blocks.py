"""precision.keep_blocks: which blocks stay unconverted, and what is refused."""

import pytest
import torch
from torch import nn

from runner.precision import registry
from runner.precision.kept_blocks import find_kept_blocks, keep_blocks_problems
from runner.precision.layers.te_layers import FusedNormLinear
from runner.utils.errors import ConfigError

CONVERTING = [
    name for name in registry.precision_names() if name.startswith(("transformer-engine", "float8"))
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    """Blocks between two linear layers that are in none."""

    def __init__(self, blocks):
        super().__init__()
        self.start = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def kept(value, blocks):
    model = Stack(blocks)
    found = find_kept_blocks(model, value)
    return [i for i, block in enumerate(model.blocks) if block in found]


@pytest.mark.parametrize(
    ("blocks", "numbers"),
    [
        (3, [0, 2]),
        (12, [0, 10, 11]),
        (24, [0, 21, 22, 23]),
        (32, [0, 28, 29, 30, 31]),
        # NVIDIA's 12B model has 62 blocks and kept its last eight.
        (62, [0, *range(54, 62)]),
    ],
)
def test_paper_keeps_the_first_block_and_0_13_of_the_blocks_at_the_end(blocks, numbers):
    assert kept("paper", blocks) == numbers


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (None, []),
        ([0, 0], []),
        ([1, 0], [0]),
        ([0, 2], [3, 4]),
        ((2, 2), [0, 1, 3, 4]),
    ],
    ids=str,
)
def test_two_numbers_keep_blocks_at_the_start_and_at_the_end(value, numbers):
    assert kept(value, 5) == numbers


@pytest.mark.parametrize("name", CONVERTING)
def test_kept_blocks_stay_plain_and_the_report_says_why(name):
    precision = registry.load_precision(name, emulate=True, keep_blocks="paper")
    model, report = precision.convert(Stack(5))
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert plain == ["blocks.0.linear", "blocks.4.linear"]
    assert type(model.blocks[0].norm) is type(model.blocks[4].norm) is nn.LayerNorm
    reasons = {row.module: row.why for row in report.modules if not row.done}
    assert {reasons[name] for name in plain} == {"kept by precision.keep_blocks"}
    assert report.layer_counts == (5, 7)
    lines = "\n".join(report.lines())
    assert "skipped blocks.0.linear, blocks.4.linear (Linear, 2,048 weights): kept by" in lines
    with precision.session(model, torch.device("cpu")), precision.forward(torch.device("cpu")):
        outputs = model(precision.cast(torch.randn(4, 32)))
    assert outputs.isfinite().all()


def test_kept_blocks_are_not_fused():
    precision = registry.load_precision(
        "transformer-engine-current", emulate=True, fuse=True, keep_blocks=[1, 0]
    )
    model, _ = precision.convert(Stack(3))
    fused = [name for name, m in model.named_modules() if isinstance(m, FusedNormLinear)]
    assert fused == ["blocks.1.linear", "blocks.2.linear"]
    assert type(model.blocks[0].norm) is nn.LayerNorm


def test_a_named_module_in_a_kept_block_has_the_reason_that_names_it():
    precision = registry.load_precision(
        "float8-rowwise", emulate=True, keep_blocks=[1, 0], ignore_modules=["blocks.0.linear"]
    )
    _, report = precision.convert(Stack(3))
    reasons = {row.module: row.why for row in report.modules}
    assert reasons["blocks.0.linear"] == "named by precision.ignore_modules"


@pytest.mark.parametrize(
    "value", ["papers", "", [], [1], [1, 2, 3], [1, -1], [1.0, 2], [True, 1], 1, True, {"first": 1}]
)
def test_other_values_are_refused_with_those_that_are_allowed(value):
    (problem,) = keep_blocks_problems(value)
    assert problem == (
        f"precision.keep_blocks={value} is not known. Allowed: null, paper, or two whole numbers "
        "from 0, as in [1,2]."
    )


@pytest.mark.parametrize(
    ("value", "blocks", "parts"),
    [
        ("paper", 0, ["precision.keep_blocks=paper counts", "has none", "ignore_modules="]),
        ([1, 1], 0, ["precision.keep_blocks=[1,1] counts", "has none"]),
        ([2, 2], 4, ["precision.keep_blocks=[2,2] keeps the first 2", "model's 4", "below 4"]),
        ("paper", 2, ["=paper keeps the first 1 and the last 1 of the model's 2", "leave"]),
        ([9, 0], 3, ["keeps the first 9 and the last 0 of the model's 3"]),
    ],
    ids=str,
)
def test_a_model_without_enough_blocks_is_refused_unchanged(value, blocks, parts):
    model = Stack(blocks)
    kinds = [type(module) for module in model.modules()]
    precision = registry.load_precision("float8-rowwise", emulate=True, keep_blocks=value)
    with pytest.raises(ConfigError) as caught:
        precision.convert(model)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert [type(module) for module in model.modules()] == kinds
