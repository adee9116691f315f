"""hydra/launcher=isolated: jobs that die in every way, sweeps that are stopped; none stays."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from quiet_mlflow import runs_in
from run_folders import job_results, write_lab
from waiting import SECONDS, wait_for

from runner.core.base.stop_signals import COALESCE_SECONDS

TINY = (
    "--config-dir lab/conf data=mine train.max_steps=3 train.log_every=1 "
    "hydra/launcher=isolated model=deadly -m"
).split()
WAYS = {
    "exits": "Its process ended with exit status 3 before it wrote a result.",
    "killed": "Its process was ended by SIGKILL",
    "segfault": "Its process was ended by SIGSEGV. Last lines: Fatal Python error: Segmentation",
    "memory": "Out of memory in step 2 on ",
    "raises": "ArithmeticError: failed as it was told to",
    "leaves_a_child": "Its process ended with exit status 3 before it wrote a result.",
    "well": "",
}


@pytest.fixture(scope="module")
def deaths(tmp_path_factory, inside, store, reader):
    """A job of each way to die, one after the other: (what was printed, the jobs' results, their
    runs and the parent in the store)."""
    folder = write_lab(tmp_path_factory.mktemp("deaths"))
    tracked = (f"tracking.uri={store}", "tracking.experiment=deaths")
    with inside(folder) as main:
        done = main(*TINY, f"model.how={','.join(WAYS)}", *tracked)
    runs = runs_in(reader(), "deaths")
    (parent,) = [run for run in runs if run.data.tags.get("role") == "sweep"]
    children = {Path(run.data.tags["output_dir"]).name: run for run in runs if run is not parent}
    return done, job_results(folder), [children[str(n)] for n in range(len(WAYS))], parent


def test_a_job_that_dies_is_a_failed_one_and_the_others_run(deaths):
    done, jobs, *_ = deaths
    assert done.rc == 1
    assert [job["status"] for job in jobs] == ["failed"] * 6 + ["finished"]
    for job, said in zip(jobs, WAYS.values(), strict=True):
        assert job["error"].startswith(said)
        assert "".join(job["error"].split()) in "".join(done.stdout.split())
    assert "the last thing it said" in jobs[0]["error"]
    assert "deadly.py" in jobs[2]["error"]  # where it crashed
    for part in ("weights", "optimizer state", "peak", "train.batch_size=32 train.accumulate=2"):
        assert part in jobs[3]["error"]


def test_the_store_knows_how_each_ended(deaths):
    _, jobs, runs, parent = deaths
    assert [run.info.status for run in runs] == ["FAILED"] * 6 + ["FINISHED"]
    for job, run in zip(jobs, runs[:3], strict=False):
        assert run.data.tags["error"] == job["error"]
        assert "Its process" in run.data.tags["mlflow.note.content"]
        assert run.data.metrics["train/loss"] > 0
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.info.status == "FAILED"
    assert parent.data.tags["error"] == "6 of 7 jobs did not finish."


def test_the_report_names_the_reasons(deaths):
    _, jobs, *_ = deaths
    report = (Path(jobs[0]["folder"]).parent / "report.md").read_text()
    assert "exit status 3" in report
    assert "SIGKILL" in report
    assert "SIGSEGV" in report


def test_several_at_once_in_lines_of_their_own(cli, lab):
    words = ("model.how=well,killed,raises,too", "hydra.launcher.n_jobs=3", "tracking=none")
    done = cli(*TINY, *words)
    assert done.rc == 1
    assert [job["status"] for job in job_results(lab)] == "finished failed failed finished".split()
    found = re.findall(r"^job \d of 4  32-true model.how=(\w+) ", done.stdout, re.MULTILINE)
    assert sorted(found) == ["killed", "raises", "too", "well"], done.stdout
    assert "[32-true model.how=raises] ArithmeticError: failed as it was told to" in done.stderr
    assert re.search(r"model.how=killed +failed, its log is in .*/1: Its process", done.stdout)


def test_a_fork_server_that_is_killed_costs_its_job_only(cli, lab):
    done = cli(*TINY, "model.how=orphaned,well", "tracking=none")
    assert done.rc == 1
    killed, well = job_results(lab)
    assert killed["error"].startswith("The fork server was killed, and this job with it.")
    assert well["status"] == "finished"


def test_what_a_job_leaves_running_ends_with_it(deaths):
    _, jobs, *_ = deaths
    (child,) = pids(Path(jobs[0]["folder"]).parents[3])
    wait_for(lambda: gone(child))


def pids(folder):
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def sweep(tmp_path, start_command):
    """Start a sweep of endless jobs in a folder and a process group of its own."""

    def start(name, *args):
        folder = write_lab(tmp_path / name)
        endless = "train.max_steps=10000000 train.eval_every=100000 model._target_=lab.deadly.Slow"
        process = start_command(*TINY, *endless.split(), "seed=0,1", *args, cwd=folder)
        return process, folder

    return start


def stops(process, number):
    """As a terminal does it, the whole group; a batch system may do so with SIGTERM."""
    os.killpg(process.pid, number)


@pytest.mark.slow
def test_signals_to_a_sweep(sweep, store, reader):
    stored = (f"tracking.uri={store}", "tracking.experiment=signals")
    cases = {
        "SIGINT": (130, *stored),
        "SIGTERM": (143, *stored),
        "twice": (130, "tracking=none", "model.how=hangs"),
        "blocks": (143, "tracking=none", "model.how=blocks"),
        "SIGKILL": (-9, "tracking=none"),
    }
    running = {name: sweep(name, *args) for name, (_, *args) in cases.items()}  # side by side
    for name, (process, folder) in running.items():
        wait_for(lambda folder=folder: pids(folder))
        number = {"twice": signal.SIGINT, "blocks": signal.SIGTERM}.get(name)
        stops(process, number or signal.Signals[name])
        if number:
            time.sleep(COALESCE_SECONDS + 0.1)
            assert process.poll() is None
            stops(process, number)
    for name, (process, folder) in running.items():
        _, stderr = process.communicate(timeout=SECONDS)
        assert process.returncode == cases[name][0], stderr
        assert len(pids(folder)) == 2
        wait_for(lambda folder=folder: all(map(gone, pids(folder))))
        if name != "SIGKILL":
            (result,) = job_results(folder)  # the second job has not begun
            assert result["status"] == "stopped"
            said = {"twice": "Interrupted.", "blocks": "Its process was ended by SIGKILL"}
            assert result["error"].startswith(said.get(name, f"Stopped by {name}."))
            assert "Traceback" not in stderr
    for name in ("SIGINT", "SIGTERM"):
        assert list(running[name][1].glob("outputs/sweeps/*/0/checkpoints/step-*.pt"))
    assert [run.info.status for run in runs_in(reader(), "signals")] == ["KILLED"] * 4
