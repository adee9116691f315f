"""The pages that `runner ui` and `runner report` find, on real SQLite stores."""

import re
import signal
import socket
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from waiting import wait_for

from runner.cli.ui import _serve
from runner.core.record.journals import NOTE_TAG
from runner.tracking.dashboard import DASHBOARD_KEY
from runner.tracking.reader import Reader
from runner.tracking.uri import is_answering

# MLflow's own, of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_user_who_may_only_read_sees_the_existing_dashboards(empty_store, tmp_path, monkeypatch):
    uri = empty_store(tmp_path / "mlflow.db")
    assert dict(Reader(uri).pages("mine")) == {"no experiment 'mine' yet": ""}
    client = MlflowClient(uri)
    mine = client.create_experiment("mine", artifact_location=str(tmp_path))

    def refuse(*_):
        raise MlflowException("Permission denied", error_code=7)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_experiment_tag", refuse)
        assert list(dict(Reader(uri).pages("mine"))) == ["runs"]
    both = dict(Reader(uri).pages("mine"))
    assert list(both) == ["sweeps", "runs"]
    client.delete_experiment_tag(mine, NOTE_TAG)
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    assert dict(Reader(uri).pages("mine")) == both
    assert f"viewStateShareKey={DASHBOARD_KEY}&" in both["sweeps"]


def test_a_store_that_is_not_there_is_made_as_a_first_run_makes_it(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("runner.tracking.writer.store._create", lambda *given: made.append(given))
    database = tmp_path / "outputs" / "mlflow.db"
    found = dict(Reader(f"sqlite:///{database}", make=True).pages("mine"))
    assert found == {"no experiment 'mine' yet": ""}
    assert len(made) == 1
    assert database.with_name("mlflow.db.lock").exists()


def test_a_report_of_a_store_that_is_not_there_makes_none(main, tmp_path):
    main("report").check_refused("nothing was logged to sqlite:///")
    assert not list(tmp_path.rglob("*.db"))


@pytest.mark.slow
def test_the_ui_says_when_it_is_ready_and_listens_on_loopback_only(start_command, tmp_path):
    """As the kernel reports it of the server and its workers."""
    ui = start_command("ui")
    assert ui.stdout is not None
    ready = re.compile(r"^ready: http://127\.0\.0\.1:(\d+)$")
    port = next(int(found[1]) for line in ui.stdout if (found := ready.search(line)))
    assert is_answering(port, "/version")
    record = tmp_path / "outputs" / "mlflow.db.port"
    assert record.read_text() == str(port)

    def addresses():
        children = psutil.Process(ui.pid).children(recursive=True)
        ours = {ui.pid, *(child.pid for child in children)}
        found = [c for c in psutil.net_connections("inet") if c.pid in ours]
        return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}

    assert wait_for(addresses, ui) == {("127.0.0.1", port)}
    ui.send_signal(signal.SIGINT)
    assert ui.wait() == 0
    assert not record.exists()


@pytest.mark.slow
def test_the_end_of_a_server_that_does_not_start_is_printed_with_its_log(
    tmp_path, capsys, empty_store
):
    uri = empty_store(tmp_path / "mlflow.db")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert _serve(uri, other.getsockname()[1], {}) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert any("already in use" in line for line in lines)
    log = Path(last.rpartition(" ")[2])
    assert lines[-1] in log.read_text()
    log.unlink()
    assert last.startswith("MLflow's server ended with status ")
