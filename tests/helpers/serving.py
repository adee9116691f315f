"""Run MLflow's own server for tests."""

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from urllib.request import urlopen

from forked_process import ForkedProcess
from waiting import SECONDS


def free_port():
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`mlflow server` with one worker, at the same address after each restart.

    Args:
        folder: of its log, its artifacts and, unless another store is named, its database.
    """

    def __init__(self, folder, store=None):
        self.folder, self.process = folder, None
        self.store = store or f"sqlite:///{folder}/mlflow.db"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, wait=True):
        """Start the server; with `wait`, return once it answers."""
        options = [
            f"--backend-store-uri={self.store}",
            "--host=127.0.0.1",
            "--workers=1",
            f"--artifacts-destination={self.folder}/artifacts",
            f"--port={self.port}",
        ]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        quick = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # eight processes more
        log = self.folder / "server.log"
        with log.open("ab") as out:
            self.process = ForkedProcess(
                [sys.executable, "-m", "mlflow", "server", *options],
                stdout=out,
                stderr=out,
                cwd=self.folder,
                start_new_session=True,
                env={**kept, **quick, "MLFLOW_DISABLE_TELEMETRY": "true"},
            )
        end = time.monotonic() + SECONDS
        while wait and not self.answers():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    def answers(self):
        with suppress(OSError), urlopen(f"{self.url}/health", timeout=5) as answer:
            return answer.status == 200
        return False

    def stop(self):
        """Kill the server: its workers take long to end on request."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=SECONDS)
            self.process = None
