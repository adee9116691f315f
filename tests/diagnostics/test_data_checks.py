import math

import pytest
import torch
from items import CPU, Items
from torch.utils.data import TensorDataset

from runner.data.collate import Collator
from runner.data.detection import collate_detection
from runner.data.loader import Loader, LoaderOptions
from runner.diagnostics import data_checks
from runner.diagnostics.data_checks import data_problems
from runner.training.tasks.classification import Classification
from runner.training.tasks.detection import Detection
from runner.training.tasks.language import Language
from runner.training.tasks.regression import Regression


def in_a_nest(x, y):
    """Return the same samples, one at a time, with inputs in a nest."""
    return Items(lambda index: ({"x": x[index]}, y[index]), len(x))


every_kind = pytest.mark.parametrize("kind", [TensorDataset, in_a_nest])


def problems(x, y, task=None, classes=10, kind=TensorDataset, size=4):
    loader = Loader(kind(x, y), size, shuffle=False, seed=0, device=CPU)
    return list(data_problems(loader, "train", task or Classification(), classes, []))


def valid_data(count=20):
    return torch.zeros(count, 3), torch.arange(count) % 10


@every_kind
def test_valid_data_have_no_problem(kind):
    assert problems(*valid_data(), kind=kind) == []


@every_kind
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite_are_named(kind, value):
    x, y = valid_data()
    x[7, 1] = value
    assert problems(x, y, kind=kind) == [
        "data: sample 7 of the train set: its inputs are not finite."
    ]
    x[9] = value
    (message,) = problems(x, y, kind=kind)
    assert "sample 7 of the train set, and 1 more of the 20 looked at: its inputs" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_is_checked(dtype):
    x, y = valid_data()
    x[3, 0] = math.nan
    assert "sample 3 " in problems(x.to(dtype), y)[0]


@every_kind
@pytest.mark.parametrize(("label", "remedy"), [(12, ", or type data.meta.classes=13."), (-3, ".")])
def test_a_label_that_is_no_class_is_named(kind, label, remedy):
    x, y = valid_data()
    y[5] = label
    assert problems(x, y, kind=kind) == [
        f"data: sample 5 of the train set: label {label} is outside the 10 classes (0 to 9) of "
        f"data.meta.classes. Fix it{remedy}"
    ]


def test_the_label_that_cross_entropy_ignores_is_no_problem():
    x, y = valid_data()
    y[5] = -100
    assert problems(x, y) == []


def test_the_task_knows_what_a_label_is():
    tokens = torch.zeros(6, 4, dtype=torch.int64)
    tokens[2, 3] = 300
    (message,) = problems(tokens, tokens, Language(), 256)
    assert "sample 2 of the train set: label 300 is outside the 256 classes" in message
    assert problems(torch.zeros(6, 2), torch.full((6, 2), 99.0), Regression()) == []
    assert problems(*valid_data(), classes=None) == []


def test_real_targets_must_be_finite():
    y = torch.zeros(6, 2)
    y[4, 0] = math.nan
    (message,) = problems(torch.zeros(6, 2), y, Regression())
    assert "sample 4 of the train set: its targets" in message


def test_the_check_ends_after_its_batches_and_seconds(monkeypatch):
    x, y = valid_data(100)
    x[99] = math.nan
    assert problems(x, y, kind=in_a_nest) == []
    assert problems(x, y) != []
    monkeypatch.setattr(data_checks, "ROWS_PER_PIECE", 10)
    monkeypatch.setattr(data_checks, "MAX_CHECK_SECONDS", 0.0)
    assert problems(x, y) == []


@every_kind
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(20, 3), "inputs are the same"),
        (lambda: torch.arange(20.0)[:, None].expand(20, 3), None),
        (lambda: torch.rand(20, 3, 4, 4), None),
    ],
)
def test_inputs_that_are_all_alike_are_noted(kind, make, words):
    notes = []
    loader = Loader(kind(make(), torch.arange(20) % 10), 4, shuffle=False, seed=0, device=CPU)
    assert list(data_problems(loader, "train", Classification(), 10, notes)) == []
    assert (words is None) == (not notes)
    assert words is None or words in notes[0]


@every_kind
def test_labels_that_begin_at_1_are_named(kind):
    (message,) = problems(torch.rand(20, 3), torch.arange(20) % 3 + 1, classes=3, kind=kind)
    assert message.endswith("No label is 0: subtract 1 from all.")


def test_labels_of_boxes_are_not_told_to_begin_at_0():
    box = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    targets = [{"boxes": box, "labels": torch.tensor([label])} for label in (0, 0, 1)]
    rows = Items(lambda index: (torch.rand(3, 4, 4), targets[index]), 3)
    options = LoaderOptions(collator=Collator("own", collate_detection))
    loader = Loader(rows, 1, shuffle=False, seed=0, device=CPU, options=options)
    (message,) = data_problems(loader, "train", Detection({}), 1, [])
    assert "label 1 is outside" in message
    assert "subtract" not in message
