"""Data of npz and parquet files, as fields of batches."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq

from runner.data.datasets.npz import npz
from runner.data.datasets.parquet import parquet
from runner.data.splits import split_fields
from runner.utils.errors import ConfigError

TEXTS = ["one two", "two", "three one two three", "one", "two two two two two two", "three"]


@pytest.fixture
def arrays(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, a=np.arange(20.0).reshape(10, 2), b=np.arange(10), y=np.arange(10) % 3)
    return str(path)


def test_arrays_become_fields_and_are_split_without_overlap(arrays):
    train, val = npz(arrays, val_fraction=0.2)
    assert (len(train), len(val)) == (8, 2)
    whole = [*train.fields["b"].tolist(), *val.fields["b"].tolist()]
    assert sorted(whole) == list(range(10))
    example = val[0]
    assert set(example) == {"a", "b", "labels"}
    assert (example["a"].dtype, example["labels"].dtype) == (torch.float32, torch.int64)
    assert example["labels"] == example["b"] % 3
    batch = train.batch(torch.tensor([1, 0]))
    assert torch.equal(batch["a"][0], train[1]["a"])
    assert npz(arrays, inputs=["a"], val_path=arrays).val.fields.keys() == {"a", "labels"}
    again = npz(arrays, val_fraction=0.2).val
    assert torch.equal(again.fields["b"], val.fields["b"])


def test_arrays_that_cannot_be_used_are_refused(tmp_path, arrays):
    objects = tmp_path / "objects.npz"
    np.savez(objects, x=np.array([{}], dtype=object), y=np.zeros(1))
    ragged = tmp_path / "ragged.npz"
    np.savez(ragged, x=np.zeros(3), y=np.zeros(2))
    files = {name: str(tmp_path / f"{name}.npz") for name in ("scalar", "text", "labels")}
    np.savez(files["scalar"], rate=np.array(3.0), x=np.zeros(2), y=np.zeros(2))
    np.savez(files["text"], names=np.array(["a", "b"]), x=np.zeros(2), y=np.zeros(2))
    np.savez(files["labels"], x=np.zeros(2), labels=np.zeros(2), y=np.zeros(2))
    np.save(tmp_path / "one.npy", np.zeros(2))
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes(Path(arrays).read_bytes()[:300])
    only_x = npz(files["scalar"], inputs=["x"], val_path=files["scalar"]).val
    assert only_x.fields.keys() == {"x", "labels"}
    named = npz(files["labels"], target="labels", val_path=files["labels"]).val
    assert named.fields.keys() == {"x", "y", "labels"}
    table = [
        ({"path": str(tmp_path / "one.npy")}, "holds one array without a name. Write it with"),
        ({"path": str(tmp_path / "empty.npz")}, "empty.npz cannot be read: No data left in file"),
        ({"path": str(tmp_path / "cut.npz")}, "cut.npz cannot be read: File is not a zip file"),
        ({"path": files["scalar"]}, r"array rate of .* is one number, .* data\.inputs="),
        ({"path": files["text"]}, "array names of .* holds <U1, no numbers"),
        ({"path": files["text"], "target": "names", "inputs": ["x"]}, "array names of .* <U1"),
        ({"path": files["labels"]}, r"has an array labels, and .*\. Type data\.target=labels"),
        ({"path": "absent.npz"}, "absent.npz is no file"),
        ({"path": str(objects)}, "cannot be read: Object arrays cannot be loaded"),
        ({"path": str(ragged)}, "differ in their length: x: 3, y: 2"),
        ({"path": arrays, "target": "z"}, "has no array z; it has a, b, y"),
        ({"path": arrays, "val_fraction": 1.0}, "leaves an empty split"),
    ]
    for keywords, said in table:
        with pytest.raises(ConfigError, match=said):
            npz(**keywords)


@pytest.fixture
def rows(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for i in range(2):
        part = slice(3 * i, 3 * i + 3)
        columns = {
            "text": TEXTS[part],
            "size": [float(len(text)) for text in TEXTS[part]],
            "pair": [[i, len(text)] for text in TEXTS[part]],
            "kind": [0, 1, 2],
            "ragged": [[1], [1, 2], [3]],
        }
        pq.write_table(pa.table(columns), folder / f"{i}.parquet")
    return str(folder)


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_columns_of_numbers_are_read_from_every_file_of_a_folder(rows):
    train, val = parquet(rows, columns=["size", "pair"], target="kind", val_path=rows)
    assert train.fields["size"].tolist() == [len(text) for text in TEXTS]
    assert train.fields["pair"].shape == (6, 2)
    assert val.fields["labels"].tolist() == [0, 1, 2, 0, 1, 2]


def test_texts_are_cut_or_padded_and_padding_has_no_label(rows, tokenizer):
    fields = parquet(rows, text="text", tokenizer=tokenizer, length=4, val_path=rows).val.fields
    assert fields["input_ids"][2].tolist() == [3, 1, 2, 3]
    assert fields["input_ids"][0].tolist() == [1, 2, 0, 0]
    assert fields["attention_mask"][0].tolist() == [1, 1, 0, 0]
    assert fields["labels"][0].tolist() == [1, 2, -100, -100]
    classes = parquet(rows, text="text", tokenizer=tokenizer, target="kind", val_path=rows).val
    assert classes.fields["labels"].tolist() == [0, 1, 2, 0, 1, 2]


def test_fields_of_different_lengths_are_not_split():
    fields = {"a": torch.zeros(3), "b": torch.zeros(2)}
    with pytest.raises(ValueError, match="one number of examples, got a: 3, b: 2"):
        split_fields(fields, 1, 0)


def test_packed_texts_have_no_padding(rows, tokenizer):
    packed = parquet(
        rows, text="text", tokenizer=tokenizer, length=5, packing=True, val_path=rows
    ).val
    stream = " ".join(TEXTS).split()
    assert packed.fields["input_ids"].shape == (len(stream) // 5, 5)
    assert packed[0]["labels"].tolist() == [1, 2, 2, 3, 1]


def test_a_folder_of_a_hugging_face_tokenizer_is_loaded(rows, tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "folder")
    loaded = parquet(rows, text="text", tokenizer=str(tmp_path / "folder"), length=4, val_path=rows)
    assert loaded.val.fields["input_ids"][2].tolist() == [3, 1, 2, 3]


def test_tables_that_cannot_be_used_are_refused(rows, tokenizer, tmp_path):
    text = {"path": rows, "text": "text", "tokenizer": tokenizer}
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no table")
    table = [
        ({"path": rows}, "neither data.text nor data.columns names an input"),
        ({"path": "absent", "columns": ["size"]}, "no parquet file is at absent"),
        ({"path": str(broken), "columns": ["size"]}, "broken.parquet cannot be read"),
        ({"path": rows, "columns": ["sizes"], "target": "kind"}, "has no column sizes; it has"),
        ({"path": rows, "columns": ["size"]}, "no column is the target"),
        ({"path": rows, "columns": ["text"], "target": "kind"}, "no numbers. Texts are read with"),
        ({"path": rows, "columns": ["ragged"], "target": "kind"}, "differ in length"),
        ({"path": rows, "text": "text"}, "data.text=text needs a tokenizer"),
        ({**text, "text": "kind"}, "column kind holds values of type int, no texts"),
        ({**text, "tokenizer": "absent"}, "data.tokenizer=absent does not exist"),
        ({**text, "tokenizer": str(broken)}, "cannot be loaded"),
        ({**text, "packing": True, "target": "kind"}, "Type data.packing=false"),
        ({**text, "packing": True, "length": 500}, "fewer than one example of data.length=500"),
        ({**text, "length": 1}, "length=1 is below 2"),
        ({**text, "packing": True, "columns": ["size"]}, r"columns=\[size\] have no rows of"),
        ({**text, "columns": ["labels"]}, r"labels, and data\.text=text makes .* data\.target="),
        ({**text, "columns": ["input_ids"]}, "Type others in data.columns"),
        ({"path": rows, "columns": ["labels"], "target": "kind"}, "and data.target=kind makes"),
    ]
    for keywords, said in table:
        with pytest.raises(ConfigError, match=said):
            parquet(**keywords)
