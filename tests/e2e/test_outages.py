"""Commands whose store is away, or does not take what they record."""

import re
import signal
import socket

import pytest
from run_folders import only_run, read_json
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TINY = ("model=mlp", "model.hidden=[16]", "train.max_steps=3", "train.log_every=2")
ENDLESS = (
    "--config-dir lab/conf model=net model._target_=lab.nets.Slow train.max_steps=1000000 "
    "train.log_every=1"
).split()
SOON = 60
"""Seconds: six times what docs/reliability.md promises, for a machine with other work."""


@pytest.fixture(scope="module")
def dead_address():
    """The address of a server that is not there; dead_address else can take it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_a_dead_server_stops_no_run_and_sync_sends_it_elsewhere(cli, dead_address, store, tmp_path):
    done = cli(*TINY, f"tracking.uri={dead_address}", "tracking.patience=1").check_ok()
    run = only_run(tmp_path)
    assert read_json(run / "result.json")["status"] == "finished"
    assert f"The run is not stored completely in {dead_address}" in done.stderr
    assert f"`python -m runner sync {run.relative_to(tmp_path)}`" in done.stderr
    moved = cli("sync", f"tracking.uri={store}", "tracking.experiment=moved").check_ok()
    said, count = moved.stdout.splitlines()
    assert said.startswith(f"{run}: uploaded to {store} as run ")
    assert re.search(r", FINISHED, \d+ points$", said)
    assert count == "1 uploaded, 0 failed, 0 already uploaded, 0 still training."
    again = cli("sync")
    assert again.stdout == "0 uploaded, 0 failed, 1 already uploaded, 0 still training.\n"


@pytest.mark.parametrize(
    ("key", "corrected"),
    [
        ("tracking.experiment=" + "x" * 600, "tracking.experiment=short"),
        ("tracking.uri=sqlite:///no_database.db", "tracking.uri={store}"),
    ],
    ids=["experiment name too long", "a file that is no database"],
)
def test_a_refused_record_is_no_success_but_the_work_is_kept(cli, store, tmp_path, key, corrected):
    (tmp_path / "no_database.db").write_text("This is a letter, not a database. " * 40)
    where = [] if "uri" in key else [f"tracking.uri={store}"]
    done = cli(*TINY, *where, key)
    assert done.rc == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "does not take the run" in last
    assert "`python -m runner sync outputs/runs/" in last
    run = only_run(tmp_path)
    # A refusal that comes before the last of its few steps stops the run.
    if (run / "result.json").exists():
        assert read_json(run / "result.json")["status"] == "finished"
    assert (run / "journal.jsonl").stat().st_size > 0
    refused = cli("sync")
    assert refused.rc == 1
    assert refused.stdout.endswith("0 uploaded, 1 failed, 0 already uploaded, 0 still training.\n")
    assert cli("sync", corrected.format(store=store)).rc == 0


@pytest.mark.usefixtures("lab")
def test_a_refusal_stops_a_run_soon(cli, store):
    done = cli(*ENDLESS, f"tracking.uri={store}", f"tracking.experiment={'x' * 600}")
    done.check_refused("does not take the run", status=1)


@pytest.mark.usefixtures("lab")
def test_a_signal_ends_a_run_soon_also_without_a_server(dead_address, tmp_path, start_command):
    run = start_command(*ENDLESS, f"tracking.uri={dead_address}", "tracking.patience=100000")

    def trains():
        return any('"train/loss"' in path.read_text() for path in tmp_path.rglob("journal.jsonl"))

    wait_for(trains, run)
    run.send_signal(signal.SIGTERM)
    _, stderr = run.communicate(timeout=SOON)
    assert run.returncode == 143
    assert stderr.splitlines()[-1] == "Stopped by SIGTERM."


def test_what_sync_does_not_take(main, tmp_path):
    assert main("sync").stdout == "0 uploaded, 0 failed, 0 already uploaded, 0 still training.\n"
    done = main("sync", "outputs/nowhere")
    assert (done.rc, done.stdout) == (2, "")
    assert "sync does not take outputs/nowhere: there is no such folder." in done.stderr
    assert main("sync", "tracking.uri=ftp://host").rc == 2
    assert "python -m runner sync" in main("sync", "--help").stdout
