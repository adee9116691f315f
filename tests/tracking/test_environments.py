"""What the environment says reaches the runs, and no password does. Real SQLite stores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from faults import progress_of
from forked_process import run_forked
from waiting import SECONDS

from runner.core.base.secrets import redact
from runner.tracking.uri import resolve_experiment_id

CWD = Path("/lab")


@pytest.fixture(scope="module")
def record(store, tmp_path_factory, start_trainer):
    """Make one run in a process with some variables of MLflow's; an exception is its last error."""
    runs = tmp_path_factory.mktemp("runs")

    def made(folder, variables=(), **info):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        given = {"experiment": None, "info": {"tags": {"precision": "32-true"}, **info}}
        trainer = start_trainer(
            store.uri, runs / folder, "finished", env=variables, **given, **pipes
        )
        _, stderr = trainer.communicate(timeout=SECONDS)
        if trainer.returncode:
            raise RuntimeError(stderr)
        return runs / folder, store.run(progress_of(runs / folder).run_id)

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


def test_an_unknown_experiment_id_is_reported(record):
    said = r"TrackingError: .*MLFLOW_EXPERIMENT_ID=987654. Unset it, or type"
    with pytest.raises(RuntimeError, match=said):
        record("unknown", {"MLFLOW_EXPERIMENT_ID": "987654"})


@pytest.fixture(scope="module")
def told(record, store):
    """A run whose environment names an experiment, tags and another run, with a password in its
    own params, tags and name: its folder, the run, and the ids of the two that were named."""
    _, first = record("first")
    theirs = store.client.create_run(first.info.experiment_id).info.run_id
    named = store.experiment("by id")
    around = {"ci.job": 17, "precision": "theirs", "mlflow.source.name": "theirs"}
    variables = {
        "MLFLOW_EXPERIMENT_ID": named,
        "MLFLOW_RUN_CONTEXT": json.dumps(around),
        "MLFLOW_RUN_ID": theirs,
    }
    secret = "tracking.uri=http://user:secret@host"
    info = {
        "params": {"tracking.uri": "http://user:secret@host"},
        "tags": {"precision": "32-true", "command": f"runner {secret}"},
        "name": f"sweep {secret}",
    }
    return *record("told", variables, **info), named, theirs


def test_a_run_goes_to_the_experiment_of_the_environment(told):
    _, run, named, _ = told
    assert run.info.experiment_id == named


def test_tags_of_mlflows_contexts_are_added_and_the_runs_own_replace_them(told):
    _, run, _, _ = told
    tags = run.data.tags
    assert (tags["ci.job"], tags["precision"]) == ("17", "32-true")
    assert tags["mlflow.source.name"] != "theirs"


def test_a_run_that_the_environment_names_is_not_changed(told, store):
    _, run, _, theirs = told
    assert run.info.run_id != theirs
    assert "mlflow.parentRunId" not in run.data.tags
    left = store.run(theirs)
    assert (left.info.status, left.data.params, left.data.metrics) == ("RUNNING", {}, {})


def test_no_password_reaches_the_store(told):
    folder, run, _, _ = told
    assert run.data.params["tracking.uri"] == "http://host"
    assert run.data.tags["command"] == "runner tracking.uri=http://host"
    assert run.info.run_name == "sweep tracking.uri=http://host"
    (journal,) = folder.glob("journal*.jsonl")
    assert journal.stat().st_mode & 0o077 == 0


SCRIPT = """
import sys
from pathlib import Path

import mlflow
from hydra import compose, initialize_config_module

from runner.config.hydra_plugins import VERSION_BASE
from runner.config.resolve import register_schema, resolve_spec
from runner.core.run.run import run_spec
from runner.rooms import install_rooms

mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("notebook")
install_rooms()
register_schema()
with initialize_config_module("runner.conf", **VERSION_BASE):
    spec = resolve_spec(compose("config", ["model=mlp", "model.hidden=[16]", "train.max_steps=3"]))
with mlflow.start_run() as mine:
    mlflow.log_metric("before", 1.0)
    result = run_spec(spec, Path("out"))
    assert mlflow.active_run().info.run_id == mine.info.run_id
    mlflow.log_metric("after", 2.0)
print(mine.info.run_id, result.run_id, result.experiment_id)
"""


@pytest.mark.slow
def test_a_run_inside_an_open_run_of_the_users_is_complete(tmp_path, reader, clean, empty_store):
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
