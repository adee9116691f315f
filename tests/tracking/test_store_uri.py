"""Which store a run goes to is decided before anything starts, and does not move with chdir."""

from pathlib import Path

import pytest

from runner.core.base.errors import ConfigError
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.uri import check_store, resolve_experiment, resolve_uri, sqlite_path
from runner.tracking.writer.store import Store

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
        ("file:///my%20runs", {"MLFLOW_ALLOW_FILE_STORE": "true"}, "file:///my%20runs"),
        ("my%20runs", {"MLFLOW_ALLOW_FILE_STORE": "true"}, "file:///lab/my%2520runs"),
        ("sqlite:///my runs/a.db", {}, "sqlite:////lab/my runs/a.db"),
        ("sqlite:///my%20runs/a.db", {}, "sqlite:////lab/my runs/a.db"),
        ("sqlite:///a%23b.db?timeout=9", {}, "sqlite+pysqlite:////lab/a%23b.db?timeout=9"),
    ],
)
def test_uri_is_absolute(given, env, expected):
    assert resolve_uri(given, env, CWD) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("htp://host:5000", r"tracking.uri=htp://host:5000: there is no store of kind 'htp'"),
        ("http://", "names no server"),
        ("http://host:port", "names no server"),
        ("http://[::1", "names no server"),
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


FOLDERS = ("a b", "ü✓ #x?y=1&z", "a%2541b 100%", "$(touch CANARY) `touch CANARY`")
MORE_FOLDERS = (
    "it's",
    '"quoted"',
    "two\nlines\tand a tab",
    "a%41b",
    "a#b",
    "a;b:c@d[e]{f}",
    "${oc.env:HOME}",
    "back\\slash",
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's, of SQLAlchemy
@pytest.mark.parametrize(
    "name", [*FOLDERS, *(pytest.param(name, marks=pytest.mark.extended) for name in MORE_FOLDERS)]
)
def test_the_default_store_lies_in_the_working_directory_whatever_its_name(
    name, tmp_path, monkeypatch, empty_store, reader
):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # The first folder's tables are MLflow's own work, which takes seconds.
    if name != FOLDERS[0]:
        empty_store(folder / "outputs" / "mlflow.db")
    uri = resolve_uri(None, {}, folder)
    check_store(uri)
    assert resolve_uri(uri, {}, CWD) == uri
    assert sqlite_path(uri) == folder / "outputs" / "mlflow.db"
    store = Store(uri)
    run = store.create_run(store.experiment("odd"), "a run", 1, {})
    store.log_points(run, [("loss", 0.5, 1, 7)])
    (folder / "note.txt").write_text(name)
    store.log_artifact(run, folder / "note.txt", "notes")

    # By a path that needs no quoting.
    (tmp_path / "link").symlink_to(folder)
    there = reader(f"sqlite:///{tmp_path}/link/outputs/mlflow.db")
    assert [(step, value) for step, _, value in there.points(run, "loss")] == [(7, 0.5)]
    (note,) = (folder / "outputs" / "mlartifacts").rglob("note.txt")
    assert note.read_text() == name
    assert Path(there.client.download_artifacts(run, "notes/note.txt")).read_text() == name
    assert {path.name for path in tmp_path.iterdir()} == {name, "link"}
    assert not list(tmp_path.rglob("CANARY"))


def test_a_folder_that_mlflow_cannot_name_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / 'it\'s "quoted"'
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"both kinds of quotes\. Type cd"):
        check_store(resolve_uri(None, {}, folder))
