"""The same over HTTP: a real server with one worker, started after the run."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from runner.tracking.base import RunInfo
from runner.tracking.mlflow import MlflowTracker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def late_server(tmp_path_factory):
    """A free port, and what starts a server there."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []

    def start():
        options = [
            f"--backend-store-uri=sqlite:///{folder}/mlflow.db",
            f"--artifacts-destination={folder}/artifacts",
            "--host=127.0.0.1", f"--port={port}", "--workers=1",
        ]  # fmt: skip
        command = [sys.executable, "-m", "mlflow", "server", *options]
        log = (folder / "server.log").open("wb")
        running.append(
            subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        )
        log.close()

    yield f"http://127.0.0.1:{port}", start
    for server in running:
        os.killpg(server.pid, signal.SIGKILL)  # its workers take long to end on request
        server.wait(timeout=20)


def test_a_run_that_opens_before_its_server_is_stored_completely(
    late_server, reader, until, tmp_path
):
    uri, start = late_server
    tracker = MlflowTracker(uri=uri)
    tracker.open(RunInfo(tmp_path / "run", params={"a": "1"}))
    expected = [(step, 1_700_000_000_000 + step, step / 3) for step in range(1, 1501)]
    tracker.metrics_many(
        (step, time_ms, {"train/loss": value}) for step, time_ms, value in expected
    )
    (tmp_path / "note.txt").write_text("kept by the server")
    tracker.artifact(tmp_path / "note.txt")
    start()
    until(lambda: tracker.run_id is not None, seconds=120)
    tracker.close("FINISHED")
    tracker.check()

    store = reader(uri)
    run = store.run(tracker.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"a": "1"})
    assert store.points(tracker.run_id, "train/loss") == expected
    assert [file.path for file in store.client.list_artifacts(tracker.run_id)] == ["note.txt"]
    assert tracker.url() == f"{uri}/#/experiments/{tracker.experiment_id}/runs/{tracker.run_id}"
