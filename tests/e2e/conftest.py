"""A store that all end-to-end tests share, and code of a user's own."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from run_folders import read_json, write_lab

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mlflow's imports, not ours
    from mlflow.tracking import MlflowClient

OWN = ("--config-dir", "lab/conf", "model=net", "train.max_steps=3", "train.log_every=2")


@pytest.fixture
def lab(tmp_path):
    """A user's folder with code and configs of its own."""
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


def read_result(folder):
    """The newest result.json of the runs under a folder."""
    found = sorted(Path(folder).glob("outputs/runs/*/result.json"))
    return read_json(found[-1])


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
                done = main(*words).check_ok()
            result = read_result(folder)
            finished[words] = FinishedRun(done, Path(result["folder"]), result)
        return finished[words]

    return run
