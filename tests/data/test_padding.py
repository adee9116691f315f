"""Padding collators."""

import pickle

import numpy as np
import pytest
import torch

from runner.core.base.errors import ConfigError
from runner.data.padding import pad


def tokens(*values):
    return torch.tensor(values)


def test_pairs_of_different_lengths():
    pairs = [(tokens(1, 2, 3), tokens(4, 5, 6)), (tokens(7), tokens(8))]
    inputs, targets = pad(pairs)
    assert inputs.tolist() == [[1, 2, 3], [7, 0, 0]]
    assert targets.tolist() == [[4, 5, 6], [8, -100, -100]]


def test_options_set_values_and_lengths():
    padding = pad(input_value=9, target_value=-1, multiple_of=4)
    inputs, targets = pickle.loads(pickle.dumps(padding))([(tokens(1), tokens(2, 3))])
    assert inputs.tolist() == [[1, 9, 9, 9]]
    assert targets.tolist() == [[2, 3, -1, -1]]


def test_fields_of_dicts():
    rows = [
        {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [3, 4], "text": "ab"},
        {"input_ids": [5], "attention_mask": [1], "labels": [6], "text": "c"},
    ]
    batch = pad(rows, input_value=50)
    assert batch["input_ids"].tolist() == [[1, 2], [5, 50]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [[3, 4], [6, -100]]
    assert batch["text"] == ["ab", "c"]


def test_features_and_class_numbers():
    rows = [(torch.ones(2, 3), np.ones(2), 1), (torch.ones(4, 3), np.ones(1), 0)]
    inputs, more, targets = pad(rows)
    assert inputs.shape == (2, 4, 3)
    assert inputs[0, 2:].count_nonzero() == 0
    assert more.tolist() == [[1, 1], [1, 0]]
    assert targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("examples", "options", "message"),
    [
        ([(torch.ones(2, 3), 0), (torch.ones(2, 4), 0)], {}, r"input 0 has .* \[2, 3\] and"),
        ([(torch.ones(2), 0), (torch.ones(()), 0)], {}, "only the first size may differ"),
        ([{"a": 1}, {"b": 1}], {}, "example 1 of the batch lacks the field a"),
        ([torch.ones(2)], {}, r"an example is a Tensor\. Yield \(input, target\)"),
        (None, {"multiple_of": 0}, "multiple_of=0 does not fit"),
    ],
)
def test_what_cannot_be_padded_is_refused(examples, options, message):
    with pytest.raises(ConfigError, match=message):
        pad(examples, **options)
