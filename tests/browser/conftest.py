"""A real browser, and a real MLflow server on a folder's SQLite store."""

import shutil

import pytest
from serving import Server

# MLflow opens its assistant over a third of a new visitor's page.
QUIET = """localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"""
_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """Playwright's chromium without a window. It ends before other files' tests fork: its driver
    waits until nobody holds its input open."""
    reason = "needs playwright: pip install playwright"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip(f"needs one of {', '.join(_NAMES)} on PATH")
    with playwright.sync_playwright() as play:
        started = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


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
    context.set_default_timeout(240_000)
    yield context.new_page()
    context.close()
