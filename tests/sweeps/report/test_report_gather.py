"""Load a sweep for its report: from its folder, and from a real store alone."""

import itertools
import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from job_results import GPU, finished
from quiet_mlflow import MlflowClient

from runner.core.base.errors import ConfigError, TrackingError
from runner.core.base.layout import HISTORY
from runner.core.record.tracker import RunInfo
from runner.core.run.run_result import RunResult
from runner.sweeps.report import load
from runner.sweeps.report.load import (
    load_from_folder,
    load_from_store,
    rebuild_report,
    store_report,
    with_unique_names,
    write_job_facts,
)
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.verdict.compare import compare_with_baselines
from runner.tracking import history
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.reader import Reader, StoredRun

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own, of SQLAlchemy
DONE = finished("16-mixed", best=0.95)
LOSSES = [1.0, math.nan, math.inf, -math.inf, 0.25]


def journal(folder, losses=LOSSES):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "start"}]
    for step, loss in enumerate(losses, 1):
        values = {"train/loss": loss, "loss_scale/value": 2.0**step}
        lines.append({"kind": "metrics", "step": step, "time": 1000 + step, "values": values})
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def sweep(tmp_path):
    """A sweep's folder: one job that finished, one that failed, one that died."""
    folder = tmp_path / "sweep"
    journal(folder / "0")
    command = ["python", "-m", "runner", "-m", "precision.keep_fp32=[a b]"]
    (folder / "sweep.json").write_text(json.dumps({"id": "s", "overrides": [], "command": command}))
    replace(DONE, folder=str(folder / "0")).write(folder / "0")
    RunResult(
        precision="64-true",
        label="64-true",
        folder=str(folder / "1"),
        status="failed",
        error="a | b",
    ).write(folder / "1")
    (folder / "2").mkdir()
    return folder


def same(curve, values):
    return [repr(value) for value in curve[2].tolist()] == [repr(value) for value in values]


def test_a_folders_jobs_with_their_curves(sweep):
    data = load_from_folder(sweep)
    assert [job.result.status for job in data.jobs] == ["finished", "failed", "failed"]
    assert data.jobs[2].result.error == "died without a result"
    loss = data.jobs[0].curves["train/loss"]
    assert loss[:2].tolist() == [[1, 2, 3, 4, 5], [1001, 1002, 1003, 1004, 1005]]
    assert same(loss, LOSSES)
    assert data.jobs[1].curves == {}
    assert data.commands == ["python -m runner -m 'precision.keep_fp32=[a b]'"]
    assert (data.sweep_id, data.is_stopped) == ("s", False)


def test_a_history_is_preferred_to_the_journal_unless_it_is_damaged(sweep):
    with (sweep / "0" / "journal.jsonl").open("a") as file:
        file.write('no record\n{"kind": "metr')  # a job that was killed
    (sweep / "0" / HISTORY).write_bytes(b"PK\x03\x04 truncated")
    assert same(load_from_folder(sweep).jobs[0].curves["train/loss"], LOSSES)
    curves = {"train/loss": np.array([[1.0], [2.0], [3.0]])}
    history.write_history(sweep / "0" / HISTORY, curves)
    assert load_from_folder(sweep).jobs[0].curves["train/loss"].tolist() == [[1.0], [2.0], [3.0]]


def test_a_sweep_that_was_moved_has_its_curves(sweep, tmp_path):
    moved = sweep.rename(tmp_path / "moved")
    journal(sweep / "0", [7.0])  # another sweep in its old place
    assert same(load_from_folder(moved).jobs[0].curves["train/loss"], LOSSES)


def test_a_history_executes_nothing(tmp_path):
    np.savez(tmp_path / "history.npz", loss=np.array([print], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        history.read_history(tmp_path / "history.npz")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A store with a parent run and three jobs: one with all that a job leaves, one killed before
    it could, one that another machine runs still; (uri, parent's id)."""
    folder = tmp_path_factory.mktemp("stored")
    uri = f"sqlite:///{folder}/mlflow.db"
    parent = MlflowTracker(uri=uri)
    tags = {"sweep_id": "night", "command": "python -m runner -m"}
    parent.open(RunInfo(folder / "p", {}, tags, name="sweep", sweep="night", role="sweep"))
    for name in ("whole", "killed"):
        tracker = MlflowTracker(uri=uri, sweep="night")
        tags = {"precision": "16-mixed", "device_name": "cpu"}
        tracker.open(RunInfo(folder / name, {"seed": "6"}, tags, name="16-mixed seed=6"))
        for step, loss in enumerate(LOSSES, 1):
            values = {"train/loss": loss, "val/accuracy": step / 10}
            tracker.log_metrics([(step, 1000 + step, values)])
        if name == "whole":
            tracker.artifact(replace(DONE, label="whole").write(folder / name))
            tracker.close("FINISHED")
        else:
            tracker.close("KILLED", "Stopped by SIGTERM.")
    parent.close("FINISHED")
    client = MlflowClient(uri)
    tags = {"sweep_id": "night", "role": "run", "precision": "32-true"}
    open_run = client.create_run(parent.experiment_id, tags=tags, run_name="32-true seed=1")
    client.log_metric(open_run.info.run_id, "train/loss", math.inf, 1, 1)
    return uri, parent.run_id


def test_the_time_to_an_equal_loss_is_that_of_the_curves_of_a_folder_and_of_a_store(tmp_path):
    folder = tmp_path / "sweep"
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    parent = MlflowTracker(uri=uri)
    parent.open(RunInfo(folder / "p", {}, {"sweep_id": "s"}, name="s", sweep="s", role="sweep"))
    for number, (name, speed) in enumerate([("32-true", 1.0), ("b", 1.2)]):
        path = folder / str(number)
        losses = [10 - (number + 4) * step / 100 for step in range(1, 101)]
        rates = {"examples_per_second": speed, "step_ms": 1 / speed}
        tracker = MlflowTracker(uri=uri, sweep="s")
        tracker.open(RunInfo(path, {}, {}, name=name))
        points = [(step, step, {"train/loss": loss}) for step, loss in enumerate(losses, 1)]
        tracker.log_metrics(points)
        result = replace(finished(name, **rates), folder=str(path))
        tracker.artifact(result.write(path))
        tracker.close("FINISHED")
    parent.close("FINISHED")
    (folder / "sweep.json").write_text(json.dumps({"id": "s", "overrides": [], "command": []}))
    reader = Reader(uri)
    of_store = load_from_store(reader, reader.run(parent.run_id)).answer.record.metrics
    of_folder = load_from_folder(folder).answer.record.metrics
    assert of_folder["answer/equal_loss_speed_ratio/b"] == pytest.approx(1.2 * 1.25, rel=0.02)
    assert of_store == of_folder


def test_jobs_without_a_list_are_loaded_from_their_runs(stored):
    uri, parent = stored
    reader = Reader(uri)
    whole, killed, running = load_from_store(reader, reader.run(parent)).jobs
    assert (whole.result.label, whole.result.best) == ("whole", 0.95)
    assert whole.result.run_id
    assert same(whole.curves["train/loss"], LOSSES)
    assert (killed.result.status, killed.result.error) == ("stopped", "Stopped by SIGTERM.")
    assert (killed.result.group, killed.result.device) == ("16-mixed", "cpu")
    assert (killed.result.seed, running.result.seed) == (6, None)
    assert killed.result.metrics == {"val/accuracy": 0.5}
    assert same(killed.curves["train/loss"], LOSSES), (
        "the writer leaves the history, however it ends"
    )
    assert running.result.status == "stopped"
    assert "still running" in running.result.error
    assert same(running.curves["train/loss"], [math.inf])


@pytest.mark.parametrize(
    ("metric", "tags", "expected"),
    [
        ("val/accuracy", {}, ("val/accuracy", "max")),
        ("val/accuracy", {"quality": "val/loss", "direction": "min"}, ("val/loss", "min")),
        ("val/accuracy", {"quality": "val/cer", "direction": "min"}, ("val/accuracy", "max")),
        ("val/f1", {}, ("val/loss", "min")),
        ("val/f1", {"quality": "val/f1", "direction": "max"}, ("val/f1", "max")),
        ("val/f1", {"quality": "val/bleu", "direction": "max"}, ("val/loss", "min")),
    ],
)
def test_a_run_without_a_result_is_compared_by_the_quality_of_its_task(metric, tags, expected):
    metrics = {"val/loss": 0.3, metric: 0.9}
    run = StoredRun("a", "0", "whole", "FAILED", 0, metrics, tags, {})
    reader = SimpleNamespace(uri="", artifact_or_notice=lambda *_: None)
    result = load.result_of_run(reader, run)
    assert (result.quality, result.direction) == expected


def test_a_damaged_history_of_a_store_is_read_from_its_points(stored, monkeypatch):
    monkeypatch.setattr(Reader, "artifact", lambda *_: b"PK\x03\x04 truncated")
    facts = load.JobFacts(results=[asdict(DONE)], requested_jobs=1)
    monkeypatch.setattr(load, "_stored_lists", lambda *_: [facts])
    monkeypatch.setattr(load, "result_of_run", lambda _, run: replace(DONE, run_id=run.run_id))
    reader = Reader(stored[0])
    jobs = load_from_store(reader, reader.run(stored[1])).jobs
    assert [len(job.curves.get("train/loss", [()])[0]) for job in jobs] == [0, 5, 5, 1]


@pytest.mark.parametrize("damaged", [b"", b'{"results": [', b'{"results": 1}'])
def test_a_damaged_list_leaves_its_jobs_to_their_runs(stored, monkeypatch, damaged):
    """The tolerance is still that of the list which another process stored before."""
    whole = asdict(load.JobFacts(tolerance={"deviations": 2.0}, results=[asdict(DONE)]))
    lists = {"jobs/jobs-1.json": json.dumps(whole).encode(), "jobs/jobs-2.json": damaged}
    fetch = Reader.artifact_or_notice

    def artifact(reader, run_id, path):
        return lists[path] if path in lists else fetch(reader, run_id, path)

    monkeypatch.setattr(Reader, "artifacts", lambda *_: [*lists])
    monkeypatch.setattr(Reader, "artifact_or_notice", artifact)
    reader = Reader(stored[0])
    data = load_from_store(reader, reader.run(stored[1]))
    assert data.tolerance.deviations == 2.0
    labels = [job.result.label for job in data.jobs]
    assert labels == [DONE.label, "whole", "16-mixed seed=6", "32-true seed=1"]


def test_a_sweep_is_found_by_its_id_its_parent_and_its_jobs(stored, tmp_path):
    uri, parent = stored
    reader = Reader(uri)
    (job,) = [run for run in reader.jobs(reader.run(parent)) if run.name == "32-true seed=1"]
    names = ("night", parent, job.run_id)
    pages = {store_report(Reader(uri), name, tmp_path)[0][0].read_text() for name in names}
    assert len(pages) == 1
    artifact = reader.artifact(parent, "report.html")
    assert artifact == (tmp_path / "report.html").read_bytes()
    assert "16-mixed" in reader.run(parent).tags["mlflow.note.content"]


def test_jobs_of_two_machines_are_in_one_report(stored, sweep, tmp_path):
    uri, parent = stored
    jobs = write_job_facts(tmp_path, load_from_folder(sweep), 1)
    store_report(Reader(uri), "night", tmp_path, jobs)
    reader = Reader(uri)
    data = load_from_store(reader, reader.run(parent))
    labels = [job.result.label for job in data.jobs]
    assert labels[:3] == ["16-mixed seed=0", "64-true", "job 2"]
    assert len(labels) == 6
    assert data.commands == ["python -m runner -m 'precision.keep_fp32=[a b]'"]


def test_a_second_device_changes_no_name_and_outdated_ones_are_cleared(stored, tmp_path):
    uri, parent = stored
    reader = Reader(uri)
    alone = [finished("32-true"), finished("16-mixed", examples_per_second=50.0)]
    joined = [*alone, *(replace(one, device="B", examples_per_second=9.0) for one in alone)]
    for results in ([replace(one, steps=5) for one in joined[::-1]], joined):
        metrics, tags, steps = SweepData([*map(Job, results)]).answer.record
        reader.log_answer(reader.run(parent), metrics, tags, steps)
    run = reader.run(parent)
    speeds = {name: run.metrics[name] for name in run.metrics if "/speed_ratio/" in name}
    first, second = "answer/speed_ratio/16-mixed", "answer/speed_ratio/16-mixed B"
    assert (speeds.pop(first), speeds.pop(second)) == (0.5, 1.0)
    base = "answer/speed_ratio/32-true"
    assert (speeds.pop(base), speeds.pop(f"{base} B")) == (1.0, 1.0)
    assert speeds.keys() == {f"{base} {GPU}", f"{first} {GPU}"}
    assert all(map(math.isnan, speeds.values())), "B was the first device, then it was not"
    verdicts = {tag for tag in run.tags if tag.startswith("verdict/")}
    assert verdicts == {tag for tag in tags if tag.startswith("verdict/")}
    assert len(verdicts) == 4


@pytest.mark.parametrize("name", ["nosuch", "no/such", "a' or tags.role = 'sweep"])
def test_an_id_that_is_no_sweep_of_the_store_is_refused(stored, tmp_path, name):
    with pytest.raises(ConfigError, match="is no sweep"):
        store_report(Reader(stored[0]), name, tmp_path)


def test_a_store_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError, match="cannot be read"):
        Reader("http://127.0.0.1:9").newest_sweep("precision-runner")


def test_rebuild_by_folder_and_the_newest(sweep, tmp_path, monkeypatch, capsys, stored):
    assert rebuild_report([str(sweep)], {}) == 0
    assert "│ 16-mixed " in capsys.readouterr().out
    home = tmp_path / "home"
    (home / "outputs" / "sweeps").mkdir(parents=True)
    monkeypatch.chdir(home)
    with pytest.raises(ConfigError, match="no sweep in the experiment 'none'"):
        rebuild_report([], {"tracking.uri": stored[0], "tracking.experiment": "none"})
    (home / "outputs" / "sweeps" / "2026").symlink_to(sweep)
    assert rebuild_report([], {"tracking.uri": stored[0]}) == 0
    printed = capsys.readouterr().out
    assert "outputs/reports" in printed, "the store that was asked for comes first"
    assert rebuild_report([], {}) == 0
    assert "64-true" in capsys.readouterr().out


def job(precision, group, *overrides, seed=0):
    typed = (f"precision={precision}", f"seed={seed}", *overrides)
    label = f"{group} seed={seed}"
    settings = group.split()[1:]
    return RunResult(
        precision=precision,
        label=label,
        folder="",
        overrides=typed,
        group=group,
        settings=settings,
        seed=seed,
    )


def test_one_sweeps_own_names_stay():
    settings = itertools.product(("32-true", "16-mixed"), (1, 2), (0, 1))
    jobs = [job(p, f"{p} +x={x}", "model=mlp", f"+x={x}", seed=s) for p, x, s in settings]
    assert with_unique_names(jobs) == jobs


def test_joined_jobs_are_named_by_what_differs():
    """A two-step ResNet is not compared with the MLP that it was joined to; an MLP is."""
    mlp = ("model=mlp", "train.max_steps=60", "tracking.sweep=s")
    jobs = [
        *(job("32-true", "32-true", *mlp[:2], seed=s) for s in (0, 1)),
        job("16-mixed", "16-mixed mlp digits", *reversed(mlp)),
        job("16-mixed", "16-mixed", "train.max_steps=2", "model=resnet", "data.root=/b", seed=1),
        RunResult(
            precision="", label="job 3", folder="", status="failed", error="died without a result"
        ),
    ]
    named = [(r.group, r.label) for r in with_unique_names(jobs)]
    words = "model=mlp train.max_steps=60"
    assert named[1:3] == [
        (f"32-true {words}", f"32-true {words} seed=1"),
        (f"16-mixed {words}", f"16-mixed {words} seed=0"),
    ]
    assert named[3][0] == "16-mixed model=resnet train.max_steps=2"
    assert named[4] == ("", "job 3")
    compared = compare_with_baselines(with_unique_names(jobs))
    baselines = {c.group.name: c.baseline and c.baseline.name for c in compared}
    assert baselines[f"16-mixed {words}"] == f"32-true {words}"
    assert baselines["16-mixed model=resnet train.max_steps=2"] is None
