"""The pages that `runner ui` and `runner report` find, on real SQLite stores."""

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from runner.tracking.dashboard import KEY, NOTE_TAG
from runner.ui import pages

# MLflow's own, of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_who_may_only_read_sees_what_is_there(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert dict(pages(uri, "http://h", "mine")) == {"no experiment 'mine' yet": "http://h"}
    client = MlflowClient(uri)
    mine = client.create_experiment("mine", artifact_location=str(tmp_path))

    def refuse(*_):
        raise MlflowException("Permission denied", error_code=7)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_experiment_tag", refuse)
        assert list(dict(pages(uri, "http://h", "mine"))) == ["runs"]
    both = dict(pages(uri, "http://h", "mine"))
    assert list(both) == ["dashboard", "runs"]
    client.delete_experiment_tag(mine, NOTE_TAG)
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    assert dict(pages(uri, "http://h", "mine")) == both
    assert f"viewStateShareKey={KEY}&" in both["dashboard"]


def test_a_store_that_is_not_there_is_made_as_a_first_run_makes_it(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("runner.tracking.store._create", lambda *given: made.append(given))
    database = tmp_path / "outputs" / "mlflow.db"
    assert dict(pages(f"sqlite:///{database}", "http://h", "mine")) == {
        "no experiment 'mine' yet": "http://h"
    }
    assert len(made) == 1
    assert database.with_name("mlflow.db.lock").exists()


def test_a_report_of_a_store_that_is_not_there_makes_none(main, tmp_path):
    done = main("report")
    assert done.rc == 2
    assert "nothing was logged to sqlite:///" in done.stderr
    assert not list(tmp_path.rglob("*.db"))
