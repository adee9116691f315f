"""The end of a sweep: which jobs its report holds."""

import json
import time
from dataclasses import replace

import pytest
import quiet_mlflow  # noqa: F401  so that its imports print no warning
from job_results import finished, lost
from omegaconf import OmegaConf
from rich.console import Console

from runner.core.base.errors import TrackingError
from runner.core.record.tracker import NoTracker
from runner.sweeps import sweep as sweeps
from runner.sweeps.sweep import Sweep, sweep_name
from runner.tracking.reader import Reader

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own, of SQLAlchemy
NONE = {"_target_": "runner.core.record.tracker.NoTracker"}


def begun(folder, precision, tracking, **more):
    """A sweep whose only job has ended."""
    sweep = Sweep(folder, [f"precision={precision}"], tracking)
    sweep.begin()
    replace(finished(precision, **more), folder=str(folder / "0")).write(folder / "0")
    return sweep


@pytest.mark.parametrize("last", ["first machine", "second machine"])
def test_the_report_holds_the_jobs_of_every_machine(
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
    second = begun(tmp_path / "second", "bf16-mixed", joined, examples_per_second=150.0)
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
    answer = json.loads(reader.artifact(parent.run_id, "report.json"))["answer"]
    tags = {key: text for key, text in parent.tags.items() if key.startswith("verdict/")}
    tags |= {key: parent.tags[key] for key in ("answer", "recommended")}
    assert answer == parent.metrics | tags, "of the page and of the store"
    assert answer["verdict/bf16-mixed"] == "not judged"
    assert parent.metrics["answer/speed_ratio/bf16-mixed"] == 1.5
    place = f"#/experiments/{parent.experiment_id}/runs/{parent.run_id}"
    assert f"]({place}/artifacts/report.html?workflow" in parent.tags["mlflow.note.content"]
    assert "http:" not in shown, "no server answers"
    assert len(reader.artifacts(parent.run_id, "jobs")) == 2


def test_the_report_of_one_machine_is_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(NoTracker, "run_id", "parent")
    monkeypatch.setattr("runner.tracking.reader.Reader", lambda uri: None)
    monkeypatch.setattr(sweeps, "is_joined_by_others", lambda *_: False)
    monkeypatch.setattr(sweeps, "store_report", None)
    begun(tmp_path, "b", NONE).end(0)
    assert "b finished: " in (tmp_path / "report.md").read_text()


def test_the_report_stays_where_the_store_does_not_answer(tmp_path, monkeypatch, capsys):
    def silent(*_):
        raise TrackingError("gone")

    monkeypatch.setattr(NoTracker, "run_id", "parent")
    monkeypatch.setattr("runner.tracking.reader.Reader", lambda uri: None)
    monkeypatch.setattr(sweeps, "is_joined_by_others", silent)
    assert begun(tmp_path, "b", NONE).end(0) == 0
    shown = capsys.readouterr().out
    assert "warning: the report covers only the jobs that ran on this machine: gone" in shown
    assert "b finished: " in shown
    assert "b finished: " in (tmp_path / "report.md").read_text()


def test_what_all_jobs_share_are_params_without_credentials(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(NoTracker, "open", lambda self, info: opened.append(info))
    uri = "tracking.uri=postgresql://me:pass@host/db"
    Sweep(tmp_path, ["precision=32-true,tf32", "++optimizer.lr=0.1", uri], NONE, name="n").begin()
    (info,) = opened
    assert (info.name, info.tags["swept"]) == ("n", "precision")
    assert info.params == {"optimizer.lr": "0.1", "tracking.uri": "postgresql://***@host/db"}


def test_the_first_job_waits_for_the_writer_of_records(tmp_path, monkeypatch):
    """It would have less of the machine than those it is compared with. A store may not answer."""
    asked = []

    def run_id(self):
        asked.append(self)
        return "id" if len(asked) == 3 else None

    monkeypatch.setattr(NoTracker, "takes_runs", True)
    monkeypatch.setattr(NoTracker, "run_id", property(run_id))
    Sweep(tmp_path / "answers", [], NONE).begin()
    assert len(asked) == 3
    monkeypatch.setattr(sweeps, "MAX_WRITER_START_SECONDS", 0.0)
    Sweep(tmp_path / "silent", [], NONE).begin()
    assert len(asked) == 4


def test_a_sweep_whose_list_got_longer_has_its_name_now(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(NoTracker, "open", lambda self, info: opened.append(info))
    for words in ("seed=0,1", "seed=0,1", "seed=0,1,2"):
        sweep = Sweep(tmp_path, [words], NONE, resume=bool(opened), name=words)
        sweep.begin()
        sweep.end(130)
    assert [info.tags.get("mlflow.runName") for info in opened] == [None, None, "seed=0,1,2"]


@pytest.mark.parametrize(
    ("words", "more", "name"),
    [
        (["precision=a,b", "seed=0,1"], {}, "mlp on digits: 2 precisions × 2 seeds"),
        (["+optimizer.lr=choice(1,2,3)", "model=a,b"], {}, "digits: 3 optimizer.lr × 2 models"),
        (
            ["x=1"],
            {"params": {"precision": "a,b", "seed": "0,1,2"}},
            "mlp on digits: 2 precisions × 3 seeds",
        ),
        (["precision=glob(*)", "x=interval(0,1)"], {}, "mlp on digits: precisions × x"),
        (["model.hidden=[1,2]"], {"mode": "advise"}, "advise mlp on digits"),
        (["precision=a,b"], {"mode": "evaluate"}, "evaluate: 2 precisions"),
        (["seed=0,1", "broken=[,"], {}, "mlp on digits"),
    ],
)
def test_a_sweep_is_named_by_what_it_trains_and_how_many_values_each_key_has(words, more, name):
    config = OmegaConf.create(
        {
            "mode": more.get("mode", "train"),
            "hydra": {
                "sweeper": {"params": more.get("params")},
                "overrides": {"task": words},
                "runtime": {"choices": {"model": "mlp", "data": "digits"}},
            },
        }
    )
    assert sweep_name(config) == name


def test_an_error_that_precisions_share_is_printed_once_and_a_command_stays_whole(capsys):
    command = "The loss is inf; python -m runner precision=c seed=0"
    errors = {"a": "precision=a needs a GPU.", "b": "precision=b needs a GPU.", "c": command}
    sweeps._print_errors(Console(width=200), [lost(name, error=e) for name, e in errors.items()])
    printed = capsys.readouterr().out
    assert "a seed=0, b seed=0: it needs a GPU.\n" in printed
    assert f"c seed=0: {command}\n" in printed


def test_errors_of_a_precision_that_differ_in_numbers_are_printed_once(capsys):
    steps = {"a": (0, 1), "b": (2,)}
    jobs = [lost(name, error=f"nan at {n}", seed=n) for name, seeds in steps.items() for n in seeds]
    sweeps._print_errors(Console(width=200), jobs)
    printed = capsys.readouterr().out
    assert "a seed=0, a seed=1 alike: nan at 0\nb seed=2: nan at 2\n" in printed
