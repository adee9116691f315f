"""sweep.resume=<folder> seed=0,1,2: lists of a sweep that has run get longer."""

from dataclasses import replace

import pytest
from run_folders import job_results, only_sweep, read_json

from runner.core.run.run_result import RunResult
from runner.sweeps.manifest import Manifest
from runner.sweeps.sweep_resume import resumed_numbers


@pytest.fixture
def swept(quick, tmp_path):
    """The folder of a finished sweep over precision and seed."""
    assert quick("-m", "precision=32-true,bf16-mixed", "seed=range(0,2)").rc == 0
    return only_sweep(tmp_path)


REFUSED = {
    "seed=1,2": "the sweep has seed=range(0,2), and a list may only get longer. Type seed=0,1,2.",
    "optimizer.lr=1,2": "the sweep's command does not set optimizer.lr. Only its own lists may",
    "seed=3": "only tracking.*, advise.max_gap, advise.tolerance, sweep.fail_fast",
    "hydra.launcher.n_jobs=2": "Leave hydra.launcher.n_jobs=2 out",
}


def test_jobs_run_seed_by_seed(swept):
    """The numbers stay those of Hydra: by precision, then by seed."""
    labels = [job["label"] for job in job_results(swept.parent.parent.parent)]
    assert labels == ["32-true seed=0", "32-true seed=1", "bf16-mixed seed=0", "bf16-mixed seed=1"]
    ends = [(swept / str(number) / "result.json").stat().st_mtime_ns for number in range(4)]
    assert sorted(range(4), key=ends.__getitem__) == [0, 2, 1, 3]


def test_longer_lists_add_jobs_and_keep_those_that_are_there(swept, main, tmp_path):
    before = [(swept / str(number) / "result.json").read_bytes() for number in range(4)]
    manifest = (swept / "sweep.json").read_bytes()
    for word, message in REFUSED.items():
        main(f"sweep.resume={swept}", word).check_refused(message)
    assert (swept / "sweep.json").read_bytes() == manifest
    done = main(f"sweep.resume={swept}", "seed=0,1,2", "precision=32,bf16,64").check_ok()
    assert done.stdout.count("finished before") == 4
    assert [(swept / str(n) / "result.json").read_bytes() for n in range(4)] == before
    labels = [job["label"] for job in job_results(tmp_path)]
    assert labels[4:] == [
        "32-true seed=2",
        "bf16-mixed seed=2",
        *(f"64-true seed={seed}" for seed in range(3)),
    ]
    report = (swept / "report.md").read_text()
    assert "jobs finished" not in report  # all of them did
    assert "(3 seeds)" in report
    # Without a list, all is as it was, and another tolerance judges the same jobs anew; other
    # programs that run meanwhile disturbed no job.
    replace(Manifest.read(swept), busy=0.0).signed().write(swept)
    again = main(f"sweep.resume={swept}", "advise.max_gap=0.5")
    assert (again.rc, again.stdout.count("finished before")) == (0, 9)
    assert "a loss of more than 0.5 (advise.max_gap)" in (swept / "report.md").read_text()
    command = read_json(swept / "sweep.json")["command"]
    assert {"precision=32-true,bf16-mixed,64-true", "seed=0,1,2"} < {*command}
    assert Manifest.read(swept).busy == 0.0


def test_a_sweep_without_a_seed_takes_further_ones(quick, main, tmp_path):
    assert quick("-m", "precision=32-true,bf16-mixed").rc == 0
    folder = only_sweep(tmp_path)
    refused = main(f"sweep.resume={folder}", "seed=1,2")
    message = "the sweep has seed=0, and a list may only get longer. Type seed=0,1,2."
    assert (refused.rc, message in refused.stderr) == (2, True), refused.stderr
    for words in (["seed=0,1"], []):
        done = main(f"sweep.resume={folder}", *words).check_ok()
        assert done.stdout.count("finished before") == (2 if words else 4)
    labels = [job["label"] for job in job_results(tmp_path)]
    assert labels == ["32-true", "bf16-mixed", "32-true seed=1", "bf16-mixed seed=1"]
    assert "(2 seeds)" in (folder / "report.md").read_text()


@pytest.mark.parametrize("word", ["mode=advise", "launcher=joblib", "sweep=search"])
def test_jobs_that_others_number_have_no_longer_lists(word, main, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    words = ["python", "-m", "runner", word, "precision=32-true,bf16-mixed"]
    # Signed, as the command writes it: a stranger's sweep is refused before its lists are read.
    Manifest("x", words, cwd=str(tmp_path)).signed().write(folder)
    done = main(f"sweep.resume={folder}", "precision=32-true,bf16-mixed,16-mixed")
    message = f"in a sweep with {word}. Start a new sweep;"
    assert (done.rc, message in done.stderr) == (2, True), done.stderr


def test_a_job_keeps_its_number_and_others_take_the_free_ones(tmp_path):
    settings = [("precision=32-true", "seed=0", "precision.x=1"), ("precision=a", "seed=0")]
    for number, overrides in zip((0, 3), settings, strict=True):
        folder = tmp_path / str(number)
        folder.mkdir()
        RunResult(precision="", label="", folder=str(folder), overrides=overrides).write(folder)
    (tmp_path / "1").mkdir()  # of a job that was killed
    pairs = [("32-true", 0), ("32-true", 1), ("a", 0), ("a", 1)]
    jobs = [[f"precision={name}", f"seed={seed}", "++precision.x=1"] for name, seed in pairs]
    # The second result lacks the key that its precision does not take.
    assert resumed_numbers(tmp_path, jobs, range(4)) == [0, 1, 3, 2]
