"""mode=advise by its command: real trials, a real store, one answer."""

import os
import signal
from pathlib import Path

import pytest
from quiet_mlflow import runs_in
from run_folders import only_sweep
from waiting import SECONDS, wait_for

from runner.core.run.run_result import RunResult

pytestmark = pytest.mark.slow

WORDS = (
    "mode=advise model=mlp data=digits accelerator=cpu precision=bf16-mixed,16-true,tf32 "
    "precision.emulate=true seed=0 advise.objective=quality advise.steps=30 advise.seeds=3 "
    "optimizer.lr=3e-3 vars.note=1"
).split()


@pytest.fixture(scope="module")
def advised(tmp_path_factory, inside, store, reader):
    """(what was printed, the sweep's folder, the parent run, its children, the client)."""
    folder = tmp_path_factory.mktemp("advise")
    with inside(folder) as main:
        tracked = (f"tracking.uri={store}", "tracking.experiment=advise")
        done = main(*WORDS, *tracked, "hydra/launcher=basic")
    client = reader()
    runs = runs_in(client, "advise")
    (parent,) = [run for run in runs if run.data.tags.get("role") == "sweep"]
    return done, only_sweep(folder), parent, [run for run in runs if run is not parent], client


def results_in(folder):
    return [RunResult.read(path.parent) for path in folder.glob("*/result.json")]


def test_it_answers_and_is_done(advised):
    done, *_ = advised
    assert done.rc == 0, done.stderr
    (following,) = [line for line in done.stdout.splitlines() if line.startswith("Next: ")]
    typed = "model=mlp data=digits accelerator=cpu optimizer.lr=3e-3 vars.note=1"
    assert following.startswith(f"Next: python -m runner {typed} tracking.uri=")
    assert " tracking.experiment=advise seed=0 precision=" in following
    assert "cannot train this" in done.stdout  # Adam's eps is 0 in float16
    assert "optimizer.eps=1e-4" in done.stdout


def test_the_trials_are_paired_and_of_one_length(advised):
    results = results_in(advised[1])
    finished = [r for r in results if r.status == "finished"]
    names = ("32-true", "bf16-mixed", "tf32")
    assert {(r.precision, r.seed) for r in finished} == {(p, s) for p in names for s in range(3)}
    assert {r.steps for r in finished} == {30}
    assert [r.seed for r in results if r.status == "failed"] == [0]  # not tried again
    assert {r.group for r in results} == {*names, "16-true"}


def test_missing_hardware_is_emulated_and_present_hardware_is_not(advised):
    done, out, *_ = advised
    emulated = [r for r in results_in(out) if r.kernels == "emulated"]
    assert {r.precision for r in emulated} == {"tf32"}
    assert all(r.examples_per_second is None for r in emulated)
    assert done.stdout.count("unknown") == 1
    # As it is typed where its hardware is.
    assert "precision=tf32 precision.emulate" not in (out / "report.md").read_text()


def test_mlflow_has_a_parent_with_the_answer_and_nested_children(advised):
    _, out, parent, children, client = advised
    assert parent.info.status == "FINISHED"
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    words = sorted(run.info.status for run in children)
    assert words == ["FAILED"] + ["FINISHED"] * 9  # 16-true was refused once
    note = client.get_run(parent.info.run_id).data.tags["mlflow.note.content"]
    assert "python -m runner model=mlp data=digits" in note
    names = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {"report.html", "report.md"} <= names
    assert (out / "report.md").read_text().startswith("# Which precision for mlp on digits?")


def test_the_report_is_rebuilt_from_the_store_alone(advised, main, store):
    _, out, parent, *_ = advised
    done = main("report", parent.info.run_id, f"tracking.uri={store}").check_ok()
    (path,) = Path().glob(f"outputs/reports/{parent.info.run_id}/report.md")
    assert path.read_text() == (out / "report.md").read_text()
    assert "report.html" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("precision=32-true", "compares precisions with 32-true"),
        ("precision=bf16-mixed,nonsense", "precision=nonsense is not known"),
        ("optimizer.lr=1e-3,1e-2", "answers for one config"),
        ("advise.budget=soon", "Type for example 90s, 5m or 1h"),
        ("advise.seeds=2", "Allowed: 3 and up"),
        ("advise.objective=fame", "Allowed: time, memory, quality"),
        ("advise.tolerance=-1", "Allowed: 0 and up"),
        ("hydra/sweeper=basic -m", "without another hydra/sweeper"),
        ("sweep=precisions", "without sweep="),
        ("precision=glob(*)", "name the precisions"),
        ("hydra.launcher.n_jobs=2", "one after another"),
        ("hydra.sweep.subdir=x", "Leave hydra.sweep.subdir= out"),
        ("precision.nonsense=1", "none of"),
        ("precision.emulate=maybe", "Allowed: true, false"),
        ("precision=bf16-mixed precision.emulate=true", "lacks none of 32-true, bf16-mixed"),
        ("model=gpt data=digits tracking=none", "error: "),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_before_any_trial(main, tmp_path, words, says):
    done = main("mode=advise", "model=mlp", *words.split()).check_refused(says)
    assert done.stderr.count("error:") == 1
    assert not list(tmp_path.glob("outputs/sweeps/*/*/result.json"))


def test_a_stopped_search_for_module_sets_is_resumed(start_command, cli, tmp_path, clean):
    here = Path(__file__).parents[1] / "helpers"
    env = {"PYTHONPATH": os.pathsep.join([str(here), clean["PYTHONPATH"]])}
    words = (
        "mode=advise precision=16-mixed experiment=broken_by_range tracking=none accelerator=cpu "
        "advise.steps=60 advise.seeds=3 advise.budget=30m"
    ).split()

    def results():
        return [r for folder in tmp_path.glob("outputs/sweeps/*") for r in results_in(folder)]

    first = start_command("--config-dir", here / "planted" / "conf", *words, env=env)
    wait_for(lambda: any("keep_fp32" in r.group for r in results()), first)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=SECONDS)
    assert first.returncode == 130, err
    assert "┃ precision " in out
    assert "sweep.resume=" in out
    before = {(r.folder, r.seconds) for r in results() if r.status == "finished" or r.diverged}
    cli("sweep.resume=last", env=env).check_ok()
    after = results()
    assert len(before) >= 2
    assert before <= {(r.folder, r.seconds) for r in after}  # not done again
    assert len({tuple(r.overrides) for r in after}) == len(after)  # none was laid out anew
    assert sum("keep_fp32=[wide]" in r.group for r in after) >= 3
