"""sweep.prune=median: a hopeless job of a sweep ends early, and is no failure."""

import json
from importlib.util import find_spec

import pytest
from run_folders import job_results

needs_optuna = pytest.mark.skipif(
    not find_spec("optuna"), reason="needs optuna: pip install 'precision-runner[optuna]'"
)
SWEEP = (
    "-m",
    "hydra/launcher=basic",
    "sweep.prune=median",
    "train.max_steps=30",
    "train.eval_every=10",
    "optimizer.lr=0.02,0.01,0.03,1e-6",
)


@needs_optuna
def test_a_hopeless_job_is_pruned_and_not_run_again(quick, main, tmp_path):
    done = quick(*SWEEP)
    assert done.rc == 0, done.stderr
    assert "Warning" not in done.stderr
    results = job_results(tmp_path)
    assert [job["status"] for job in results] == ["finished"] * 3 + ["pruned"]
    assert (results[3]["steps"], results[3]["planned_steps"]) == (20, 30)
    assert "pruned at step 20: val/accuracy" in done.stdout
    assert "Pruned: 32-true optimizer.lr=1e-06." in " ".join(done.stdout.split())
    (folder,) = tmp_path.glob("outputs/sweeps/*")
    report = (folder / "report.md").read_text()
    assert "3 of 4 jobs finished" in report
    assert "| 32-true optimizer.lr=1e-06 | pruned at step 20 |" in report
    assert "## Failed" not in report
    assert json.loads((folder / "sweep.json").read_text())["finished"]
    again = main(f"sweep.resume={folder}")
    assert (again.rc, again.stdout.count("pruned before")) == (0, 1)


@needs_optuna
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep.prune=median"], "sweep.prune is for sweeps. Type -m, or leave it out."),
        (
            ["-m", "optimizer.lr=1,2", "sweep.prune=best"],
            "sweep.prune=best is not known. Allowed: median",
        ),
        (["-m", "seed=0,1", "sweep.prune=median"], "and this sweep varies no other key."),
        (["-m", "optimizer.lr=1,2", "mode=plan", "sweep.prune=median"], "mode=plan. Leave it out."),
        (["mode=advise", "sweep.prune=median"], "mode=advise. Leave it out."),
    ],
)
def test_where_nothing_can_be_pruned_the_key_is_refused(quick, words, message):
    done = quick(*words)
    assert (done.rc, message in done.stderr) == (2, True), done.stderr
