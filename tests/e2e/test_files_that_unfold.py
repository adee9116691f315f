"""Small files that stand for gigabytes end in a message, before the memory is full."""

import gzip
import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from hostile import QUICK
from PIL import Image
from pyarrow import parquet as pq

import runner
from runner.config.trusted_targets import folder_config
from runner.core.base.errors import ConfigError
from runner.core.base.files import check_values
from runner.core.record import checkpoint_file
from runner.data.datasets.hf_dataset import hf_dataset
from runner.data.datasets.imagefolder import decoded_image
from runner.data.datasets.parquet import parquet
from runner.sweeps.report.sweep_data import flat_config

LEVELS = 30


def bomb():
    """A list of two of the same list, and so on: 2^30 leaves."""
    inner = ["x"]
    for _ in range(LEVELS):
        inner = [inner, inner]
    return inner


def wide():
    """A list that is in many places, none of which is deep."""
    return [["x"] * 1000] * 100_000


@pytest.fixture(autouse=True)
def _in_seconds():
    before = time.monotonic()
    yield
    assert time.monotonic() - before < 120


@pytest.mark.parametrize("content", [bomb(), wide(), {"a": {"b": bomb()}}])
def test_values_that_are_in_many_places_count_in_each(content):
    with pytest.raises(ConfigError, match="it holds more than 100000 values"):
        check_values(content)
    shared = {"a": 1}
    check_values({"a": [shared, shared], "b": [[1, 2.0, None]] * 9})


def test_a_config_of_aliases(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.dump({"mode": "train", "vars": bomb()}))
    with pytest.raises(ConfigError, match=re.escape("config.yaml holds more than 100000 values")):
        folder_config(tmp_path, "checkpoint")
    assert flat_config((tmp_path / "config.yaml").read_text()) == {}
    (tmp_path / "config.yaml").write_text("a: " + 2**20 * "1")
    with pytest.raises(ConfigError, match=re.escape("config.yaml is damaged")):
        folder_config(tmp_path, "checkpoint")
    (tmp_path / "config.yaml").write_text("a: &x {b: 1}\nc: *x\n")
    config = folder_config(tmp_path, "checkpoint")
    assert config is not None
    assert config.values == {"a": {"b": 1}, "c": {"b": 1}}


NUMBERS = range(1, LEVELS)
LISTS = (f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in NUMBERS)
MERGED = (f"a{i}: &a{i} {{<<: *a{i - 1}, l: *a{i - 1}, r: *a{i - 1}}}\n" for i in NUMBERS)
ALIASES = {
    "lists": "a0: &a0 [x]\n" + "".join(LISTS),
    "merged keys": "a0: &a0 {x: {y: 1}}\n" + "".join(MERGED),
}


@pytest.mark.parametrize("place", ["model/mine.yaml", "mine.yaml"])
@pytest.mark.parametrize("kind", ALIASES)
def test_a_folder_of_configs_with_aliases(main, tmp_path, kind, place):
    path = tmp_path / "configs" / place
    path.parent.mkdir(parents=True)
    path.write_text(f"# Mine\n_target_: torch.nn.Identity\n{ALIASES[kind]}")
    main("--config-dir", "configs", *QUICK, "model=mine").check_refused(
        f"configs/{place}, with its aliases unfolded, holds more than 100000 values"
    )
    with pytest.raises(ConfigError, match="with its aliases unfolded"):
        runner.compose([], config_dir="configs")


def test_a_folder_of_configs_with_few_aliases_or_files_that_are_not_needed(main, tmp_path):
    (tmp_path / "configs/model").mkdir(parents=True)
    mine = "# Mine\ndefaults: [mlp]\nhidden: &sizes [4]\nbias: true\n"
    (tmp_path / "configs/model/mine.yaml").write_text(mine)
    for name, text in (("few", "a: &a {x: 1}\nb: {<<: *a}"), ("broken", "a: &a ]\nb: *c")):
        (tmp_path / f"configs/{name}.yaml").write_text(text)
    (tmp_path / "configs/binary.yaml").write_bytes(b"\xff & *")
    (tmp_path / "configs/labels.yaml").write_text("# R&D *\n" + "- 1\n" * 100_001)
    assert main("--config-dir", "configs", *QUICK).rc == 0


def test_a_model_s_config_of_aliases(tmp_path):
    pytest.importorskip("transformers")
    from runner.models.huggingface import huggingface

    (tmp_path / "model.yaml").write_text(yaml.dump({"model_type": "gpt2", "a": bomb()}))
    with pytest.raises(ValueError, match="it has aliases"):
        huggingface("causal_lm", config=str(tmp_path / "model.yaml"))


def test_a_checkpoint_whose_config_is_in_many_places(main, tmp_path):
    assert main(*QUICK, f"hydra.run.dir={tmp_path}/run").rc == 0
    (path,) = (tmp_path / "run" / "checkpoints").glob("*.pt")
    content = torch.load(path, weights_only=True)
    content["spec"]["vars"] = {"a": bomb()}
    torch.save(content, path)
    with pytest.raises(ConfigError, match="its spec holds what no config does"):
        checkpoint_file.load(path)


def texts():
    """A text of 100 kB, 3,000 times."""
    text = pa.array(["a" * 100_000])
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(3000, np.int32)), text)


def lists():
    """One list of 5 million numbers."""
    return pa.ListArray.from_arrays([0, 5_000_000], np.zeros(5_000_000, np.float32))


PARQUET = {"numbers": lambda: pa.array(np.zeros(5_000_000)), "texts": texts, "lists": lists}


@pytest.mark.parametrize("kind", PARQUET)
def test_a_parquet_file_of_equal_values(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("runner.data.unpacked_size.MAX_UNPACKED_BYTES", 2**22)
    values = PARQUET[kind]()
    table = pa.table({"x": values, "y": np.zeros(len(values), np.int8)})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    del table, values
    assert (tmp_path / "x.parquet").stat().st_size < 150_000
    used = pa.total_allocated_bytes()
    with pytest.raises(ConfigError, match=r"unpacks to 0\.\d GiB or more, which is more than the"):
        parquet(path=str(tmp_path / "x.parquet"), columns=["x"], target="y")
    assert pa.total_allocated_bytes() - used < 2**25
    if kind != "texts":
        pytest.importorskip("datasets")
        with pytest.raises(ConfigError, match=r"unpacks to 0\.\d GiB or more"):
            hf_dataset(path=str(tmp_path / "x.parquet"), columns=["x"], target="y")


def test_a_file_of_parquet_is_read_as_before(tmp_path):
    """In its groups of rows, with categories, and without rows."""
    from runner.data.datasets import parquet as module

    columns = SimpleNamespace(names=["c", "x"], check_present=lambda *_: None)
    words = pa.array(["a", "b", "a", None] * 50).dictionary_encode()
    table = pa.table({"x": np.arange(200.0), "unused": np.arange(200), "c": words})
    for name, part in (("a", table), ("b", table.slice(0, 0)), ("c", table.slice(5))):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=70)
    read = module._read(str(tmp_path), columns)
    assert read.column("x").to_pylist() == [*range(200), *range(5, 200)]
    assert read.column("c").to_pylist() == [*words.to_pylist(), *words.to_pylist()[5:]]
    assert module._read(str(tmp_path / "b.parquet"), columns).num_rows == 0


def test_a_compressed_text_is_not_unpacked(tmp_path):
    pytest.importorskip("datasets")
    row = json.dumps({"x": 1.0, "y": 0}).encode() + b"\n"
    for name, content in (("a.jsonl", gzip.compress(row)), ("b.csv", gzip.compress(b"x,y\n1,0\n"))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name} is compressed. Unpack it first"):
            hf_dataset(path=str(tmp_path / name), columns=["x"], target="y")


def test_an_image_of_more_pixels_than_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("L", (20, 20)).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="of at most 178 million pixels") as caught:
        decoded_image(tmp_path / "a.png", "it")
    assert "Image size (400 pixels) exceeds limit of 200 pixels" in str(caught.value)


def test_a_report_of_configs_of_aliases(main, tmp_path):
    words = ("-m", "seed=0,1", "hydra/launcher=basic")
    assert main(*QUICK, *words, f"hydra.sweep.dir={tmp_path}/v").rc == 0
    for job in ("0", "1"):
        (tmp_path / "v" / job / "config.yaml").write_text(yaml.dump({"vars": bomb()}))
    done = main("report", f"{tmp_path}/v", f"{tmp_path}/v", f"--out={tmp_path}/r")
    assert done.rc in (0, 2)
    assert "Traceback" not in done.stderr
    main(*QUICK, f"checkpoint.resume={tmp_path}/v/0").check_refused("job of a sweep")
