"""A store that all end-to-end tests share, and code of a user's own."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from run_folders import write_files

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mlflow's imports, not ours
    from mlflow.tracking import MlflowClient

NETS = '''
import time

import torch
from torch import nn

RSS = []


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


class Net(nn.Module):
    """One hidden layer with dropout; fails in the given training step where asked to."""

    def __init__(self, classes: int, width: int = 16, fail_at: int | None = None) -> None:
        super().__init__()
        RSS.append(resident())
        self.fail_at, self.calls = fail_at, 0
        self.body = nn.Sequential(nn.Flatten(), nn.LazyLinear(width), nn.ReLU(), nn.Dropout(0.5))
        self.body(torch.zeros(1, 1, 8, 8))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls == self.fail_at:
            raise ArithmeticError("failed as it was told to")
        return self.head(self.body(x))


class Slow(Net):
    """Fifty steps in a second at most."""

    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


class Half(Net):
    """Parameters that are not float32."""

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.head.half()


class Uninitialised(nn.Module):
    """A constructor without that of its base class."""

    def __init__(self, **sizes) -> None:
        self.head = nn.Linear(4, 4)
'''
DATA = '''
import torch
from torch.utils.data import Dataset


class Rows(Dataset):
    """Rows of a list, with inputs in a dictionary's place where asked to."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 1, 8, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], int(self.x[index].sum() > 0)


def rows(count: int, val: int = 20):
    return Rows(count), Rows(val)


def one_set(count: int):
    return Rows(count)
'''
FILES = {
    "lab/__init__.py": "",
    "lab/nets.py": NETS,
    "lab/data.py": DATA,
    "lab/conf/model/net.yaml": (
        "# Mine\n_target_: lab.nets.Net\nclasses: ${data.meta.classes}\nwidth: 16\nfail_at: null\n"
    ),
    "lab/conf/data/mine.yaml": (
        "# Mine\ndefaults:\n  - override /task@_global_.task: classification\n\n"
        "_target_: lab.data.rows\ncount: 60\nmeta:\n  input: [1, 8, 8]\n  classes: 2\n"
    ),
}
OWN = ("--config-dir", "lab/conf", "model=net", "train.max_steps=3", "train.log_every=2")


def write_lab(folder):
    """A user's folder with code and configs of its own."""
    return write_files(folder, FILES)


@pytest.fixture
def lab(tmp_path):
    return write_lab(tmp_path)


@pytest.fixture
def own(lab, main):
    """A tiny run of a user's own model, without tracking."""
    return lambda *args: main(*OWN, "tracking=none", *args)


@pytest.fixture(scope="session")
def store(tmp_path_factory, empty_store):
    """URI of a store that begins without runs."""
    return empty_store(tmp_path_factory.mktemp("store") / "mlflow.db")


@pytest.fixture(scope="session")
def reader(store):
    """Return a function that makes a client of the store."""

    def made():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return MlflowClient(tracking_uri=store)

    return made


@pytest.fixture(scope="session")
def run_named(reader):
    """The one run of this name in the runner's own experiment."""

    def find(name):
        client = reader()
        experiment = client.get_experiment_by_name("precision-runner").experiment_id
        (run,) = client.search_runs([experiment], f"attributes.run_name = '{name}'")
        return run

    return find


@pytest.fixture(scope="session")
def lab_writer():
    return write_lab


def read_result(folder):
    """The newest result.json of the runs under a folder."""
    found = sorted(Path(folder).glob("outputs/runs/*/result.json"))
    return json.loads(found[-1].read_text())


@pytest.fixture(scope="session")
def result():
    return read_result


class FinishedRun(NamedTuple):
    """What a command printed, the folder of its run, and its result."""

    done: Any
    folder: Path
    result: dict


@pytest.fixture(scope="session")
def run_once(tmp_path_factory, inside):
    """Run a command once for all tests that need it. They change only copies of its folder."""
    finished = {}

    def run(*words):
        if words not in finished:
            folder = write_lab(tmp_path_factory.mktemp("once"))
            with inside(folder) as main:
                done = main(*words)
            assert done.rc == 0, done.stderr
            result = read_result(folder)
            finished[words] = FinishedRun(done, Path(result["folder"]), result)
        return finished[words]

    return run
