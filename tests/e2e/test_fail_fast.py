"""sweep.fail_fast=true: the first failed job ends the sweep, and sweep.resume continues it."""

import pytest
from run_folders import job_results, only_sweep, read_json

SWEEP = ("-m", "tracking=none", "sweep.fail_fast=true")
FAILS_SECOND = "precision.keep_fp32=[],[nothing],[head]"


def numbers(folder):
    return sorted(int(path.parent.name) for path in folder.glob("outputs/sweeps/*/*/result.json"))


def test_the_first_failure_ends_the_sweep_and_resume_continues_it(quick, main, tmp_path):
    done = quick(*SWEEP, FAILS_SECOND, "hydra/launcher=basic")
    assert done.rc == 1, done.stderr
    assert numbers(tmp_path) == [0, 1]
    text = " ".join(done.stdout.split())
    assert "32-true precision.keep_fp32=[nothing] has failed; no further job was started." in text
    folder = only_sweep(tmp_path)
    assert "1 of the sweep's 3 jobs had not begun" in (folder / "report.md").read_text()
    assert f"Resume with: python -m runner sweep.resume=outputs/sweeps/{folder.name}" in text
    again = main("sweep.resume=last", "sweep.fail_fast=false")
    assert again.rc == 1, again.stderr
    assert numbers(tmp_path) == [0, 1, 2]
    assert [job["status"] for job in job_results(tmp_path)] == ["finished", "failed", "finished"]


@pytest.mark.slow
def test_jobs_that_run_beside_the_failed_one_end_with_a_checkpoint(quick, main, tmp_path):
    long = ("train.max_steps=1000000", "hydra.launcher.n_jobs=2")
    done = quick(*SWEEP, FAILS_SECOND, *long)
    assert done.rc == 1, done.stderr
    stopped, failed = job_results(tmp_path)
    assert (stopped["status"], failed["status"]) == ("stopped", "failed")
    # On a busy machine it may be stopped before its first step.
    folder = only_sweep(tmp_path)
    metrics = folder / "0" / "metrics.jsonl"
    has_stepped = metrics.is_file() and "train/loss" in metrics.read_text()
    if has_stepped:
        assert any(folder.glob("0/checkpoints/*.pt"))
    manifest = read_json(folder / "sweep.json")
    assert (manifest["jobs"], manifest["finished"]) == (3, False)
    assert "sweep.fail_fast=true" in manifest["command"]
    assert "1 of the sweep's 3 jobs had not begun" in " ".join(done.stdout.split())


def test_a_precision_that_is_not_here_is_no_failure(quick, tmp_path):
    done = quick(*SWEEP, "accelerator=cpu", "precision=tf32,bf16-mixed", "hydra/launcher=basic")
    done.check_refused()
    assert [job["status"] for job in job_results(tmp_path)] == ["unavailable", "finished"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sweep.fail_fast=true", "sweep.fail_fast is for sweeps. Type -m, or leave it out."),
        ("-m seed=0,1 sweep.fail_fast=maybe", "sweep.fail_fast=maybe: type true or false."),
        (
            "-m seed=0,1 sweep.failfast=true",
            "sweep.resume, sweep.fail_fast, sweep.verbose. Type sweep.fail_fast=<value>.",
        ),
        ("sweep.verbose=true", "sweep.verbose is for sweeps. Type -m, or leave it out."),
        ("-m seed=0,1 sweep.verbose=2", "sweep.verbose=2: type true or false."),
        ("mode=advise sweep.fail_fast=true", "in mode=advise a precision that fails is an"),
        (
            "-m seed=0,1 launcher=joblib sweep.fail_fast=true",
            "hydra/launcher=joblib hands all of them over at once. Leave it out, or type "
            "launcher=isolated.",
        ),
    ],
)
def test_where_it_cannot_work_it_is_refused(quick, words, message):
    quick(*words.split()).check_refused(message)
