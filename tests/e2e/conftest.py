"""A store that all end-to-end tests share, and code of a user's own."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from quiet_mlflow import client_of, runs_in
from run_folders import read_json, write_lab

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

    return lambda: client_of(store)


@pytest.fixture(scope="session")
def run_named(reader):
    """The one run of this name in the runner's own experiment."""

    def find(name):
        (run,) = (run for run in runs_in(reader()) if run.info.run_name == name)
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


@pytest.fixture
def copy_of_run(run_once, tmp_path):
    """Return the folder of a command's run in a copy of its working directory, the test's own."""

    def copied(*words):
        folder = run_once(*words).folder
        home = folder.parents[2]
        shutil.copytree(home, tmp_path, dirs_exist_ok=True)
        return tmp_path / folder.relative_to(home)

    return copied
