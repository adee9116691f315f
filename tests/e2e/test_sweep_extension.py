"""sweep.resume=<folder> seed=0,1,2: lists of a sweep that has run get longer."""

import json

import pytest
from run_folders import job_results

TINY = ("hydra/launcher=basic", "-m")


@pytest.fixture
def swept(quick, tmp_path):
    """The folder of a finished sweep over precision and seed."""
    assert quick(*TINY, "precision=32-true,bf16-mixed", "seed=0,1").rc == 0
    (folder,) = tmp_path.glob("outputs/sweeps/*")
    return folder


def labels(folder):
    return [job["label"] for job in job_results(folder)]


def test_longer_lists_add_jobs_and_keep_those_that_are_there(swept, main, tmp_path):
    before = [(swept / str(number) / "result.json").read_bytes() for number in range(4)]
    done = main(f"sweep.resume={swept}", "seed=0,1,2")
    assert done.rc == 0, done.stderr
    assert done.stdout.count("finished before") == 4
    assert [(swept / str(n) / "result.json").read_bytes() for n in range(4)] == before
    assert labels(tmp_path)[4:] == ["32-true seed=2", "bf16-mixed seed=2"]
    report = (swept / "report.md").read_text()
    assert "6 of 6 jobs finished" in report
    assert "(3 seeds)" in report
    # Once more, by a short name of a precision; and without a list, all is as it was.
    assert main("sweep.resume=last", "precision=32,bf16,'16'").rc == 0
    assert labels(tmp_path)[6:] == [f"16-mixed seed={seed}" for seed in range(3)]
    again = main(f"sweep.resume={swept}")
    assert (again.rc, again.stdout.count("finished before")) == (0, 9)
    manifest = json.loads((swept / "sweep.json").read_text())
    assert {"precision=32-true,bf16-mixed,16-mixed", "seed=0,1,2"} < {*manifest["command"]}
    assert len(manifest["earlier"]) == 2


def test_a_preset_and_a_single_value_become_lists(quick, main, tmp_path):
    assert quick("hydra/launcher=basic", "sweep=seeds", "train.max_steps=1", "seed=0").rc == 0
    (folder,) = tmp_path.glob("outputs/sweeps/*")
    assert len(labels(tmp_path)) == 3
    done = main(f"sweep.resume={folder}", "seed=0,1", "precision=32,bf16,'16',64")
    assert done.rc == 0, done.stderr
    assert done.stdout.count("finished before") == 3
    assert len(labels(tmp_path)) == 8


REFUSED = {
    "seed=1,2": "the sweep has seed=0,1, and a list may only get longer. Type seed=0,1,2.",
    "optimizer.lr=1,2": "the sweep's command does not set optimizer.lr. Only lists of its own may",
    "seed=3": "Leave seed=3 out: only tracking.* and sweep.fail_fast may change, and lists",
    "hydra.launcher.n_jobs=2": "Leave hydra.launcher.n_jobs=2 out",
}


def test_what_is_no_longer_list_is_refused(swept, main, tmp_path):
    before = (swept / "sweep.json").read_bytes()
    for word, message in REFUSED.items():
        done = main(f"sweep.resume={swept}", word)
        assert (done.rc, message in done.stderr) == (2, True), done.stderr
    assert (swept / "sweep.json").read_bytes() == before
    assert len(labels(tmp_path)) == 4


def test_a_search_has_no_lists(swept, main):
    path = swept / "multirun.yaml"
    path.write_text(path.read_text().replace("basic_sweeper.BasicSweeper", "other.Search"))
    done = main(f"sweep.resume={swept}", "seed=0,1,2")
    assert (done.rc, "A search chooses its jobs as results come in" in done.stderr) == (2, True)
