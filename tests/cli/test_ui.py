"""The pages that `runner ui` and `runner report` find, on real SQLite stores."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from runner.cli.ui import dashboard_urls
from runner.tracking.dashboard import DASHBOARD_KEY
from runner.tracking.tracker import NOTE_TAG

# MLflow's own, of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_user_who_may_only_read_sees_the_existing_dashboards(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
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
    assert dict(dashboard_urls(f"sqlite:///{database}", "http://h", "mine")) == {
        "no experiment 'mine' yet": "http://h"
    }
    assert len(made) == 1
    assert database.with_name("mlflow.db.lock").exists()


def test_a_report_of_a_store_that_is_not_there_makes_none(main, tmp_path):
    done = main("report")
    assert done.rc == 2
    assert "nothing was logged to sqlite:///" in done.stderr
    assert not list(tmp_path.rglob("*.db"))


@pytest.mark.slow
def test_the_ui_listens_on_loopback_only(tmp_path, clean):
    """As the kernel reports it of the server and its workers."""
    ui = subprocess.Popen(
        [sys.executable, "-m", "runner", "ui"],
        cwd=tmp_path,
        env=clean,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert ui.stdout is not None
        port = next(int(found[1]) for line in ui.stdout if (found := re.search(r":(\d+)", line)))
        end, heard = time.monotonic() + 90, []
        while not heard:
            assert ui.poll() is None
            assert time.monotonic() < end
            time.sleep(0.3)
            ours = {
                ui.pid,
                *(child.pid for child in psutil.Process(ui.pid).children(recursive=True)),
            }
            heard = [
                c.laddr
                for c in psutil.net_connections("inet")
                if c.pid in ours and c.status == psutil.CONN_LISTEN
            ]
        assert {(address.ip, address.port) for address in heard} == {("127.0.0.1", port)}
    finally:
        os.killpg(ui.pid, signal.SIGKILL)
        ui.communicate()
