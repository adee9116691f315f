"""Which store a run goes to is decided before anything starts, and does not move with chdir."""

from pathlib import Path

import pytest

from runner.tracking.mlflow import MlflowTracker
from runner.tracking.uri import resolve_experiment, resolve_uri, sqlite_path
from runner.utils.errors import ConfigError

CWD = Path("/lab")


@pytest.mark.parametrize(
    ("given", "env", "expected"),
    [
        (None, {}, "sqlite:////lab/outputs/mlflow.db"),
        (None, {"MLFLOW_TRACKING_URI": ""}, "sqlite:////lab/outputs/mlflow.db"),
        (None, {"MLFLOW_TRACKING_URI": "http://host:5000/"}, "http://host:5000"),
        ("sqlite:///a.db", {"MLFLOW_TRACKING_URI": "http://host"}, "sqlite:////lab/a.db"),
        ("sqlite:////data/a.db?timeout=9", {}, "sqlite:////data/a.db?timeout=9"),
        ("postgresql+psycopg2://u:p@host/db", {}, "postgresql+psycopg2://u:p@host/db"),
        ("databricks", {}, "databricks"),
        ("databricks://profile", {}, "databricks://profile"),
        ("mlruns", {"MLFLOW_ALLOW_FILE_STORE": "true"}, "file:///lab/mlruns"),
        ("file:///data/mlruns", {"MLFLOW_ALLOW_FILE_STORE": "true"}, "file:///data/mlruns"),
    ],
)
def test_uri_is_absolute(given, env, expected):
    assert resolve_uri(given, env, CWD) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("htp://host:5000", r"tracking.uri=htp://host:5000: there is no store of kind 'htp'"),
        ("http://", "names no server"),
        ("mlruns", "no longer keeps runs in plain folders"),
        ("file:///data/mlruns", "tracking.uri=sqlite:///outputs/mlflow.db"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_a_bad_uri_is_refused_at_once_with_what_to_type(given, message):
    with pytest.raises(ConfigError, match=message):
        MlflowTracker(uri=given)


def test_a_bad_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI=mlruns"):
        MlflowTracker()


def test_experiment_comes_from_config_then_environment():
    env = {"MLFLOW_EXPERIMENT_NAME": "theirs"}
    assert resolve_experiment("mine", env) == "mine"
    assert resolve_experiment(None, env) == "theirs"
    assert resolve_experiment(None, {}) == "precision-runner"


def test_database_file_of_a_uri():
    assert sqlite_path("sqlite:////lab/a.db?x=1") == Path("/lab/a.db")
    assert sqlite_path("http://host") is None
