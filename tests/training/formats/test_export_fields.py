"""Models that take fields or several inputs become programs of plain dicts and tensors."""

import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from tiny_configs import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

from runner.core.loop.batch_layout import KeywordInputs, PositionalInputs
from runner.core.loop.model_call import call_model
from runner.precision.mixed import MixedPrecision
from runner.precision.true import TruePrecision
from runner.training.formats.export import ExportError, export
from runner.training.tasks.language import CausalLM

FLOAT32 = TruePrecision("32-true", "float32")
TOKENS = torch.randint(20, (5, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(5, 7, dtype=torch.int64)
MASK[1, 5:] = 0
TEXT = {"input_ids": TOKENS, "attention_mask": MASK}
IMAGES = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def gpt2():
    return AutoModelForCausalLM.from_config(tiny_config("gpt2", vocab_size=20)), TEXT


def bert():
    return AutoModelForMaskedLM.from_config(tiny_config("bert", vocab_size=20)), TEXT


def vit():
    config = tiny_config("vit", image_size=8, patch_size=4)
    return AutoModelForImageClassification.from_config(config), {"pixel_values": IMAGES}


def call(model, inputs):
    return CausalLM().select(call_model(model, inputs))


@pytest.mark.parametrize("make", [gpt2, bert, vit])
@pytest.mark.parametrize("name", ["32-true", "bf16-mixed"])
def test_a_transformers_model_takes_a_plain_dict_of_any_number_of_rows(make, name, tmp_path):
    torch.manual_seed(0)
    model, fields = make()
    precision = FLOAT32 if name == "32-true" else MixedPrecision(name, "bfloat16")
    made = export(model, precision, KeywordInputs(fields), tmp_path, call)
    program = torch.export.load(made.path).module()
    model.eval()
    for rows in (5, 2, 1):
        part = {field: tensor[:rows] for field, tensor in fields.items()}
        with torch.no_grad():
            found = program(part)
            with precision.forward(torch.device("cpu")):
                wanted = model(**part).logits.float()
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
    assert [spec["name"] for spec in made.facts["inputs"]] == [*fields]
    assert made.facts["fields"]
    assert not made.facts["one_tensor"]
    if make is not vit:
        assert [spec["shape"] for spec in made.facts["inputs"]] == [[-1, -1]] * 2
        assert made.facts["outputs"][0]["shape"] == [-1, -1, 20]
        part = {field: tensor[:, :3] for field, tensor in fields.items()}
        with torch.no_grad():
            assert program(part).shape == (5, 3, 20)


class Sum(nn.Module):
    """Takes two inputs, of which each row belongs to one example."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, a, b):
        return self.layer(a) + b


def test_several_inputs_are_taken_by_position(tmp_path):
    model = Sum()
    a, b = torch.randn(3, 3), torch.randn(3, 2)
    made = export(model, FLOAT32, PositionalInputs([a, b]), tmp_path, call_model)
    program = torch.export.load(made.path).module()
    with torch.no_grad():
        torch.testing.assert_close(program(a[:2], b[:2]), model(a[:2], b[:2]))
    assert [spec["name"] for spec in made.facts["inputs"]] == ["input_0", "input_1"]


def test_a_program_of_fields_loads_where_there_is_no_runner(tmp_path):
    inputs = KeywordInputs(a=torch.ones(3, 3), b=torch.ones(3, 2))
    export(Sum(), FLOAT32, inputs, tmp_path, call_model)
    script = (
        "import sys, torch\n"
        "program = torch.export.load('model.pt2').module()\n"
        "assert program({'a': torch.ones(6, 3), 'b': torch.ones(6, 2)}).shape == (6, 2)\n"
        "assert 'runner' not in sys.modules\n"
    )
    command = [sys.executable, "-P", "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


class Fixed(nn.Module):
    """Its forward takes sequences of one length, which it states by a size of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.layer = nn.Linear(7 * 4, 2)

    def forward(self, input_ids):
        return self.layer(self.embedding(input_ids).view(-1, 7 * 4))


class Guarded(Fixed):
    """It computes something else for short sequences, which one program cannot."""

    def forward(self, input_ids):
        total = self.embedding(input_ids).sum(1)
        return total if input_ids.shape[1] > 5 else -total


@pytest.mark.parametrize("kind", [Fixed, Guarded])
def test_a_model_of_one_length_is_exported_for_that_length(kind, tmp_path):
    inputs = KeywordInputs(input_ids=TOKENS)
    made = export(kind(), FLOAT32, inputs, tmp_path, call_model)
    assert made.facts["inputs"][0]["shape"] == [-1, 7]


class Output(OrderedDict):
    """A mapping of a library's own class, with attributes, as transformers' outputs are."""


class Parts(Sum):
    """It returns named tensors and a number."""

    def forward(self, a, b):
        return Output(logits=self.layer(a), shifted=super().forward(a, b), loss=a.sum())


def test_an_output_of_several_tensors_is_a_plain_dict_of_them(tmp_path):
    inputs = KeywordInputs(a=torch.randn(3, 3), b=torch.randn(3, 2))
    made = export(Parts(), FLOAT32, inputs, tmp_path, call_model)
    found = torch.export.load(made.path).module()(dict(inputs))
    assert type(found) is dict
    assert [spec["name"] for spec in made.facts["outputs"]] == ["logits", "shifted"] == [*found]
    assert not made.facts["one_output"]


class Swapped(Sum):
    """Its second field has a fixed number of rows."""

    def forward(self, a, b):
        return self.layer(a) + b.view(4, 2).mean(0)


@pytest.mark.parametrize(
    ("model", "inputs", "why"),
    [
        (Swapped(), {"a": torch.ones(4, 3), "b": torch.ones(4, 2)}, "4 rows of b for a constant"),
        (Sum(), {"a": torch.ones(4, 3), "b": ["x"]}, "input b is no tensor .* but a list"),
        (Sum(), {"a": torch.ones(4, 3), "b": torch.ones(2, 2)}, r"differ .* \(a: 4, b: 2\)"),
        (Sum(), {}, "takes no field of a batch"),
    ],
)
def test_fields_that_no_program_can_take_are_named(model, inputs, why, tmp_path):
    with pytest.raises(ExportError, match=why) as caught:
        export(model, FLOAT32, KeywordInputs(inputs), tmp_path, call_model)
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.iterdir()]
