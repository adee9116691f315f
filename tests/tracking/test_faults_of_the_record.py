"""Nothing that was recorded is lost, doubled or altered, whatever becomes of the store: real
trainers, a server that is killed and started again at random, locked files, a full disk.

The long soak runs with `pytest -m soak` only. It writes bench/results/record_faults.md.
"""

import json
import os
import random
import signal
import sqlite3
import sys
import time
from contextlib import closing

import pytest
from environments import ROOT
from faults import Trainer, counted, progress_of, status_of
from waiting import wait_for

from runner.cli.sync import sync
from runner.core.record import journals

# MLflow's warnings, where its client reads a database in this process.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NONE = {"lost": 0, "doubled": 0, "altered": 0}


@pytest.fixture
def database(tmp_path, empty_store):
    """Return the URI of a store without runs."""
    return empty_store(tmp_path / "mlflow.db")


@pytest.fixture
def whole(tmp_path):
    """Asserts that all of a trainer's points are in a store, once, and as they were."""

    def check(trainer, steps, uri=None):
        run_id = progress_of(trainer.folder).run_id
        uri = uri or trainer.uri
        found = counted(uri, run_id, steps, tmp_path)
        assert found == {"logged": 3 * steps, **NONE}
        assert status_of(uri, run_id) == "FINISHED"

    return check


def outages(server, number, chance, up=(0.5, 4.0), down=(0.2, 2.0)):
    """Kills the server and starts it again, at random moments; the seconds that it was away."""
    away = []
    for _ in range(number):
        time.sleep(chance.uniform(*up))
        server.stop()
        began = time.monotonic()
        time.sleep(chance.uniform(*down))
        server.start()
        away.append(time.monotonic() - began)
    return away


def test_a_server_killed_at_random_moments_loses_nothing(server, tmp_path, whole):
    """It is away when training begins, once in between, and when training ends; the trainer
    records meanwhile."""
    trainer = Trainer(server.url, tmp_path / "run", pause=0.02).training()
    server.start()
    outages(server, 1, random.Random())
    server.stop()
    trainer.recorded(5_000)  # several blocks
    trainer.stop()
    server.start()
    done, _ = trainer.ended()
    whole(trainer, done["steps"])


def test_four_runs_at_once_on_a_store_that_does_not_exist(tmp_path, whole):
    uri = f"sqlite:///{tmp_path}/new/outputs/mlflow.db"
    four(uri, tmp_path, whole)


@pytest.mark.extended  # as above
def test_four_runs_at_once_on_one_server(server, tmp_path, whole):
    server.start()
    four(server.url, tmp_path, whole)


def four(uri, tmp_path, whole):
    trainers = [Trainer(uri, tmp_path / f"run{number}", pause=0.01) for number in range(4)]
    for trainer in trainers:
        trainer.training().opened()
    for trainer in trainers:
        trainer.stop()
    for trainer in trainers:
        done, _ = trainer.ended()
        whole(trainer, done["steps"])


def test_a_database_locked_by_another_process_delays_no_training(tmp_path, database, whole):
    trainer = Trainer(database, tmp_path / "run", pause=0.01).training()
    trainer.opened()
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as locker:
        locker.execute("BEGIN EXCLUSIVE")
        trainer.recorded(5_000)  # what was stored before the lock is noted by then
        before = progress_of(trainer.folder).offset
        trainer.recorded(10_000)  # several blocks, while the writer's call waits for the lock
        assert progress_of(trainer.folder).offset == before
    done, _ = trainer.ended()
    whole(trainer, done["steps"])


def fill(folder):
    """Leaves no room; the file that takes it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 65_536
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return filler


def test_a_disk_that_was_full_for_a_while_costs_nothing(small, tmp_path, database, whole):
    trainer = Trainer(database, small / "run").training()
    trainer.opened()
    filler = fill(small)
    time.sleep(2)
    size = trainer.journal.stat().st_size
    time.sleep(1)
    assert trainer.journal.stat().st_size == size
    filler.unlink()
    trainer.recorded(1)
    done, stderr = trainer.ended()
    assert stderr.count("cannot be written: No space left on device. Training continues") == 1
    assert stderr.count("can be written again") == 1
    whole(trainer, done["steps"])


def test_a_disk_that_stays_full_costs_the_points_it_had_no_room_for(small, tmp_path, database):
    """The run ends, its status is stored, and a warning names what is missing."""
    trainer = Trainer(database, small / "run", patience=2).training()
    run_id = trainer.opened()
    filler = fill(small)
    time.sleep(2)
    trainer.stop()
    done, stderr = trainer.result()
    kept = [record for record, _ in journals.read_records(trainer.journal)]
    steps = [record["step"] for record in kept if record["kind"] == "metrics"]
    assert steps == list(range(1, len(steps) + 1))
    lost = done["steps"] - len(steps)
    assert f"{lost} records are lost: the disk of {trainer.journal} was full" in stderr
    assert (kept[-1]["kind"], kept[-1]["status"], kept[-1]["lost"]) == ("end", "FINISHED", lost)
    filler.unlink()
    assert sync([str(small)]) == 0
    assert status_of(database, run_id) == "FINISHED"
    found = counted(database, run_id, len(steps), tmp_path)
    assert found == {"logged": 3 * len(steps), **NONE}


def test_a_run_killed_with_its_writer_is_uploaded_by_the_next_run(tmp_path, empty_store):
    uri = empty_store(tmp_path / "outputs" / "mlflow.db")
    first = Trainer(uri, tmp_path / "outputs" / "runs" / "1").training()
    run_id = first.opened()
    os.kill(first.writer, signal.SIGSTOP)  # or it would settle the run itself
    first.recorded(1)
    first.process.kill()
    first.process.communicate()
    os.kill(first.writer, signal.SIGKILL)
    assert status_of(uri, run_id) == "RUNNING"
    second = Trainer(uri, tmp_path / "outputs" / "runs" / "2", pause=0.02).training()
    wait_for(lambda: status_of(uri, run_id) == "KILLED")
    steps = sum(record["kind"] == "metrics" for record, _ in journals.read_records(first.journal))
    wait_for(lambda: progress_of(first.folder).done)
    found = counted(uri, run_id, steps, tmp_path)
    assert found == {"logged": 3 * steps, **NONE}
    second.stop()
    assert second.result()[0]["complete"]


def test_sync_during_an_upload_or_after_a_part_of_it_doubles_nothing(tmp_path, server, whole):
    """The writer of a run that has ended is uploading; sync continues from its offset."""
    server.start()
    trainer = Trainer(server.url, tmp_path / "run", patience=1).training()
    trainer.opened()
    trainer.uploaded(1)
    server.stop()
    trainer.recorded(1)
    done, _ = trainer.ended(complete=False)
    server.start()
    assert sync([str(tmp_path)]) == 0
    whole(trainer, done["steps"])
    with trainer.journal.with_suffix(".state").open("r+") as state:  # it forgets how far it came
        fields = json.loads(state.read())
        state.seek(0)
        state.write(json.dumps({**fields, "offset": 0, "done": False}))
        state.truncate()
    assert sync([str(tmp_path)]) == 0
    whole(trainer, done["steps"])


def test_a_server_that_stays_away_stops_no_run_and_sync_uploads_it_later(tmp_path, whole):
    """Told once; the run ends with success, and soon."""
    uri = "http://127.0.0.1:9"  # nobody answers there
    trainer = Trainer(uri, tmp_path / "run", patience=2, outage=1).training()
    since = wait_for(lambda: progress_of(trainer.folder).outage_since)
    wait_for(lambda: time.time() > since + 1)
    trainer.recorded(20_000)  # several blocks, and with each the trainer looks for an outage
    done, stderr = trainer.ended(complete=False)
    assert done["close_s"] < 10
    assert stderr.count("No answer from the tracking store for") == 1
    assert "Training continues" in stderr
    assert stderr.count(f"The run is not stored completely in {uri}") == 1
    assert f"`python -m runner sync {trainer.folder}`" in stderr
    elsewhere = f"sqlite:///{tmp_path}/elsewhere/mlflow.db"
    assert sync([str(trainer.folder)], elsewhere) == 0
    whole(trainer, done["steps"], elsewhere)


def test_a_server_that_comes_back_later_gets_the_run_without_a_command(server, tmp_path, whole):
    trainer = Trainer(server.url, tmp_path / "run", patience=1).training()
    trainer.recorded(2_000)
    done, _ = trainer.ended(complete=False)
    server.start()
    wait_for(lambda: progress_of(trainer.folder).done)
    whole(trainer, done["steps"])


@pytest.mark.soak
def test_soak(server, tmp_path):
    """SOAK_OUTAGES short outages (20), one of SOAK_LONG seconds (600), and a server that is gone
    for good."""
    sys.path.insert(0, str(ROOT / "bench"))
    from common import RESULTS, machine, table

    load = os.getloadavg()[0]
    long = float(os.environ.get("SOAK_LONG", "600"))
    seed = int(os.environ.get("SOAK_SEED", "1"))
    began = time.monotonic()
    trainer = Trainer(server.url, tmp_path / "run", pause=0.05).training()
    server.start()
    number = int(os.environ.get("SOAK_OUTAGES", "20"))
    away = outages(server, number, random.Random(seed), up=(0.5, 8.0))
    server.stop()
    time.sleep(long)
    server.start()
    away += [long, *outages(server, 2, random.Random(seed + 1))]
    trainer.stop()
    done, stderr = trainer.result(timeout=900)
    assert done["complete"], stderr
    gone = Trainer(server.url, tmp_path / "gone", pause=0.05, patience=2).training()
    time.sleep(5)
    server.stop()
    time.sleep(5)
    gone.stop()
    left, stderr = gone.result()
    assert not left["complete"]
    server.start()
    assert sync([str(tmp_path)]) == 0
    rows = []
    runs = [
        ("server killed and restarted", done, trainer, len(away), f"{max(away):.0f}"),
        ("server gone for good, then `runner sync`", left, gone, 1, "for good"),
    ]
    for name, result, one, times, longest in runs:
        run_id = progress_of(one.folder).run_id
        found = counted(server.url, run_id, result["steps"], tmp_path)
        assert found == {"logged": 3 * result["steps"], **NONE}
        counts = [f"{n:,}" for n in found.values()]
        seconds = [f"{result['slowest_ms']:.1f}", f"{result['close_s']:.1f}"]
        rows.append([name, str(times), longest, *counts, *seconds])
    head = ["what happened", "outages", "longest s", "points logged", "lost", "doubled", "altered"]
    head += ["slowest call in the loop ms", "end waited s"]
    notes = (
        f"# What outages cost the record\n\n`SOAK_OUTAGES={number} SOAK_LONG={long:.0f} "
        f"SOAK_SEED={seed} pytest -m soak tests/tracking`, "
        f"{time.monotonic() - began:.0f} s, {machine()}, {os.cpu_count()} threads with a load of "
        f"{load:.0f} at the start.\n\n"
        "A trainer records a step of three points every 50 ms, in blocks of 20; the MLflow server "
        "(SQLite, one worker) is killed by SIGKILL and started again at random moments. Points are "
        "compared one by one with `get_metric_history` and with `history.npz`: step, time, value; "
        "NaN and infinity are among them."
    )
    (RESULTS / "record_faults.md").write_text(f"{notes}\n\n{table(head, rows)}\n")
