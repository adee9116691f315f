"""How far a sweep is, from the files in its folder."""

import os
import re
from dataclasses import replace

import pytest
from job_results import finished, lost

from runner.core.base.layout import CONFIG, MANIFEST, RESULT
from runner.sweeps.manifest import Manifest
from runner.sweeps.sweep_progress import job_label, print_job_line
from runner.sweeps.verdict.advise_request import AdviseRequest

ASKED = AdviseRequest("time", 1.0, 100, 60, 5, "5m", ["python", "-m", "runner"])
NOW = 1_000_000
BEGUN = 1000.0
CASES = {
    # manifest, seconds of the jobs that have ended: beside the bar of the next job, in the last
    # line
    "nothing is known before the first job has ended": (
        {"jobs": 8, "jobs_at_once": 1},
        [],
        ("job 1/8", ""),
    ),
    "the mean of the jobs that have ended": (
        {"jobs": 8, "jobs_at_once": 1},
        [100.0, 110.0],
        ("job 3/8, 12 min left", "; about 12 min of the sweep left"),
    ),
    "what a process does around its run counts": (
        {"jobs": 6, "jobs_at_once": 1},
        [20.0, 70.0, 70.0],  # 20, 100 and 100 with it
        ("job 4/6, 4 min left", "; about 4 min of the sweep left"),
    ),
    "places share what is left": (
        {"jobs": 8, "jobs_at_once": 3},
        [100.0, 140.0],
        ("job 3/8, 4 min left", "; about 4 min of the sweep left"),
    ),
    "a batch system does not say how many run": ({"jobs": 8}, [100.0, 140.0], ("job 3/8", "")),
    "a job that failed at once took no time": (
        {"jobs": 3, "jobs_at_once": 1},
        [0.0, 10.0],
        ("job 3/3, 40 s left", "; about 40 s of the sweep left"),
    ),
    "the newest jobs tell, as where another program begins": (
        {"jobs": 11, "jobs_at_once": 1},
        [1.0] * 2 + [20.0] * 8,
        ("job 11/11, 50 s left", "; about 50 s of the sweep left"),
    ),
    "the last job": ({"jobs": 2, "jobs_at_once": 1}, [1.0, 1.0], ("job 3/2", "")),
    "an unknown number of jobs": ({}, [9.0], ("job 2", "")),
}


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Make the folder of a sweep whose jobs took so many seconds each; return its last job's.

    Of its places, each job but the first in one waited 30 s before its run.
    """
    monkeypatch.setattr("runner.core.base.fmt.now_ms", lambda: NOW)

    def make(seconds, **manifest):
        Manifest("id", ["python"], **manifest).write(tmp_path)
        os.utime(tmp_path / MANIFEST, (BEGUN, BEGUN))
        places = manifest.get("jobs_at_once", 1)
        ends = [BEGUN + 10.0] * places
        for number, each in enumerate(seconds):
            folder = tmp_path / str(number)
            replace(finished("b"), seconds=each, folder=str(folder)).write(folder)
            (folder / CONFIG).touch()
            begun = ends[-places] + 30.0 * (number >= places)
            ends.append(begun + each)
            os.utime(folder / CONFIG, (begun, begun))
            os.utime(folder / RESULT, (ends[-1], ends[-1]))
        return tmp_path / str(len(seconds) - 1)

    return make


@pytest.mark.parametrize(("manifest", "seconds", "texts"), CASES.values(), ids=CASES)
def test_jobs_say_how_far_the_sweep_is(sweep, tmp_path, capsys, manifest, seconds, texts):
    folder = sweep(seconds, **manifest)
    beside_bar, left = texts
    assert job_label(tmp_path, "b seed=1")() == f"{beside_bar}  b seed=1"
    print_job_line(folder)
    printed = capsys.readouterr().out
    assert printed.endswith(
        f"val/accuracy 0.9  100 examples/s  finished{left}\n" if seconds else ""
    )


TRIALS = {
    "of a known number": (
        {"max_trials": 12, "budget_end_ms": NOW + 200_000},
        ("trial 3/12, 3 min left", "; about 3 min of the budget left"),
    ),
    "of a search, whose length is not known": ({"budget_end_ms": NOW - 5_000}, ("trial 3", "")),
}


@pytest.mark.parametrize(("manifest", "texts"), TRIALS.values(), ids=TRIALS)
def test_trials_say_how_far_the_budget_is_and_what_they_are_judged_by(
    sweep, tmp_path, capsys, manifest, texts
):
    folder = sweep([1.0, 1.0], jobs=2, jobs_at_once=1, **manifest)
    beside_bar, left = texts
    assert job_label(tmp_path, "b seed=1")() == f"{beside_bar}  b seed=1"
    # Before the trials have a length, one measures the time of a step: no trial of the verdict.
    print_job_line(folder)
    assert capsys.readouterr().out == ""
    ASKED.write(tmp_path)
    metrics = {"val/accuracy": 0.9, "val/loss": 0.25}
    replace(finished("b"), folder=str(folder), metrics=metrics).write(folder)
    print_job_line(folder)
    assert capsys.readouterr().out.endswith(f"val/loss 0.25  100 examples/s  finished{left}\n")


def test_the_time_left_runs_down_while_a_job_runs(sweep, tmp_path, monkeypatch):
    sweep([100.0], jobs=3, jobs_at_once=1)
    label = job_label(tmp_path, "b")
    monkeypatch.setattr("runner.core.base.fmt.now_ms", lambda: NOW + 140_000)
    # The job takes longer than the one before it: the last one is still to come.
    assert label() == "job 2/3, 2 min left  b"


def test_a_job_that_was_stopped_has_not_ended(sweep, tmp_path, capsys):
    folder = sweep([1.0, 1.0], jobs=2)
    replace(finished("b"), status="stopped").write(folder)
    assert job_label(tmp_path, "b")() == "job 2/2  b"
    print_job_line(folder)
    assert capsys.readouterr().out.startswith("job 2 of 2  b ")


def test_the_line_of_a_job_that_printed_elsewhere_says_why_it_failed_and_its_log(sweep, capsys):
    folder = sweep([1.0, 1.0, 1.0], jobs=3)
    failed = replace(finished("b"), folder=str(folder), status="failed", error="killed\nmore")
    failed.write(folder)
    print_job_line(folder, 2, is_elsewhere=True)
    line = capsys.readouterr().out
    assert line.startswith("job 2 of 3  b ")
    assert line.endswith(f"failed, its log is in {folder}: killed\n")


def test_an_error_is_shown_once_and_a_later_line_names_the_job_that_has_it(sweep, tmp_path, capsys):
    last = sweep([1.0, 1.0, 1.0], jobs=10)
    for number, precision in enumerate(("b", "c", "b")):
        folder = tmp_path / str(number)
        failed = lost(precision, "unavailable", f"needs a GPU, at step {number}", number)
        replace(failed, folder=str(folder)).write(folder)
    print_job_line(tmp_path / "1")
    print_job_line(last)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("not tried, because needs a GPU, at step 1")
    same = lost("c", "unavailable", "precision=c needs a GPU, at step 0")
    named = lost("b", "unavailable", "precision=b needs a GPU, at step 0")
    replace(same, folder=str(tmp_path / "1")).write(tmp_path / "1")
    replace(named, folder=str(tmp_path / "0")).write(tmp_path / "0")
    print_job_line(tmp_path / "1")
    assert capsys.readouterr().out.endswith("not tried, as b seed=0\n")
    assert re.fullmatch(r"job  3 of 10  b seed=2 +not tried, as b seed=0", second)


def test_a_trial_that_failed_before_the_next_manifest_keeps_its_number(sweep, tmp_path, capsys):
    folder = sweep([1.0, 1.0], budget_end_ms=NOW)
    ASKED.write(tmp_path)
    failed = replace(finished("a"), folder=str(tmp_path / "0"), status="failed", error="broke")
    failed.write(tmp_path / "0")
    os.utime(tmp_path / "0" / RESULT, (BEGUN - 1, BEGUN - 1))
    print_job_line(folder)
    assert capsys.readouterr().out.startswith("trial 2  b ")


def test_the_line_of_a_trial_says_why_it_failed(sweep, tmp_path, capsys):
    folder = sweep([1.0], budget_end_ms=NOW)
    ASKED.write(tmp_path)
    failed = replace(finished("b"), folder=str(folder), status="failed", diverged=True)
    replace(failed, error="the loss is nan\nmore").write(folder)
    print_job_line(folder)
    assert capsys.readouterr().out.endswith("diverged: the loss is nan\n")
