"""What becomes of journals that nobody uploads, and of writers that die."""

import io
import subprocess
from unittest.mock import create_autospec

import pytest

from runner.core.config.signature import sign
from runner.core.record.journals import Journal
from runner.tracking import writer_process
from runner.tracking.upload_state import STORE_SIGNATURE_PURPOSE
from runner.tracking.writer_process import (
    MAX_SEARCHED_FOLDERS,
    WriterProcess,
    find_journals,
    upload_in_background,
)


@pytest.fixture
def runs(tmp_path):
    """Five folders of runs whose journals wait."""
    for number in range(5):
        journal = Journal(tmp_path / f"run-{number}")
        uri = "http://host"
        journal.append("start", uri=uri, signature=sign(STORE_SIGNATURE_PURPOSE, uri))
        journal.close()
    return tmp_path


def test_a_search_in_the_background_reads_the_newest_folders_only(runs, monkeypatch):
    assert MAX_SEARCHED_FOLDERS == 2000
    started = []
    monkeypatch.setattr(
        writer_process, "start_detached_writer", lambda journals, lock: started.extend(journals)
    )
    monkeypatch.setattr(writer_process, "MAX_SEARCHED_FOLDERS", 3)
    assert upload_in_background(runs) == 2
    assert [path.parent.name for path in started] == ["run-4", "run-3"]
    assert len([*find_journals(runs)]) == 5


def test_a_store_that_the_user_has_not_named_gets_nothing_in_the_background(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        writer_process, "start_detached_writer", lambda journals, lock: started.extend(journals)
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host")
    # The part before the last @ is no user of host in a URI with a ? before it.
    for uri in ("http://other", "http://other?@host", "sqlite:///theirs.db", "http://host"):
        journal = Journal(tmp_path / uri.replace("/", "_"))
        journal.append("start", uri=uri, signature="0" * 64)
        journal.close()
    upload_in_background(tmp_path)
    assert [path.parent.name for path in started] == ["http:__host"]


def test_a_writer_that_dies_is_started_again_twice(tmp_path, monkeypatch, caplog):
    started = []

    def start(folder):
        died = create_autospec(subprocess.Popen, instance=True, stdin=io.BytesIO(), returncode=9)
        died.poll.return_value = 9
        started.append(died)
        return died

    monkeypatch.setattr(writer_process, "start_writer", start)
    journal = Journal(tmp_path)
    writer = WriterProcess()
    writer.add_journal(journal.path)
    assert [writer.keep_alive() for _ in range(3)] == [
        None,
        None,
        f"the writer process ended with status 9, see {tmp_path / 'tracking.log'}",
    ]
    assert len(started) == 3
    assert caplog.text.count("was started again; no record is lost") == 2
    journal.close()
