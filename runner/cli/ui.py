"""Run `runner ui`: serve MLflow's pages on the store that runs log to."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from runner.core import ConfigError, files, secrets, stop_signals
from runner.tracking.uri import LOOPBACK, is_answering, port_record, resolve_experiment, resolve_uri
from runner.tracking.writer_process import upload_in_background

FIRST_PORT = 5000
LAST_PORT = 5100
LOG_LINES = 12
"""Last lines of its log that are shown of a server that ended by itself."""


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
    has_server = store.startswith("http")
    base = secrets.redact(store) if has_server else f"http://{LOOPBACK}:{number}"
    print(f"store: {secrets.redact(store)}", flush=True)
    upload_in_background(Path("outputs"))
    # It imports MLflow, for which a message about a mistyped port need not wait.
    from runner.tracking.reader import Reader

    paths = Reader(store, make=uri is None).pages(resolve_experiment(experiment))
    pages = {what: f"{base}{path}" for what, path in paths}
    if has_server:
        _show(pages)
        return 0
    if not port and number != FIRST_PORT:
        print(f"port {FIRST_PORT} is in use: taking {number}", flush=True)
    return _serve(store, number, pages)


def _serve(uri: str, port: int, pages: Mapping[str, str]) -> int:
    """Run MLflow's server on loopback until Ctrl-C, and show the pages once it answers.

    Returns:
        The exit status: 1 if the server ended by itself.
    """
    program = [sys.executable, "-m", "mlflow", "server"]
    command = [*program, "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    # The URI goes through the environment: arguments, with a password, are visible to all users.
    # MLflow's job execution (judges of language models) would start eight processes with 1.8 GB.
    env = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    descriptor, name = tempfile.mkstemp(".log", "runner-ui-")
    log = Path(name)
    record = port_record(uri)
    with os.fdopen(descriptor) as out, stop_signals.StopSignals() as signals:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            with signals.interruptible():
                while server.poll() is None and not is_answering(port):
                    time.sleep(0.2)
                if server.poll() is None:
                    # With it the commands that log to the store print the addresses of pages.
                    with suppress(OSError):  # the store's folder takes no files
                        if record:
                            files.write_text(record, str(port))
                    print(f"ready: http://{LOOPBACK}:{port}")
                    _show(pages)
                    if not _has_screen():
                        host = socket.gethostname()
                        print(f"from another machine: ssh -L {port}:localhost:{port} {host}")
                    print("Ctrl-C ends it.", flush=True)
                status = server.wait()
        except stop_signals.Stopped as error:
            for process in psutil.Process(server.pid).children(recursive=True):
                process.terminate()
            server.terminate()
            server.wait()
            log.unlink()
            return 0 if signals.number == signal.SIGINT else error.exit_status
        finally:
            # Another server of the store may have replaced it.
            with suppress(OSError):
                if record and record.read_text() == str(port):
                    record.unlink()
    last_lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    print(*last_lines, f"MLflow's server ended with status {status}. Its log: {log}", sep="\n")
    return 1


def _show(pages: Mapping[str, str]) -> None:
    """Print the pages, and open the first one if this machine has a screen."""
    for what, url in pages.items():
        print(f"{what}: {url}", flush=True)
    if _has_screen():
        webbrowser.open(next(iter(pages.values())))


def _has_screen() -> bool:
    """Return whether the user sits before this machine, rather than behind an SSH connection."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    displays = (os.environ.get("DISPLAY"), os.environ.get("WAYLAND_DISPLAY"))
    return sys.platform == "darwin" or any(displays)


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
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"Port {text or f'{FIRST_PORT} to {LAST_PORT - 1}'} is in use. Type port=<n>."
    )
