"""The end of a sweep: which jobs its report holds."""

import time
import warnings
from dataclasses import replace

import pytest
from job_results import finished

from runner.sweeps import sweep as sweeps
from runner.sweeps.sweep import Sweep
from runner.tracking.reader import Reader
from runner.tracking.tracker import NoTracker
from runner.utils.errors import TrackingError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mlflow  # noqa: F401  its warnings are not ours

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own, of SQLAlchemy
NONE = {"_target_": "runner.tracking.tracker.NoTracker"}


def begun(folder, precision, tracking, **more):
    """A sweep whose only job has ended."""
    sweep = Sweep(folder, [f"precision={precision}"], tracking)
    replace(finished(precision, **more), folder=str(folder / "0")).write(folder / "0")
    return sweep


@pytest.mark.parametrize("last", ["first machine", "second machine"])
def test_the_report_holds_every_machines_jobs_whoever_ends_last(
    tmp_path, monkeypatch, capsys, last, empty_store
):
    # A store in a file keeps its artifacts in the folder of the command.
    monkeypatch.chdir(tmp_path)
    uri = empty_store(tmp_path / "mlflow.db")
    store = {"_target_": "runner.tracking.mlflow.MlflowTracker", "uri": uri, "experiment": "x"}
    first = begun(tmp_path / "first", "32-true", store)
    end = time.monotonic() + 60
    while first.tracker.run_id is None and time.monotonic() < end:
        time.sleep(0.05)
    joined = {**store, "sweep": first.manifest.id}
    page = {"dashboard": "/#/shared", "tracking_uri": uri}
    second = begun(tmp_path / "second", "bf16-mixed", joined, examples_per_second=150.0, **page)
    pair = [second, first] if last == "first machine" else [first, second]
    pair[0].end(0)
    capsys.readouterr()
    assert pair[1].end(0) == 0
    shown = capsys.readouterr().out
    reader = Reader(uri)
    parent = reader.run(first.tracker.run_id)
    report = reader.artifact(parent.run_id, "report.md").decode()
    local = (pair[1].folder / "report.md").read_text()
    for text in (report, local, parent.tags["mlflow.note.content"], shown):
        assert "bf16-mixed with more seeds: 1.50 × as fast as 32-true" in text
    assert len(reader.artifacts(parent.run_id, "jobs")) == 2
    assert last == "first machine" or "dashboard: http://127.0.0.1:5000/#/shared" in shown


def test_the_report_of_one_machine_is_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(NoTracker, "run_id", "parent")
    monkeypatch.setattr(sweeps, "is_joined_by_others", lambda *_: False)
    monkeypatch.setattr(sweeps, "store_report", None)
    begun(tmp_path, "b", NONE).end(0)
    assert "b finished: " in (tmp_path / "report.md").read_text()


def test_the_report_stays_where_the_store_does_not_answer(tmp_path, monkeypatch, capsys):
    def silent(*_):
        raise TrackingError("gone")

    monkeypatch.setattr(NoTracker, "run_id", "parent")
    monkeypatch.setattr(sweeps, "is_joined_by_others", silent)
    assert begun(tmp_path, "b", NONE).end(0) == 0
    shown = capsys.readouterr().out
    assert "warning: the report covers only the jobs that ran on this machine: gone" in shown
    assert "b finished: " in shown
    assert "b finished: " in (tmp_path / "report.md").read_text()


def test_a_name_is_shortened_after_its_credentials_are_hidden(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(NoTracker, "open", lambda self, info: opened.append(info.name))
    Sweep(tmp_path, ["x" * 200, f"tracking.uri=postgresql://me:{'pass' * 20}@host/db"], NONE)
    assert "pass" not in opened[0]
    assert len(opened[0]) <= 250
