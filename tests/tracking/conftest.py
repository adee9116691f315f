"""A real SQLite store, and a way to read it with MLflow's own client."""

import json
import sys
from pathlib import Path

import pytest
from environments import ROOT, clean_env
from forked_process import ForkedProcess
from quiet_mlflow import client_of
from serving import Server


class StoreReader:
    """The content of a store, read with MLflow's client."""

    def __init__(self, uri):
        self.uri = uri
        self._client = None

    @property
    def client(self):
        # Late, so that the store is first made by the code under test.
        self._client = self._client or client_of(self.uri)
        return self._client

    def run(self, run_id):
        return self.client.get_run(run_id)

    def points(self, run_id, key):
        """Return (step, time, value) of every stored point, in order of steps."""
        history = self.client.get_metric_history(run_id, key)
        return sorted((point.step, point.timestamp, point.value) for point in history)

    def experiment(self, name):
        """Return the id of an experiment; create it, with its artifacts next to a database."""
        found = self.client.get_experiment_by_name(name)
        if found:
            return found.experiment_id
        prefix, _, path = self.uri.partition("sqlite:///")
        beside = None if prefix else str(Path(path).parent / "mlartifacts")
        return self.client.create_experiment(name, artifact_location=beside)

    def named(self, experiment, name):
        """Return the runs of a name in an experiment."""
        found = self.client.get_experiment_by_name(experiment)
        query = f"attributes.run_name = '{name}'"
        return self.client.search_runs([found.experiment_id], query) if found else []


@pytest.fixture(scope="session")
def store(tmp_path_factory, empty_store):
    """Return a SQLite store without runs."""
    return StoreReader(empty_store(tmp_path_factory.mktemp("store") / "outputs" / "mlflow.db"))


@pytest.fixture(scope="session")
def reader():
    return StoreReader


@pytest.fixture(scope="session")
def server_url(tmp_path_factory, empty_store):
    """Return the address of MLflow's own server, one for all tests."""
    folder = tmp_path_factory.mktemp("served")
    server = Server(folder, empty_store(folder / "mlflow.db"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def server(tmp_path, empty_store):
    """A server of a test's own, which has not begun yet."""
    folder = tmp_path / "server"
    server = Server(folder, empty_store(folder / "mlflow.db"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def start_trainer():
    """Return a function that starts a trainer process: (store, run's folder, how it ends).

    `info` has fields of RunInfo, `env` its variables of MLflow's; further options are those of
    subprocess.Popen.
    """
    script = ROOT / "tests" / "helpers" / "trainer_script.py"

    def start(
        uri, folder, ending, popen=ForkedProcess, experiment="endings", info=(), env=(), **options
    ):
        given = json.dumps({"experiment": experiment, **dict(info)})
        command = [sys.executable, str(script), uri, str(folder), ending, given]
        return popen(command, text=True, env=clean_env(**dict(env)), **options)

    return start
