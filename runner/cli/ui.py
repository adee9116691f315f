"""Run `runner ui`: serve MLflow's pages on the store that runs log to."""

import os
import signal
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import psutil

from runner.core import ConfigError, secrets, stop_signals
from runner.tracking.uri import resolve_experiment, resolve_uri
from runner.tracking.writer_process import upload_in_background

FIRST_PORT = 5000
LAST_PORT = 5100


def ui(uri: str | None = None, experiment: str | None = None, port: str | None = None) -> int:
    """Serve the store on loopback until interrupted, and print the pages' URLs.

    Args:
        uri: the store; None for the one that runs log to.
        experiment: name of the experiment in the store; None for the one that runs log to.
        port: of the server; None for the first free one.

    Returns:
        The exit status.

    Raises:
        ConfigError: the port cannot be used, or the store is none.
        TrackingError: the store does not answer.
    """
    store = resolve_uri(uri)
    number = _port(port)
    name = resolve_experiment(experiment)
    base = secrets.redact(store) if store.startswith("http") else f"http://127.0.0.1:{number}"
    print(f"store: {secrets.redact(store)}")
    upload_in_background(Path("outputs"))
    pages = dict(dashboard_urls(store, base, name, make=uri is None))
    for what, url in pages.items():
        print(f"{what}: {url}", flush=True)
    first = next(iter(pages.values()))
    if store.startswith("http"):
        _browse(first)
        return 0
    return _serve(store, number, first)


def _serve(uri: str, port: int, first: str) -> int:
    """Run MLflow's server on loopback until Ctrl-C, and open the first page once it answers."""
    program = [sys.executable, "-m", "mlflow", "server"]
    command = [*program, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    # The URI goes through the environment: arguments, with a password, are visible to all users.
    # MLflow's job execution (judges of language models) would start eight processes with 1.8 GB.
    env = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    print("Ctrl-C ends it.", flush=True)
    with stop_signals.StopSignals() as signals:
        server = subprocess.Popen(command, env=env)
        try:
            with signals.interruptible():
                while server.poll() is None and not _is_answering(port):
                    time.sleep(0.2)
                if server.poll() is None:
                    _browse(first)
                return server.wait()
        except stop_signals.Stopped as error:
            for process in psutil.Process(server.pid).children(recursive=True):
                process.terminate()
            server.terminate()
            server.wait()
            return 0 if signals.number == signal.SIGINT else error.exit_status


def _is_answering(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _browse(url: str) -> None:
    """Open a page in a browser if this machine has a screen."""
    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)


def dashboard_urls(
    uri: str, base: str, experiment: str, make: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield the name and URL of each page: the report of the newest sweep, the dashboards of that
    sweep and of the experiment, and its list of runs; for a store without the experiment, only its
    front page.

    Args:
        uri: the store.
        base: address of its server.
        experiment: name of the experiment.
        make: create the store's SQLite file if it is missing.

    Raises:
        ConfigError: the SQLite file is missing and `make` is False.
        TrackingError: the store does not answer.
    """
    from runner.tracking.reader import Reader

    for what, path in Reader(uri, make).pages(experiment):
        yield what, f"{base}{path}"


def _port(text: str | None) -> int:
    """Return the typed port, or the first free one from FIRST_PORT on."""
    if text is not None and not (text.isdecimal() and 0 < int(text) < 2**16):
        raise ConfigError(
            f"port={text} is no port. Allowed: 1 to 65535. Type for example port={FIRST_PORT}."
        )
    for port in [int(text)] if text else range(FIRST_PORT, LAST_PORT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"Port {text or f'{FIRST_PORT} to {LAST_PORT - 1}'} is in use. Type port=<n>."
    )
