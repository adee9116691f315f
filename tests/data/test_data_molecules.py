"""Molecules with masked tokens: the fields of a batch, the same in each call."""

import importlib.util

import pytest
import torch

from runner.core.base.errors import ConfigError
from runner.core.base.files import package_file
from runner.data.datasets.molecules import molecules

VOCABULARY = "models/transformers/albert_heads_8_uspto_all_1310k/vocab.txt"
needs_vocabulary = pytest.mark.skipif(
    package_file("rxnmapper", VOCABULARY) is None,
    reason="the package rxnmapper, which brings the vocabulary, is missing",
)
needs_table = pytest.mark.skipif(
    importlib.util.find_spec("chemicals") is None,
    reason="the package chemicals, which brings the molecules, is missing",
)
SMILES = ["CCN1C=NC2=C1N=CN=C2N", "CC12CCC(=O)CC1CCC3C2CCC4", "CC(=O)OC1=CC=CC=C1", "CO", "C C C"]
FIRST_NORMAL, CLS, MASK = 15, 12, 14


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "smiles.txt"
    path.write_text("\n".join(SMILES * 10))
    return str(path)


@needs_vocabulary
def test_labels_are_the_tokens_in_the_place_of_masks_and_nothing_else(file):
    train, val = molecules(file, length=32, val_fraction=0.2)
    # CO is too short, and a space is no token.
    assert (len(train), len(val)) == (24, 6)
    batch = train.batch(torch.arange(24))
    ids, labels, attends = (batch[k] for k in ("input_ids", "labels", "attention_mask"))
    assert ids.shape == (24, 32)
    assert ids.dtype is labels.dtype is attends.dtype is torch.int64
    assert torch.equal(labels != -100, ids == MASK)
    assert (labels[labels != -100] >= FIRST_NORMAL).all()
    assert (ids[:, 0] == CLS).all()
    assert torch.equal(attends, (ids != 0).long())


@needs_vocabulary
def test_the_seed_alone_decides_about_masks_and_split(file):
    torch.manual_seed(1)
    first = molecules(file, length=32).val.fields["labels"]
    torch.manual_seed(2)
    assert torch.equal(molecules(file, length=32).val.fields["labels"], first)
    assert not torch.equal(molecules(file, length=32, seed=1).val.fields["labels"], first)


@needs_vocabulary
@needs_table
def test_the_package_has_thousands_of_known_molecules():
    train, val = molecules()
    assert len(train) + len(val) == 4500
    # 11 is the unknown token.
    assert (train.fields["input_ids"] != 11).float().mean() > 0.999


@needs_vocabulary
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "absent.txt"}, "absent.txt is no file. Type data.path="),
        ({"masked": 1.0}, "masked=1.0 is no share between 0 and 1. Type data.masked=0.15"),
        ({"length": 9}, "Type data.length=10 or more"),
        ({"count": 1}, "Type data.count=2 or more"),
        ({"val_fraction": 0.0}, "Type data.val_fraction=0.1"),
    ],
)
def test_refusals_say_what_to_type(file, settings, message):
    with pytest.raises(ConfigError) as caught:
        molecules(**{"path": file, **settings})
    assert message in str(caught.value)


@pytest.mark.parametrize("package", ["chemicals", "rxnmapper"])
def test_a_missing_package_is_named_with_the_command(monkeypatch, package):
    def find(name, inside):
        return None if name == package else package_file(name, inside)

    monkeypatch.setattr("runner.core.base.files.package_file", find)
    if package == "chemicals" and package_file("rxnmapper", VOCABULARY) is None:
        pytest.skip("the package rxnmapper, which brings the vocabulary, is missing")
    with pytest.raises(ConfigError, match=f"pip install --no-deps {package}"):
        molecules()
