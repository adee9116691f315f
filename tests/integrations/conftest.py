"""A folder to train in with a real SQLite store, and a way to read what arrived there."""

import sqlite3
from contextlib import closing
from types import SimpleNamespace

import pytest
from run_folders import read_json

from runner.core.run.run_result import RunResult


class Lab:
    """A working directory with MLflow's store in its default place."""

    def __init__(self, folder):
        self.folder = folder

    @property
    def runs(self):
        """Folders of the runs outside of groups, oldest first."""
        return sorted((self.folder / "outputs" / "runs").iterdir())

    @property
    def run(self):
        (folder,) = self.runs
        return folder

    def result(self, folder=None):
        return RunResult.read(folder or self.run)

    def points(self, result, name):
        """Return {step: value} of a metric in the store."""
        rows = self._read(
            "select step, value, is_nan from metrics where run_uuid = ? and key = ?",
            result.run_id,
            name,
        )
        points = {step: float("nan") if is_nan else value for step, value, is_nan in rows}
        assert len(points) == len({tuple(row) for row in rows}), f"{name}: a step is stored twice"
        return points

    def tags(self, result):
        return dict(self._read("select key, value from tags where run_uuid = ?", result.run_id))

    def params(self, result):
        return dict(self._read("select key, value from params where run_uuid = ?", result.run_id))

    def stored(self):
        """Return name, status and id of every run in the store, oldest first."""
        rows = self._read("select name, status, run_uuid from runs order by start_time")
        return [SimpleNamespace(name=name, status=status, id=id_) for name, status, id_ in rows]

    def _read(self, query, *values):
        with closing(sqlite3.connect(self.folder / "outputs" / "mlflow.db")) as database:
            return database.execute(query, values).fetchall()

    def table(self, folder=None):
        """Return dtypes.json as a dict by module."""
        content = read_json((folder or self.run) / "dtypes.json")
        rows = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
        return {row["module"]: row for row in rows}


@pytest.fixture
def lab(tmp_path, monkeypatch, empty_store):
    """Return a Lab, which is the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    empty_store(tmp_path / "outputs" / "mlflow.db")
    return Lab(tmp_path)
