"""`runner ui`: MLflow's pages on the store that runs log to."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from runner.errors import ConfigError
from runner.tracking.uri import resolve_experiment, resolve_uri

FIRST_PORT = 5000
LAST_PORT = 5100


def ui(argv: Sequence[str]) -> int:
    """Serve the store on loopback until interrupted, and print the pages' URLs.

    Args:
        argv: `tracking.uri=...`, `tracking.experiment=...` or `port=...`, each optional.
    """
    try:
        given = _arguments(argv)
        uri = resolve_uri(given.get("tracking.uri"), os.environ, Path.cwd())
        port = _port(given.get("port"))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = resolve_experiment(given.get("tracking.experiment"), os.environ)
    if uri.startswith("http"):
        for what, url in pages(uri, uri, name):
            print(f"{what}: {url}")
        return 0
    base = f"http://127.0.0.1:{port}"
    print(f"store: {uri}")
    for what, url in pages(uri, base, name):
        print(f"{what}: {url}")
    print("Ctrl-C ends it.", flush=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
               "--workers", "1", "--backend-store-uri", uri]  # fmt: skip
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 0


def pages(uri: str, base: str, experiment: str) -> Iterator[tuple[str, str]]:
    """What there is to see, and its URL: an experiment's runs and its newest sweep's charts; the
    front page of a store that has no such experiment.

    The workflow type keeps MLflow from opening its page on generative AI; sorted by name, a
    sweep's jobs are not folded under their parent, and the charts draw them.
    """
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        yield "store", base
        return
    runs = f"{base}/#/experiments/{found.experiment_id}/runs?workflowType=machine_learning"
    yield "runs", runs
    sweeps = client.search_runs([found.experiment_id], "tags.role = 'sweep'", max_results=1)
    for sweep in sweeps:
        children = quote(f"tags.`mlflow.parentRunId` = '{sweep.info.run_id}'")
        order = "orderByKey=attributes.run_name&orderByAsc=true"
        yield "newest sweep", f"{runs}&searchFilter={children}&{order}&compareRunsMode=CHART"


def _arguments(argv: Sequence[str]) -> dict[str, str]:
    allowed = ("tracking.uri", "tracking.experiment", "port")
    given = {}
    for text in argv:
        key, mark, value = text.partition("=")
        if not mark or key not in allowed:
            raise ConfigError(f"ui does not take {text}. Allowed: {'=..., '.join(allowed)}=...")
        given[key] = value
    return given


def _port(text: str | None) -> int:
    """The port that was asked for, or the first free one."""
    if text is not None and not text.isdigit():
        raise ConfigError(f"port={text} is not a number. Type for example port={FIRST_PORT}.")
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
