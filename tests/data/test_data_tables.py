"""Data of npz and parquet files and of Hugging Face's datasets: fields of batches, and images."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet as pq
from tiny_models import word_tokenizer
from tokenizers import processors

from runner.core.base.errors import ConfigError
from runner.data.datasets.hf_dataset import hf_dataset
from runner.data.datasets.imagefolder import imagefolder
from runner.data.datasets.npz import npz
from runner.data.datasets.parquet import batch_rows, parquet
from runner.data.fingerprint import describe_data, learned_facts
from runner.data.splits import TextPairs, split_fields

TEXTS = ["one two", "two", "three one two three", "one", "two two two two two two", "three"]
ROWS = {"size": [1.5, 2, 3, 4, 5, 6], "kind": [0, 1, 2, 0, 1, 2], "body": ["a b"] * 6}


def assert_refused(make, table):
    """Assert that each row of keywords is refused with its words."""
    for keywords, said in table:
        with pytest.raises(ConfigError, match=said):
            make(**keywords)


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
    # As the file has it: what the model gets is the precision's matter.
    assert (example["a"].dtype, example["labels"].dtype) == (torch.float64, torch.int64)
    assert example["labels"] == example["b"] % 3
    batch = train.batch(torch.tensor([1, 0]))
    assert torch.equal(batch["a"][0], train[1]["a"])
    assert npz(arrays, inputs=["a"], val_path=arrays).val.fields.keys() == {"a", "labels"}
    again = npz(arrays, val_fraction=0.2).val
    assert torch.equal(again.fields["b"], val.fields["b"])


@pytest.mark.parametrize("dtype", [">f4", ">i2", "float64", "longdouble", "complex64", "uint16"])
def test_arrays_of_every_dtype_keep_their_numbers(tmp_path, dtype):
    numbers = np.arange(6).astype(dtype) * (1 + 1j if dtype == "complex64" else 1)
    np.savez(tmp_path / "data.npz", x=numbers, y=numbers)
    path = str(tmp_path / "data.npz")
    fields = npz(path, val_path=path).train.fields
    assert fields["x"].tolist() == fields["labels"].tolist() == numbers.tolist()


@pytest.mark.parametrize(
    ("memory", "most", "message"),
    [
        (2**20, 2**40, r"unpacks to 0\.0 GiB or more, which is more than"),
        (2**40, 2**20, "or a hundred times the file"),
    ],
    ids=["larger than the memory", "a small file that unpacks to gigabytes"],
)
def test_arrays_are_refused_before_they_are_unpacked(tmp_path, monkeypatch, memory, most, message):
    np.savez_compressed(tmp_path / "big.npz", x=np.zeros((1024, 1024)), y=np.zeros(1024))
    monkeypatch.setattr("runner.data.unpacked_size.MAX_UNPACKED_BYTES", most)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=memory))
    with pytest.raises(ConfigError, match=message):
        npz(str(tmp_path / "big.npz"))


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
        ({"path": str(tmp_path / "one.npy")}, r"is one array. Type numpy.savez\(path, x=..., "),
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
    assert_refused(npz, table)


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


WORDS = ("[UNK]", "one", "two", "three")


@pytest.fixture
def tokenizer(tmp_path):
    word_tokenizer(WORDS).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
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


def test_packed_texts_are_told_apart_by_their_positions(rows, tokenizer):
    fields = parquet(
        rows, text="text", tokenizer=tokenizer, length=5, packing=True, separate=True, val_path=rows
    ).val.fields
    # "one two", "two", "three one two three", "one", "two two two two two two", "three"
    assert fields["input_ids"].tolist() == [[1, 2, 2, 3, 1], [2, 3, 1, 2, 2], [2, 2, 2, 2, 3]]
    assert fields["position_ids"].tolist() == [[0, 1, 0, 0, 1], [0, 1, 0, 0, 1], [0, 1, 2, 3, 0]]
    assert fields["labels"][0].tolist() == [-100, 2, -100, -100, 1]
    assert fields["labels"][2].tolist() == [-100, 2, 2, 2, -100]
    assert "attention_mask" not in fields  # with which transformers looks at no positions


@pytest.fixture
def folder(tmp_path):
    """The folder of a tokenizer with an end token, 4."""
    fast = word_tokenizer(WORDS, unk_token="[UNK]", eos_token="</s>")
    fast.save_pretrained(tmp_path / "ended")
    return str(tmp_path / "ended")


@pytest.mark.parametrize(
    ("end_token", "last"), [("auto", 4), (True, 4), ("three", 3), (False, None)]
)
def test_a_text_ends_with_one_end_token(rows, folder, end_token, last):
    given = {"text": "text", "tokenizer": folder, "length": 7, "val_path": rows}
    read = parquet(rows, end_token=end_token, **given).val.fields["input_ids"].tolist()
    assert read[0] == [1, 2, *([last] if last else []), *[0] * (4 if last else 5)]
    assert read[5][:2] == [3, 0 if last in (3, None) else 4]  # which has its end already
    # What is classified is as the tokenizer makes it, unless an end token is asked for.
    classes = parquet(rows, end_token=end_token, target="kind", **given).val.fields["input_ids"]
    assert classes[0].tolist() == ([1, 2, *[0] * 5] if end_token == "auto" else read[0])


def test_pairs_of_text_columns_are_inputs_and_labels(rows, folder):
    path = Path(rows).parent / "pairs.parquet"
    pq.write_table(pa.table({"src": ["one two", "two"], "tgt": ["three", "one one"]}), path)
    given = {"text": "src", "target": "tgt", "tokenizer": folder, "length": 4, "end_token": "auto"}
    pairs = parquet(str(path), val_path=str(path), **given).train
    assert isinstance(pairs, TextPairs)
    assert pairs.fields["input_ids"].tolist() == [[1, 2, 4, 0], [2, 4, 0, 0]]
    assert pairs.fields["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert pairs.fields["labels"].tolist() == [[3, 4, -100, -100], [1, 1, 4, -100]]


@pytest.mark.parametrize("target", ["kind", "text"])
def test_a_cut_text_keeps_the_end_that_its_tokenizer_adds(rows, tmp_path, caplog, target):
    fast = word_tokenizer([*WORDS, "</s>"], unk_token="[UNK]", eos_token="</s>")
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 4)]
    )
    fast.save_pretrained(tmp_path / "ending")
    given = {"text": "text", "target": target, "tokenizer": str(tmp_path / "ending"), "length": 4}
    fields = parquet(rows, val_path=rows, end_token="auto", **given).val.fields
    for name in ("input_ids", "labels") if target == "text" else ("input_ids",):
        assert fields[name][2].tolist() == [3, 1, 2, 4]
    assert "2 of 6 texts are cut at data.length=4" in caplog.text


@pytest.mark.parametrize("nested", [False, True], ids=["class", "list of classes"])
def test_names_of_classes_in_a_file_are_facts_of_its_data(tmp_path, cache, nested):
    label = cache.ClassLabel(names=["no", "yes"])
    kinds = [[0, 1], [1, 1]] if nested else [0, 1]
    features = {"size": cache.Value("float32"), "kind": cache.List(label) if nested else label}
    data = cache.Dataset.from_dict(
        {"size": [1.0, 2.0], "kind": kinds}, features=cache.Features(features)
    )
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    for path in (str(tmp_path / "saved"), str(tmp_path / "rows.parquet")):
        for part in columns(path, val=path):
            assert learned_facts(part) == {"classes": ["no", "yes"]}
    # The names count, and not what else a file's writer put there.
    table = pq.read_table(tmp_path / "rows.parquet").replace_schema_metadata({"huggingface": "[]"})
    pq.write_table(table, tmp_path / "other.parquet")
    other = str(tmp_path / "other.parquet")
    assert learned_facts(parquet(other, columns=["size"], target="kind", val_path=other).val) == {}


def test_another_vocabulary_is_another_fact(rows, tmp_path, tokenizer):
    word_tokenizer([*reversed(WORDS)]).backend_tokenizer.save(str(tmp_path / "reversed.json"))
    given = {"text": "text", "val_path": rows}
    known, same, other = (
        learned_facts(parquet(rows, tokenizer=path, length=length, **given).train)
        for path, length in ((tokenizer, 4), (tokenizer, 6), (str(tmp_path / "reversed.json"), 4))
    )
    assert known == same != other


def test_hidden_files_of_a_folder_are_left_out(rows):
    (Path(rows) / "._0.parquet").write_bytes(b"no table")
    assert len(parquet(rows, columns=["size"], target="kind", val_path=rows).train) == 6


def test_a_folder_of_a_hugging_face_tokenizer_is_loaded(rows, tmp_path):
    word_tokenizer(WORDS, unk_token="[UNK]").save_pretrained(tmp_path / "folder")
    loaded = parquet(rows, text="text", tokenizer=str(tmp_path / "folder"), length=4, val_path=rows)
    assert loaded.val.fields["input_ids"][2].tolist() == [3, 1, 2, 3]


def test_tables_that_cannot_be_used_are_refused(rows, tokenizer, tmp_path):
    text = {"path": rows, "text": "text", "tokenizer": tokenizer}
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"no table")
    table = [
        ({"path": rows}, "no input is named"),
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
        ({**text, "packing": True, "length": 500}, "15 tokens, fewer than data.length=500"),
        ({**text, "length": 1}, "length=1 is below 2"),
        (
            {**text, "end_token": True},
            r"names no end token. Type data\.end_token=<one of its tokens>, auto or false",
        ),
        ({**text, "end_token": "four"}, "has no such token"),
        ({**text, "packing": True, "columns": ["size"]}, "data.columns fits none"),
        ({**text, "columns": ["labels"]}, r"data\.text=text makes .* data\.target="),
        ({**text, "columns": ["input_ids"]}, "Type others in data.columns"),
        ({"path": rows, "columns": ["labels"], "target": "kind"}, "data.target=kind makes"),
    ]
    assert_refused(parquet, table)


# Hugging Face's datasets, and images in tables


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Keep the copies that datasets makes of files out of the home folder."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return datasets


@pytest.fixture
def encoded():
    """Images of two shapes as the bytes of PNG files."""
    found = []
    for i in range(6):
        file = io.BytesIO()
        color = (40 * i, 0, 255 - 40 * i)
        Image.new("RGB", (8 + i, 10), color).save(file, "PNG")
        found.append(file.getvalue())
    return found


@pytest.fixture
def photos(tmp_path, encoded):
    path = tmp_path / "photos.parquet"
    structs = [{"bytes": data, "path": None} for data in encoded]
    table = {"photo": encoded, "struct": structs, "kind": ROWS["kind"], "name": ["x"] * 6}
    pq.write_table(pa.table(table), path)
    return str(path)


def columns(path, **keywords):
    return hf_dataset(path, columns=["size"], target="kind", **keywords)


def test_saved_folders_and_files_of_every_kind_hold_the_same(tmp_path, cache):
    saved = cache.Dataset.from_dict(ROWS)
    saved.save_to_disk(tmp_path / "saved")
    saved.to_csv(tmp_path / "rows.csv")
    saved.to_json(tmp_path / "rows.jsonl")
    saved.to_parquet(tmp_path / "rows.parquet")
    for name in ("saved", "rows.csv", "rows.jsonl", "rows.parquet", "rows.p*"):
        path = str(tmp_path / name)
        train, val = columns(path, val=path)
        assert train.fields["size"].tolist() == ROWS["size"]
        assert val.fields["labels"].tolist() == ROWS["kind"]
    assert [len(part) for part in columns(path, val=0.5)] == [3, 3]


def test_selected_rows_and_splits_of_a_folder_are_followed(tmp_path, cache, caplog):
    saved = cache.Dataset.from_dict(ROWS)
    parts = {"train": saved.select([5, 0, 3]), "validation": saved.select([1]), "test": saved}
    cache.DatasetDict(parts).save_to_disk(tmp_path / "parts")
    path = str(tmp_path / "parts")
    train, val = columns(path)
    assert train.fields["size"].tolist() == [6, 1.5, 4]
    assert (len(val), caplog.messages) == (
        1,
        [f"data=hf validates on the split validation of {path} (data.val=validation)"],
    )
    assert len(columns(path, val="test").val) == 6
    assert len(columns(path, split="test", val=path).train) == 6


def test_images_of_datasets_are_those_of_a_folder_of_files(tmp_path, cache, encoded):
    files = []
    for i, data in enumerate(encoded):
        file = tmp_path / "folder" / str(i % 2) / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        files.append(str(file))
    features = cache.Features({"photo": cache.Image(), "kind": cache.ClassLabel(names=["a", "b"])})
    rows = {"photo": files, "kind": [i % 2 for i in range(6)]}
    cache.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    found = hf_dataset(path, val=path, image="photo", label="kind", size=8)
    wanted, _ = imagefolder(str(tmp_path / "folder"), size=8, val_fraction=0.2)
    by_file = {wanted.dataset.samples[i][0]: i for i in range(6)}
    for i, file in enumerate(files):
        image, label = found.train[i]
        expected, expected_label = wanted.dataset[by_file[file]]
        assert torch.equal(image, expected)
        assert label == expected_label


def test_images_of_a_parquet_file_are_bytes_or_structs(photos):
    keywords = {"label": "kind", "size": 6, "val_fraction": 0.5}
    plain = parquet(photos, image="photo", **keywords)
    struct = parquet(photos, image="struct", **keywords)
    assert [len(part) for part in plain] == [3, 3]
    for one, other in zip(plain.train, struct.train, strict=True):
        assert one[0].shape == (3, 6, 6)
        assert one[0].dtype is torch.float32
        assert torch.equal(one[0], other[0])
        assert one[1] == other[1]
    rows = [*plain.train.rows.tolist(), *plain.val.rows.tolist()]
    assert sorted(rows) == [*range(6)]
    again = parquet(photos, image="photo", augment=True, **keywords)
    assert torch.equal(again.val[0][0], plain.val[0][0])
    digests = [describe_data("x", {}, splits)[0]["digest"] for splits in (plain, struct)]
    assert digests[0] == digests[1] != describe_data("x", {}, plain)[1]["digest"]


def test_an_image_that_cannot_be_decoded_is_named_by_its_row(tmp_path, encoded):
    values = [encoded[0], encoded[1][:40], b"no image", None]
    path = tmp_path / "broken.parquet"
    pq.write_table(pa.table({"photo": values, "kind": [0, 1, 0, 1]}), path)
    train = parquet(str(path), str(path), image="photo", label="kind", size=6).train
    assert train[0][1] == 0
    for row in (1, 2, 3):
        with pytest.raises(ConfigError, match=f"column photo, row {row}: .* cannot be decoded"):
            train[row]


def test_data_of_hugging_face_that_cannot_be_used_are_refused(tmp_path, cache, photos):
    cache.DatasetDict({"a": cache.Dataset.from_dict(ROWS)}).save_to_disk(tmp_path / "parts")
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "rows.parquet").write_bytes(b"no table")
    numbers = {"columns": ["size"], "target": "kind"}
    image = {"path": photos, "image": "photo", "label": "kind"}
    table = [
        ({"path": "stanfordnlp/imdb", **numbers}, "data.path=stanfordnlp/imdb is not on this"),
        ({"path": photos, "val": "absent.csv", "image": "photo", "label": "kind"}, "data.val=abse"),
        ({"path": str(tmp_path), **numbers}, "no folder that save_to_disk wrote. .*It has .parq"),
        ({"path": str(tmp_path / "rows.txt"), **numbers}, "the files are .txt"),
        ({"path": str(tmp_path / "rows.parquet"), **numbers}, "rows.parquet cannot be read"),
        ({"path": str(tmp_path / "parts"), **numbers}, "has the splits a, and not train"),
        ({"path": photos, **numbers}, "has no column size; it has photo, struct, kind, name"),
        ({"path": photos}, "no input is named"),
        ({**image, "val": 1.5}, "leaves an empty split"),
        ({**image, "label": None}, "needs classes. Type data.label=<name>"),
        ({**image, "text": "name"}, "leave out data.text"),
        ({**image, "image": None, **numbers}, "needs data.image=<name>"),
        ({**image, "image": "name"}, "holds .*string, no encoded images"),
        ({**image, "label": "name"}, "Number the classes from 0"),
        ({**image, "size": 0}, "size=0 is below 1"),
    ]
    assert_refused(hf_dataset, table)


def test_columns_of_numbers_are_read_in_large_batches(tmp_path):
    table = pa.table({"x": np.random.default_rng(0).random(300_000), "y": np.zeros(300_000)})
    pq.write_table(table, tmp_path / "x.parquet")
    assert batch_rows(tmp_path / "x.parquet", ["x", "y"]) == 65_536
