"""A real browser, and a real MLflow server on a folder's SQLite store."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import pytest

# MLflow opens its assistant over a third of a new visitor's page.
QUIET = """localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"""
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser():
    """Playwright's chromium without a window."""
    reason = "needs playwright: pip install playwright"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"needs one of {', '.join(_NAMES)} on PATH")
    with playwright.sync_playwright() as play:
        started = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


class Server:
    """An MLflow server with one worker that can be stopped and started again at its address."""

    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process = None

    @property
    def store(self):
        return f"sqlite:///{self.folder}/mlflow.db"

    def start(self):
        """Returns once it answers."""
        options = [
            f"--backend-store-uri={self.store}",
            f"--artifacts-destination={self.folder}/artifacts",
            "--host=127.0.0.1", f"--port={self._port}", "--workers=1",
        ]  # fmt: skip
        command = [sys.executable, "-m", "mlflow", "server", *options]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        end = time.monotonic() + 90
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.3)

    def stop(self):
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)  # its workers take long to end on request
            self._process.wait(timeout=20)
            self._process = None

    def _answers(self):
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return answer.status == 200
        return False


@pytest.fixture(scope="session")
def mlflow_server():
    """Makes a started server on a folder; it ends with the tests."""
    servers = []

    def start(folder):
        servers.append(Server(folder))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def page(browser):
    """A page of a visitor who was never here before, tall enough for all charts."""
    context = browser.new_context(viewport={"width": 1600, "height": 4000})
    context.add_init_script(QUIET)
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()
