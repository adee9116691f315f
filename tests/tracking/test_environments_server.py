"""The same run into every kind of store, and through a proxy that wants a password."""

import base64
import http.client
import os
import pwd
import shutil
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from serving import Server, free_port

pytestmark = pytest.mark.slow
TINY = ["model=mlp", "train.max_steps=3", "precision=32-true"]
SECRET = "pass-word-17"
DRIVERS = [name for name in ("psycopg2", "psycopg") if find_spec(name)]


@contextmanager
def proxy(target):
    """A proxy on loopback that lets through who has the password."""
    expected = "Basic " + base64.b64encode(f"ann:{SECRET}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != expected:
                return self._answer(401, {"Content-Type": "text/plain"}, b"who are you?")
            connection = http.client.HTTPConnection(target.removeprefix("http://"), timeout=60)
            kept = {k: v for k, v in self.headers.items() if k in ("Content-Type", "Accept")}
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            kind = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
            return self._answer(answer.status, kind, data)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

        def _answer(self, status, headers, data):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stored(store, experiment="precision-runner"):
    """Return a store's newest run, without what differs between two runs and two stores."""
    client = store.client
    found = client.get_experiment_by_name(experiment).experiment_id
    run = client.search_runs([found], max_results=1)[0]
    params = {k: v for k, v in run.data.params.items() if k != "tracking.uri"}
    names = {k for k in run.data.metrics if not k.startswith(("system/", "memory/"))}
    losses = [(step, value) for step, _, value in store.points(run.info.run_id, "train/loss")]
    files = sorted(item.path for item in client.list_artifacts(run.info.run_id))
    return run.info.status, params, sorted(run.data.tags), names, losses, files


@pytest.fixture(scope="module")
def expected(tmp_path_factory, inside, reader, empty_store):
    """Return the content of a run that was recorded in a SQLite file."""
    folder = tmp_path_factory.mktemp("file")
    empty_store(folder / "outputs" / "mlflow.db")
    with inside(folder) as main:
        assert main(*TINY, "tracking.experiment=precision-runner").rc == 0
    held = stored(reader(f"sqlite:///{folder}/outputs/mlflow.db"))
    assert held[0] == "FINISHED"
    assert len(held[4]) == 3
    assert "config.yaml" in held[5]
    return held


def test_a_server_holds_what_a_file_holds(server_url, expected, main, reader):
    assert main(*TINY, f"tracking.uri={server_url}", "tracking.experiment=precision-runner").rc == 0
    assert stored(reader(server_url)) == expected


@pytest.mark.parametrize(
    "how",
    ["in the URI", pytest.param("in the environment", marks=pytest.mark.extended), "not given"],
)
def test_a_password_opens_the_store_and_is_written_nowhere(how, server_url, cli, tmp_path):
    with proxy(server_url) as port:
        user = f"ann:{SECRET}@" if how == "in the URI" else ""
        env = {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": SECRET}
        uri = f"tracking.uri=http://{user}127.0.0.1:{port}"
        done = cli(*TINY, uri, env=env if how == "in the environment" else None)
    if how == "not given":
        assert done.rc != 0
        assert "who are you?" in done.stderr
        return
    assert done.rc == 0, done.stderr
    assert f"http://127.0.0.1:{port}/#/experiments/" in done.stdout
    assert SECRET not in done.stdout + done.stderr
    holding = [p for p in tmp_path.rglob("*") if p.is_file() and SECRET in p.read_text("latin-1")]
    assert all(p.name.startswith("journal") for p in holding), holding
    assert all(p.stat().st_mode & 0o077 == 0 for p in holding)


@pytest.fixture(scope="module")
def postgres():
    """An empty PostgreSQL database of this test's own."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    where = os.pathsep.join([os.environ.get("PATH", ""), *map(str, reversed(found))])
    tools = {name: shutil.which(name, path=where) for name in ("initdb", "pg_ctl")}
    if not all(tools.values()):
        pytest.skip("no PostgreSQL server here: neither initdb nor pg_ctl is installed")
    if not DRIVERS:
        pytest.skip("no driver for PostgreSQL here: pip install psycopg2-binary")
    folder = Path(tempfile.mkdtemp())  # not under pytest's, which another user cannot enter
    user: dict[str, str] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        if "postgres" not in {entry.pw_name for entry in pwd.getpwall()}:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        shutil.chown(folder, "postgres")
        user = {"user": "postgres"}
    port = free_port()

    def call(tool, *args):
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            subprocess.run(
                [tools[tool], "-D", str(folder / "data"), *args],
                cwd=folder,
                stdout=log,
                stderr=log,
                check=True,
                timeout=120,
                **user,
            )

    call("initdb", "-U", "mlflow", "-A", "trust", "--no-sync")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    call("pg_ctl", "-w", "-o", options, "start")
    yield f"postgresql+{DRIVERS[0]}://mlflow@127.0.0.1:{port}/postgres"
    call("pg_ctl", "-m", "immediate", "stop")
    shutil.rmtree(folder)
    (folder.parent / f"{folder.name}.log").unlink()


@pytest.mark.extended  # a second database
def test_postgresql_holds_what_a_file_holds(postgres, expected, main, reader, tmp_path):
    """With a server in front of it, and directly."""
    server = Server(tmp_path, postgres)
    try:
        server.start()
        at_server = (f"tracking.uri={server.url}", "tracking.experiment=precision-runner")
        assert main(*TINY, *at_server).rc == 0
        assert stored(reader(server.url)) == expected
    finally:
        server.stop()
    here = ("tracking.experiment=direct", f"tracking.uri={postgres}")
    assert main(*TINY, *here).rc == 0
    held = stored(reader(postgres), "direct")
    assert {**held[1], "tracking.experiment": expected[1]["tracking.experiment"]} == expected[1]
    assert held[2:] == expected[2:]
    location = reader(postgres).client.get_experiment_by_name("direct").artifact_location
    assert location.endswith("/outputs/mlartifacts")
