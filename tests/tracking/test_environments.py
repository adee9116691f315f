"""What the environment says reaches the runs, and no password does. Real SQLite stores."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from runner.tracking.mlflow import MlflowTracker
from runner.tracking.tracker import RunInfo
from runner.tracking.uri import resolve_experiment_id
from runner.tracking.writer_process import WriterProcess
from runner.utils.errors import TrackingError
from runner.utils.secrets import redact

CWD = Path("/lab")


@pytest.fixture
def record(store, tmp_path, monkeypatch):
    """Makes one run with a writer of its own, which sees the test's environment."""
    for key in [key for key in os.environ if key.startswith("MLFLOW_")]:
        monkeypatch.delenv(key)

    def made(info=None, **given):
        writer = WriterProcess()
        monkeypatch.setattr("runner.tracking.mlflow.shared_writer", lambda: writer)
        tracker = MlflowTracker(uri=store.uri, **given)
        tracker.open(info or RunInfo(tmp_path / "run", {"a": "1"}, {"precision": "32-true"}))
        tracker.log_metrics([(1, 1, {"train/loss": 0.5})])
        tracker.close("FINISHED")
        writer.wait_at_exit()
        tracker.check()
        return store.run(tracker.run_id)

    return made


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pa@ss@host:5000/a", "http://host:5000/a"),
        ("https://token@host", "https://host"),
        (r"uri=http\://ann\:secret@host\:5000", r"uri=http\://host\:5000"),
        ("uri=postgresql+psycopg2://u:p/w@host/db x", "uri=postgresql+psycopg2://***@host/db x"),
        ("mysql://host/db?password=secret&ssl=1", "mysql://host/db?password=***&ssl=1"),
        ("http://host:5000/#/experiments/1?q=a@b", "http://host:5000/#/experiments/1?q=a@b"),
        ('{"a":"http://host","b":"x@y"}', '{"a":"http://host","b":"x@y"}'),
        ("sqlite:////data/a@b.db", "sqlite:////data/a@b.db"),
    ],
)
def test_credentials_in_a_uri_are_hidden_and_nothing_else(text, shown):
    assert redact(text) == shown


@pytest.mark.parametrize(
    ("name", "uri", "env", "expected"),
    [
        (None, None, {"MLFLOW_EXPERIMENT_ID": "7"}, "7"),
        (None, None, {"MLFLOW_EXPERIMENT_ID": ""}, None),
        ("mine", None, {"MLFLOW_EXPERIMENT_ID": "7"}, None),
        (None, None, {"MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_EXPERIMENT_NAME": "theirs"}, None),
        (None, "http://a/", {"MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_TRACKING_URI": "http://a"}, "7"),
        (None, "http://b", {"MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_TRACKING_URI": "http://a"}, None),
        (None, "http://b", {"MLFLOW_EXPERIMENT_ID": "7"}, "7"),
    ],
)
def test_an_experiment_id_counts_without_a_name_and_in_its_own_store(name, uri, env, expected):
    assert resolve_experiment_id(name, uri, env, CWD) == expected


def test_a_run_goes_to_the_experiment_of_the_environment(record, store, monkeypatch):
    record()
    wanted = store.experiment("by id")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", wanted)
    assert record().info.experiment_id == wanted


def test_an_unknown_experiment_id_is_reported(record, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "987654")
    with pytest.raises(TrackingError, match=r"MLFLOW_EXPERIMENT_ID=987654. Unset it, or type"):
        record()


def test_tags_of_mlflows_contexts_are_added_and_the_runs_own_replace_them(record, monkeypatch):
    around = {"ci.job": 17, "precision": "theirs", "mlflow.source.name": "theirs"}
    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", json.dumps(around))
    tags = record().data.tags
    assert (tags["ci.job"], tags["precision"]) == ("17", "32-true")
    assert tags["mlflow.source.name"] != "theirs"


def test_a_run_that_the_environment_names_is_not_changed(record, store, monkeypatch):
    theirs = store.client.create_run(record().info.experiment_id).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs)
    run = record()
    assert run.info.run_id != theirs
    assert "mlflow.parentRunId" not in run.data.tags
    left = store.run(theirs)
    assert (left.info.status, left.data.params, left.data.metrics) == ("RUNNING", {}, {})


def test_no_password_reaches_the_store(record, tmp_path):
    secret = "http://user:secret@host"
    params, tags = {"tracking.uri": secret}, {"command": f"runner tracking.uri={secret}"}
    run = record(RunInfo(tmp_path / "run", params, tags, name=f"sweep tracking.uri={secret}"))
    assert run.data.params["tracking.uri"] == "http://host"
    assert run.data.tags["command"] == "runner tracking.uri=http://host"
    assert run.info.run_name == "sweep tracking.uri=http://host"
    (journal,) = (tmp_path / "run").glob("journal*.jsonl")
    assert journal.stat().st_mode & 0o077 == 0


SCRIPT = """
import sys
from pathlib import Path

import mlflow
from hydra import compose, initialize_config_module

from runner.config.resolve import register_schema, resolve_spec
from runner.modes.run import run

mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("notebook")
register_schema()
with initialize_config_module(version_base="1.3", config_module="runner.conf"):
    spec = resolve_spec(compose("config", ["model=mlp", "model.hidden=[16]", "train.max_steps=3"]))
with mlflow.start_run() as mine:
    mlflow.log_metric("before", 1.0)
    result = run(spec, Path("out"))
    assert mlflow.active_run().info.run_id == mine.info.run_id
    mlflow.log_metric("after", 2.0)
print(mine.info.run_id, result.run_id, result.experiment_id)
"""


@pytest.mark.slow
def test_a_run_inside_an_open_run_of_the_users_is_separate_and_complete(tmp_path, reader, root):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), uri],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    mine, ours, experiment = done.stdout.split()[-3:]
    store = reader(uri)
    user, run = store.run(mine), store.run(ours)
    assert (user.info.status, user.data.metrics) == ("FINISHED", {"before": 1.0, "after": 2.0})
    assert user.data.params == {}
    assert run.info.status == "FINISHED"
    assert run.data.params["train.max_steps"] == "3"
    assert [step for step, *_ in store.points(ours, "train/loss")] == [1, 2, 3]
    assert "mlflow.parentRunId" not in run.data.tags
    # mlflow.set_experiment tells the processes after it by MLFLOW_EXPERIMENT_ID.
    assert run.info.experiment_id == user.info.experiment_id == experiment
