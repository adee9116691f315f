"""A run that was killed continues in the store that it was in, however that was named and from
whatever folder; where it cannot, nothing is trained."""

import json
import sqlite3

import pytest
from serving import Server, free_port
from waiting import wait_for

QUICK = "model=mlp model.hidden=[4] train.log_every=1 checkpoint.every_steps=1".split()
PLAIN = ("tracking.log_model=false", "tracking.system_metrics=null")
SHORT = (*QUICK, *PLAIN, "train.max_steps=4", "checkpoint.keep=9")


def state_of(folder):
    state = folder / "journal.state"
    text = state.read_text().strip() if state.exists() else ""
    return json.loads(text) if text else {}


@pytest.fixture
def killed(tmp_path, start_command):
    """Return a function that kills a run after a few steps and returns its folder."""

    def run(*typed, recorded=True, **env):
        process = start_command(*QUICK, "train.max_steps=1000000", *typed, env=env)

        def resumable():
            found = next(iter(tmp_path.glob("outputs/runs/*/checkpoints/step-*.pt")), None)
            folder = found and found.parents[1]
            return folder if folder and (not recorded or state_of(folder).get("run_id")) else None

        folder = wait_for(resumable, process)
        process.kill()
        process.wait()
        return folder

    return run


def kept_steps(folder):
    newest = max(folder.glob("checkpoints/step-*.pt"))
    return int(newest.stem.removeprefix("step-"))


def rows(database, run_id):
    with sqlite3.connect(database) as file:
        (status,) = file.execute("select status from runs where run_uuid=?", (run_id,)).fetchone()
        query = "select step from metrics where key='train/loss' and run_uuid=? order by step"
        return status, [row[0] for row in file.execute(query, (run_id,))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["default", "environment", pytest.param("relative", marks=pytest.mark.extended)]
)
def test_a_killed_run_continues_in_its_store_from_another_folder(
    way, killed, main, tmp_path, tmp_path_factory, monkeypatch, empty_store
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    database = tmp_path / ("outputs/mlflow.db" if way == "default" else "mine/runs.db")
    empty_store(database)
    named = {"relative": "tracking.uri=sqlite:///mine/runs.db"}
    env = {"MLFLOW_TRACKING_URI": "sqlite:///mine/runs.db"} if way == "environment" else {}
    folder = killed(*PLAIN, *([named[way]] if way in named else []), **env)
    run_id, last = state_of(folder)["run_id"], kept_steps(folder) + 2
    monkeypatch.chdir(elsewhere)
    done = main(f"checkpoint.resume={folder}", f"train.max_steps={last}").check_ok()
    first = done.stdout.splitlines()[:3]
    assert f"continues run {run_id} in sqlite:///{database}" in first
    assert rows(database, run_id) == ("FINISHED", list(range(1, last + 1)))
    assert not list(elsewhere.rglob("*.db"))


@pytest.mark.slow
def test_a_killed_run_without_a_record_continues_without_one(killed, main, tmp_path):
    folder = killed("tracking=none", recorded=False)
    main("checkpoint.resume=last", f"train.max_steps={kept_steps(folder) + 2}").check_ok(
        "without a record: tracking=none"
    )
    assert not list(tmp_path.rglob("*.db"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("server")
    server = Server(folder, empty_store(folder / "mlflow.db"))
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_a_killed_run_continues_on_its_server(killed, main, server, monkeypatch):
    folder = killed(*PLAIN, f"tracking.uri={server.url}")
    run_id, last = state_of(folder)["run_id"], kept_steps(folder) + 2
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    done = main("checkpoint.resume=last", f"train.max_steps={last}").check_ok()
    assert f"continues run {run_id} in {server.url}" in done.stdout.splitlines()[:3]
    found = rows(server.folder / "mlflow.db", run_id)
    assert found == ("FINISHED", list(range(1, last + 1)))
    server.stop()
    away = main(
        "checkpoint.resume=last", f"checkpoint.resume={folder}", "train.max_steps=9999999"
    ).check_refused(
        f"is recorded in {server.url}, and", "or tracking=none to continue without a record"
    )
    assert "resumed at step" not in away.stdout


@pytest.fixture
def finished(main, tmp_path, empty_store):
    """Return the folder and the id of a run of four steps in a store of its own."""
    empty_store(tmp_path / "mine" / "runs.db")
    main(*SHORT, "tracking.uri=sqlite:///mine/runs.db").check_ok()
    (folder,) = (path.parent for path in tmp_path.glob("outputs/runs/*/result.json"))
    return folder, state_of(folder)["run_id"]


@pytest.mark.slow
def test_a_store_that_cannot_be_the_runs_is_refused_before_training(finished, main, tmp_path):
    folder, run_id = finished
    own = f"sqlite:///{tmp_path}/mine/runs.db"
    typed = (f"checkpoint.resume={folder}", "train.max_steps=6")

    def refused(*more):
        done = main(*typed, *more).check_refused()
        assert "resumed at step" not in done.stdout
        return done.stderr

    other = refused("tracking.uri=sqlite:///other.db")
    assert f"sqlite:///{tmp_path}/other.db does not hold its run {run_id}" in other
    assert f"Leave tracking.uri out to continue in {own}" in other
    assert not (tmp_path / "other.db").exists()
    refused(f"tracking.uri=http://127.0.0.1:{free_port()}")
    state, content = folder / "journal.state", (folder / "journal.jsonl").read_text()
    signed = json.loads(content.splitlines()[0])["signature"]
    for forged in ("0" * 64, "", "x" * 64):
        (folder / "journal.jsonl").write_text(content.replace(signed, forged))
        told = refused()
        assert "is not signed with your key" in told
        assert f"type tracking.uri={own}" in told
    (folder / "journal.jsonl").write_text(content)
    kept = state.read_text()
    moved = {**json.loads(kept), "uri": "http://127.0.0.1:1", "signature": signed}
    state.write_text(json.dumps(moved).ljust(4096))
    assert "is not signed with your key" in refused()
    state.write_text(kept)
    with sqlite3.connect(tmp_path / "mine/runs.db") as file:
        file.execute("update runs set lifecycle_stage='deleted'")
    assert f"mlflow runs restore --run-id {run_id}" in refused()
    (tmp_path / "mine/runs.db").rename(tmp_path / "moved.db")
    assert f"{own} does not hold its run {run_id}" in refused()
    with sqlite3.connect(tmp_path / "moved.db") as file:
        file.execute("update runs set lifecycle_stage='active'")
    main(*typed, "tracking.uri=sqlite:///moved.db").check_ok()
    assert rows(tmp_path / "moved.db", run_id) == ("FINISHED", [1, 2, 3, 4, 5, 6])


@pytest.mark.slow
def test_a_resumed_run_keeps_the_other_keys_of_tracking(finished, main):
    folder, _ = finished
    main(f"checkpoint.resume={folder}", "train.max_steps=5", "tracking.tags.more=yes").check_ok()
    config = (folder / "config.yaml").read_text()
    assert "log_model: false" in config
    assert "system_metrics: null" in config
    assert "more: yes" in config.replace("'", "")
    main(f"checkpoint.resume={folder}", "train.max_steps=6", "tracking=none").check_ok()
    assert len(list(folder.glob("journal*.jsonl"))) == 2
