"""The same data have the same digest in every process, other data another one, and no data set
fails a run."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from items import Items
from PIL import Image
from torch.utils.data import Subset, TensorDataset

from runner.data.datasets.digits import digits
from runner.data.datasets.imagefolder import imagefolder
from runner.data.fingerprint import SAMPLE_COUNT, describe_data, fact_problems, learned_facts
from runner.data.splits import Splits


def described(dataset, node=None):
    return describe_data("mine", node or {}, Splits(dataset, dataset))[0]


def digest(dataset):
    return described(dataset)["digest"]


def tensors(seed=0, count=100):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.arange(count))


def test_the_description_of_digits():
    node = {"_target_": "runner.data.datasets.digits.digits", "seed": 0, "meta": {"classes": 10}}
    train, val = describe_data("digits", node, digits())
    assert (train["name"], train["context"], val["context"]) == ("digits", "training", "validation")
    assert train["digest"] != val["digest"]
    assert len(train["digest"]) == 16
    assert train["source_type"] == "code"
    assert json.loads(train["source"]) == {"tags": {"target": node["_target_"], "seed": "0"}}
    assert json.loads(val["profile"]) == {"num_rows": 359, "classes": 10}
    spec = json.loads(json.loads(train["schema"])["mlflow_tensorspec"]["features"])
    tensor = {"dtype": "float32", "shape": [-1, 1, 8, 8]}
    assert spec == [{"type": "tensor", "tensor-spec": tensor}]


def test_the_digest_follows_the_data_and_nothing_else():
    assert digest(tensors()) == digest(tensors())
    assert digest(tensors()) == described(tensors(), {"seed": 1})["digest"]
    assert digest(tensors()) != digest(tensors(seed=1))
    assert digest(tensors()) != digest(tensors(count=99))
    images, targets = tensors().tensors
    assert digest(TensorDataset(images.double(), targets)) != digest(tensors())
    assert digest(TensorDataset(images.view(100, 3, 1), targets)) != digest(tensors())
    assert digest(Subset(tensors(), range(50))) != digest(tensors())
    assert digest(Subset(tensors(), range(100))) == digest(tensors())


def test_another_process_computes_the_same_digest(root):
    script = (
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "from runner.data.fingerprint import describe_data\n"
        "from runner.data.splits import Splits\n"
        "generator = torch.Generator().manual_seed(0)\n"
        "data = TensorDataset(torch.randn(100, 3, generator=generator), torch.arange(100))\n"
        "print(describe_data('mine', {}, Splits(data, data))[0]['digest'])\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1800)
    assert done.stdout.strip() == digest(tensors()), done.stderr


def test_few_samples_are_read_the_first_and_the_last_among_them():
    asked = []

    def make(index):
        asked.append(index)
        return torch.tensor([index]), index

    described(Items(make, count=10_000))
    assert (len(set(asked)), min(asked), max(asked)) == (SAMPLE_COUNT, 0, 9999)
    assert len(asked) <= 2 * (SAMPLE_COUNT + 1)


def test_random_samples_do_not_move_the_digest_nor_the_runs_random_numbers():
    def draw(_):
        return torch.rand(2) + random.random() + np.random.rand(), 0

    torch.manual_seed(1)
    first = digest(Items(draw))
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert digest(Items(draw)) == first
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


class Thing:
    """An object without bytes, which counts by its type."""


WEIRD = {
    "object": lambda i: (Thing(), i),
    "dict": lambda i: ({"ids": torch.tensor([i]), "mask": torch.ones(3)}, i),
    "tuple": lambda i: ((torch.ones(2) * i, torch.zeros(1)), 0.5),
    "strings": lambda i: (f"text {i}", b"label"),
    "arrays": lambda i: (np.full((2, 2), i), np.float32(1)),
    "picture": lambda i: (Image.new("RGB", (4, 4), (i, 0, 0)), i),
    "bfloat16": lambda i: (torch.full((2,), i, dtype=torch.bfloat16), None),
    "complex": lambda i: (torch.full((2,), i * 1j), torch.tensor(i)),
    "scalar": lambda i: (torch.tensor(i), True),
    "ragged": lambda i: (torch.full((i + 1,), float(i)), i),
    "empty": lambda i: (torch.empty(0), torch.tensor(i)),
    "nested": lambda i: ({"a": {"b": torch.tensor(i)}}, i),
}


@pytest.mark.parametrize("kind", WEIRD)
def test_any_sample_has_a_digest_of_its_own(kind):
    make = WEIRD[kind]
    assert digest(Items(make)) == digest(Items(make))
    assert digest(Items(make)) != digest(Items(lambda i: make(i + 1)))
    json.dumps(described(Items(make)))


def test_flat_nests_have_a_schema_by_name():
    schema = json.loads(described(Items(WEIRD["dict"]))["schema"])["mlflow_tensorspec"]
    specs = json.loads(schema["features"])
    shapes = {spec["name"]: spec["tensor-spec"]["shape"] for spec in specs}
    assert shapes == {"ids": [-1, 1], "mask": [-1, 3]}
    assert described(Items(WEIRD["nested"]))["schema"] is None


@pytest.mark.parametrize("error", [RuntimeError("broken file"), KeyError(3), OSError("gone")])
def test_a_sample_that_fails_does_not_fail_the_run(error):
    def fail(_):
        raise error

    found = described(Items(fail), {"_target_": "mine.data"})
    assert found["schema"] is None
    assert json.loads(found["profile"]) == {"num_rows": 10}
    assert found["digest"] == described(Items(fail), {"_target_": "mine.data"})["digest"]


@pytest.fixture
def pictures(tmp_path):
    made = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / "set" / kind).mkdir(parents=True)
        for i in range(4):
            pixels = made.integers(0, 255, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "set" / kind / f"{i}.png")
    return tmp_path / "set"


def test_the_digest_of_a_folder_of_images_covers_its_files(pictures):
    def describe_folder(**more):
        target = "runner.data.datasets.imagefolder.imagefolder"
        node = {"_target_": target, "root": str(pictures), **more}
        splits = imagefolder(str(pictures), size=8, val_fraction=0.25, **more)
        return describe_data("imagefolder", node, splits)

    train, _ = describe_folder()
    assert train["source_type"] == "local"
    assert json.loads(train["source"]) == {"uri": str(pictures)}
    assert json.loads(train["profile"]) == {"num_rows": 6, "classes": 2}
    assert describe_folder(augment=True)[0]["digest"] == train["digest"]
    moved = pictures.rename(pictures.with_name("elsewhere"))
    elsewhere = imagefolder(str(moved), size=8, val_fraction=0.25)
    assert described(elsewhere.train)["digest"] == train["digest"]
    for path in (moved / "cat").iterdir():
        Image.new("RGB", (20, 20)).save(path)
    assert described(elsewhere.train)["digest"] != train["digest"]


def test_classes_are_described_for_class_numbers_only():
    node = {"meta": {"classes": 4}}
    numbers = TensorDataset(torch.ones(4, 2), torch.arange(4))
    values = TensorDataset(torch.ones(4, 2), torch.ones(4, 4))
    assert json.loads(described(numbers, node)["profile"])["classes"] == 4
    assert "classes" not in json.loads(described(values, node)["profile"])


class Named(TensorDataset):
    def __init__(self, classes):
        super().__init__(torch.ones(4, 2), torch.zeros(4).long())
        self.classes = classes


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        (["a", "b", "c"], ["a", "c"], "the classes of x and of the val set differ: b on one side"),
        (["a", "b"], ["b", "a"], "the classes of x and of the val set differ. Give both"),
        (["a", "b", "c"], ["a", "b"], ""),
        ([0, 1, 2], [0, 2], ""),  # numbers are no names
    ],
)
def test_classes_are_alike_where_each_name_has_one_number(train, val, message):
    problems = fact_problems(learned_facts(Named(train)), "x", {"val": Named(val)})
    text = " ".join(problems)
    assert message in text
    assert bool(text) is bool(message)
