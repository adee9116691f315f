"""Local data of Hugging Face's datasets, and images in tables."""

import io

import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet as pq

from runner.data.datasets.hf_dataset import hf_dataset
from runner.data.datasets.imagefolder import imagefolder
from runner.data.datasets.parquet import parquet
from runner.data.fingerprint import describe_data
from runner.utils.errors import ConfigError

ROWS = {"size": [1.5, 2, 3, 4, 5, 6], "kind": [0, 1, 2, 0, 1, 2], "body": ["a b"] * 6}


@pytest.fixture(autouse=True)
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


def test_tables_that_cannot_be_used_are_refused(tmp_path, cache, photos):
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
        ({"path": photos}, "neither data.text nor data.columns names an input"),
        ({**image, "val": 1.5}, "leaves an empty split"),
        ({**image, "label": None}, "needs the column with the classes. Type data.label="),
        ({**image, "text": "name"}, "leave out data.text"),
        ({**image, "image": None, **numbers}, "data.image names no column"),
        ({**image, "image": "name"}, "holds .*string, no encoded images"),
        ({**image, "label": "name"}, "Number the classes from 0"),
        ({**image, "size": 0}, "size=0 is below 1"),
    ]
    for keywords, said in table:
        with pytest.raises(ConfigError, match=said):
            hf_dataset(**keywords)
