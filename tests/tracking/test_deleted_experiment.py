"""An experiment that was deleted in MLflow stays as it was left, and the user is told."""

import sqlite3

import pytest
from mlflow.tracking import MlflowClient

from runner.tracking.uri import sqlite_path
from runner.tracking.writer.store import Store
from runner.tracking.writer.store_errors import RefusedError

# MLflow's, which runs in this process here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def deleted(tmp_path):
    """(store, client, id) of an experiment "old" with two runs; one had been deleted before it."""
    store = Store(f"sqlite:///{tmp_path}/mlflow.db")
    client = MlflowClient(store.uri)
    experiment = client.create_experiment("old")
    first = client.create_run(experiment).info.run_id
    client.create_run(experiment)
    client.delete_run(first)
    client.delete_experiment(experiment)
    return store, client, experiment


def rows(store):
    with sqlite3.connect(sqlite_path(store.uri)) as database:
        runs = database.execute("select run_uuid, lifecycle_stage, deleted_time from runs")
        names = database.execute("select experiment_id, name, lifecycle_stage from experiments")
        return sorted(runs.fetchall()), sorted(names.fetchall())


def test_runs_go_to_another_experiment_and_the_deleted_one_is_unchanged(deleted):
    store, client, experiment = deleted
    before = rows(store)
    beside = store.experiment("old")
    assert beside != experiment
    assert client.get_experiment(beside).name == "old 2"
    (notice,) = store.notices
    assert "'old' was deleted there: runs go to 'old 2'" in notice
    assert f"restore --experiment-id {experiment}" in notice
    assert Store(store.uri).experiment("old") == beside, "every process finds the same one"
    assert rows(store)[0] == before[0]
    assert set(before[1]) < set(rows(store)[1])
    client.delete_experiment(beside)
    third = Store(store.uri).experiment("old")
    assert client.get_experiment(third).name == "old 3"


def test_a_deleted_experiment_named_by_its_id_is_refused_with_the_command_to_restore_it(deleted):
    store, _, experiment = deleted
    with pytest.raises(RefusedError, match=rf"'old' .*restore --experiment-id {experiment}"):
        store.experiment("anything", known_id=experiment)


def test_the_command_in_the_message_restores_the_experiment(deleted):
    store, client, experiment = deleted
    client.restore_experiment(experiment)
    assert store.experiment("old") == experiment


def test_restoring_an_experiment_to_rename_it_would_restore_its_runs(deleted):
    """Why the experiment is not set aside under another name: that takes three calls, and after
    the first one also the run that had been deleted before it is there, for everybody."""
    _, client, experiment = deleted
    client.restore_experiment(experiment)
    assert len(client.search_runs([experiment])) == 2
    theirs = client.create_run(client.get_experiment_by_name("old").experiment_id).info.run_id
    client.rename_experiment(experiment, "old (deleted)")
    client.delete_experiment(experiment)
    assert client.get_run(theirs).info.lifecycle_stage == "deleted"
