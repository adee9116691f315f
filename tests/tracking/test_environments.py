"""What the environment says reaches the runs, and no password does. Real SQLite stores."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults import progress_of
from forked_process import run_forked
from waiting import SECONDS

from runner.tracking.uri import resolve_experiment_id
from runner.utils.secrets import redact

CWD = Path("/lab")


@pytest.fixture
def record(store, tmp_path, monkeypatch, start_trainer):
    """Make one run in a process with the test's environment; the exception is its last error."""
    for key in [key for key in os.environ if key.startswith("MLFLOW_")]:
        monkeypatch.delenv(key)
    numbers = itertools.count()

    def made(**info):
        folder = tmp_path / f"run-{next(numbers)}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        given = {"tags": {"precision": "32-true"}, **info}
        trainer = start_trainer(store.uri, folder, "finished", experiment=None, info=given, **pipes)
        _, stderr = trainer.communicate(timeout=SECONDS)
        if trainer.returncode:
            raise RuntimeError(stderr)
        return store.run(progress_of(folder).run_id)

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
    said = r"TrackingError: .*MLFLOW_EXPERIMENT_ID=987654. Unset it, or type"
    with pytest.raises(RuntimeError, match=said):
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
    run = record(params=params, tags=tags, name=f"sweep tracking.uri={secret}")
    assert run.data.params["tracking.uri"] == "http://host"
    assert run.data.tags["command"] == "runner tracking.uri=http://host"
    assert run.info.run_name == "sweep tracking.uri=http://host"
    (journal,) = tmp_path.glob("run-0/journal*.jsonl")
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
def test_a_run_inside_an_open_run_of_the_users_is_separate_and_complete(
    tmp_path, reader, clean, empty_store
):
    uri = empty_store(tmp_path / "mlflow.db")
    script = tmp_path / "notebook.py"
    script.write_text(SCRIPT)
    done = run_forked([sys.executable, str(script), uri], SECONDS, cwd=tmp_path, env=clean)
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
