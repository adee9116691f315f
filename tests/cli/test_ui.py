"""The pages that `runner ui` and `runner report` find, on real SQLite stores."""

import re

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from waiting import wait_for

from runner.cli.ui import dashboard_urls
from runner.core.record.journals import NOTE_TAG
from runner.tracking.dashboard import DASHBOARD_KEY

# MLflow's own, of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_user_who_may_only_read_sees_the_existing_dashboards(empty_store, tmp_path, monkeypatch):
    uri = empty_store(tmp_path / "mlflow.db")
    assert dict(dashboard_urls(uri, "http://h", "mine")) == {"no experiment 'mine' yet": "http://h"}
    client = MlflowClient(uri)
    mine = client.create_experiment("mine", artifact_location=str(tmp_path))

    def refuse(*_):
        raise MlflowException("Permission denied", error_code=7)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_experiment_tag", refuse)
        assert list(dict(dashboard_urls(uri, "http://h", "mine"))) == ["runs"]
    both = dict(dashboard_urls(uri, "http://h", "mine"))
    assert list(both) == ["dashboard", "runs"]
    client.delete_experiment_tag(mine, NOTE_TAG)
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    assert dict(dashboard_urls(uri, "http://h", "mine")) == both
    assert f"viewStateShareKey={DASHBOARD_KEY}&" in both["dashboard"]


def test_a_store_that_is_not_there_is_made_as_a_first_run_makes_it(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("runner.tracking.writer.store._create", lambda *given: made.append(given))
    database = tmp_path / "outputs" / "mlflow.db"
    found = dict(dashboard_urls(f"sqlite:///{database}", "http://h", "mine"))
    assert found == {"no experiment 'mine' yet": "http://h"}
    assert len(made) == 1
    assert database.with_name("mlflow.db.lock").exists()


def test_a_report_of_a_store_that_is_not_there_makes_none(main, tmp_path):
    main("report").check_refused("nothing was logged to sqlite:///")
    assert not list(tmp_path.rglob("*.db"))


@pytest.mark.slow
def test_the_ui_listens_on_loopback_only(start_command):
    """As the kernel reports it of the server and its workers."""
    ui = start_command("ui")
    assert ui.stdout is not None
    port = next(int(found[1]) for line in ui.stdout if (found := re.search(r":(\d+)", line)))

    def addresses():
        children = psutil.Process(ui.pid).children(recursive=True)
        ours = {ui.pid, *(child.pid for child in children)}
        found = [c for c in psutil.net_connections("inet") if c.pid in ours]
        return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}

    assert wait_for(addresses, ui) == {("127.0.0.1", port)}
