"""Searches by Optuna: in the task's direction, past failed jobs, to the table of a sweep."""

import pytest
from omegaconf import OmegaConf
from run_folders import job_results

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
TINY = "model=mlp model.hidden=[16] train.max_steps=3 train.log_every=2 tracking=none".split()
SEARCH = ("-m", "hydra/sweeper=optuna", "hydra/launcher=basic")
SEED = "hydra.sweeper.sampler.seed=0"
LR = "optimizer.lr=interval(0.0001,0.1)"


@pytest.fixture
def search(main, tmp_path):
    """Runs a search: (what was printed, the jobs' results, what Optuna found)."""

    def made(words):
        done = main(*TINY, *SEARCH, SEED, *words.split())
        (out,) = tmp_path.glob("outputs/sweeps/*")
        best = out / "optimization_results.yaml"
        found = OmegaConf.to_container(OmegaConf.load(best)) if best.exists() else None
        return done, job_results(tmp_path), found

    return made


def typed(result):
    return dict(text.split("=", 1) for text in result["overrides"])


def test_it_looks_for_the_highest_accuracy(search):
    done, jobs, found = search(
        "precision=choice(32,bf16) optimizer.lr=interval(0.0005,0.05) "
        "train.batch_size=choice(32,64) hydra.sweeper.n_trials=4"
    )
    assert (done.rc, len(jobs)) == (0, 4)
    best = max(jobs, key=lambda job: job["metrics"]["val/accuracy"])
    assert found["best_value"] == best["metrics"]["val/accuracy"]
    assert min(job["metrics"]["val/accuracy"] for job in jobs) < found["best_value"]
    params = {key: str(value) for key, value in found["best_params"].items()}
    assert params.items() <= typed(best).items()
    assert {job["precision"] for job in jobs} <= {"32-true", "bf16-mixed"}
    for job in jobs:  # what was searched names the job, in the table, too
        values = typed(job)
        assert f"optimizer.lr={float(values['optimizer.lr']):.4g}" in job["label"]
        assert "model=" not in job["label"]
        assert job["label"] in done.stdout
    assert "A new study" not in done.stderr


@pytest.mark.parametrize(
    ("words", "metric", "direction"),
    [
        ("data=signals model=complex_mlp", "val/loss", "min"),
        ("task.quality=loss", "val/loss", "min"),
        ("hydra.sweeper.direction=minimize", "val/accuracy", "max"),
    ],
    ids=["a regression", "the quality that the task names", "the user's direction"],
)
def test_it_looks_for_the_lowest(search, words, metric, direction):
    done, jobs, found = search(f"{LR} hydra.sweeper.n_trials=3 {words}")
    assert done.rc == 0
    assert found["best_value"] == min(job["metrics"][metric] for job in jobs)
    assert {job["direction"] for job in jobs} == {direction}


def test_what_cannot_run_here_ends_neither_the_search_nor_wins(search):
    done, jobs, found = search(
        "precision=choice(32,transformer-engine) accelerator=cpu hydra.sweeper.n_trials=5"
    )
    assert done.rc == 2
    assert {job["status"] for job in jobs} == {"finished", "unavailable"}
    assert found["best_params"] == {"precision": "32-true"}
    assert "float-castable" not in done.stderr


def test_a_search_in_which_all_fails_says_so(search):
    done, jobs, found = search("optimizer.lr=interval(-2,-1) hydra.sweeper.n_trials=2")
    assert done.rc == 1
    assert ([job["status"] for job in jobs], found) == (["failed"] * 2, None)
    assert "│ 32-true optimizer.lr=-" in done.stdout


@pytest.mark.parametrize("how", ["mode=plan", "mode=evaluate", "hydra.sweeper.storage=sqlite:///a"])
def test_a_search_that_cannot_be_is_refused_before_it_begins(how, main, tmp_path):
    more = ("checkpoint=x",) if how == "mode=evaluate" else ()
    done = main(*TINY, *SEARCH, how, *more, "seed=range(0,3)").check_refused(
        how.partition(":")[0].removesuffix("=sqlite")
    )
    said = ("Type hydra.sweeper.direction", "nothing to look for", "Leave it out")
    assert any(text in done.stderr for text in said)
    assert not list(tmp_path.glob("outputs/sweeps/*/*/result.json"))


def test_the_preset_searches(main, tmp_path):
    main(*TINY, "sweep=search", "hydra/launcher=basic", "hydra.sweeper.n_trials=2").check_ok()
    (out,) = tmp_path.glob("outputs/sweeps/*")
    found = OmegaConf.load(out / "optimization_results.yaml")
    assert set(found.best_params) == {"precision", "optimizer.lr", "train.batch_size"}
