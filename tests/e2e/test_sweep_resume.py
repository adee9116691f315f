"""sweep.resume: a sweep that was stopped or killed is resumed, and ends as if it had not been."""

import json
import os
import re
import shutil
import signal

import pytest
import torch
from quiet_mlflow import client_of
from run_folders import read_json
from waiting import SECONDS, wait_for

from runner.core.base.files import folder_lock
from runner.sweeps.manifest import Manifest

SWEEP = (
    "--config-dir lab/conf model=gate data=mine train.max_steps=12 train.eval_every=4 "
    "train.log_every=1 precision=16-mixed -m seed=0,1,2"
).split()


@pytest.fixture
def interrupted(lab, start_command):
    """Run a sweep of three jobs that a signal reaches in the sixth step of its second one."""

    def run(number, *args, **env):
        process = start_command(*SWEEP, *args, env=env)
        wait_for((lab / "waits").exists, process)
        os.killpg(process.pid, number)
        (lab / "go").touch()
        out, err = process.communicate(timeout=SECONDS)
        (folder,) = lab.glob("outputs/sweeps/*")
        return process.returncode, out, err, folder

    return run


def final_state(folder):
    """Return weights and every recorded loss, rate and loss scale of a sweep's jobs."""
    from runner.tracking.history import from_folder

    found = []
    for number in range(3):
        curves = from_folder(folder / str(number))
        (path,) = (folder / str(number) / "checkpoints").glob("step-*12.pt")
        weights = torch.load(path, weights_only=True)["model"]
        names = ("train/loss", "train/lr", "loss_scale/value", "val/loss")
        kept = {name: curves[name][[0, 2]].tolist() for name in names}
        found.append((kept, {name: tensor.tolist() for name, tensor in weights.items()}))
    return found


@pytest.mark.slow
def test_a_resumed_sweep_ends_like_an_uninterrupted_one(interrupted, main, lab, empty_store):
    uri = f"tracking.uri={empty_store(lab / 'mlflow.db')}"
    status, out, err, folder = interrupted(signal.SIGTERM, uri, "tracking.log_model=false")
    assert (status, "Traceback" in err) == (143, False)
    assert "1 of the sweep's 3 jobs had not begun" in " ".join(out.split())
    assert f"Resume with: python -m runner sweep.resume=outputs/sweeps/{folder.name}" in out
    before = (folder / "0" / "result.json").read_bytes()
    ids = [read_json(folder / str(n) / "journal.state")["run_id"] for n in (0, 1)]
    done = main("sweep.resume=last", uri, "tracking.patience=30").check_ok(
        "16-mixed seed=0: finished before\n"
    )
    (step,) = re.findall(r"resumed at step (\d+) of 12", done.stdout)
    assert 6 <= int(step) < 12
    assert (folder / "0" / "result.json").read_bytes() == before
    results = [read_json(folder / str(n) / "result.json") for n in range(3)]
    assert [r["status"] for r in results] == ["finished"] * 3
    assert [r["label"] for r in results] == [f"16-mixed seed={n}" for n in range(3)]
    assert [r["run_id"] for r in results[:2]] == ids
    resumed = final_state(folder)
    shutil.rmtree(folder)
    assert main(*SWEEP, "tracking.log_model=false", "hydra/launcher=basic", uri).rc == 0
    (whole,) = lab.glob("outputs/sweeps/*")
    assert resumed == final_state(whole)
    runs = client_of(uri.partition("=")[2]).search_runs(["1"], "tags.role = 'sweep'")
    assert [run.info.status for run in runs] == ["FINISHED"] * 2


@pytest.mark.slow
def test_a_killed_sweep_restarts_jobs_without_a_checkpoint(interrupted, main, lab, empty_store):
    """In the store that the environment named, which it need not name again."""
    uri = f"tracking.uri={empty_store(lab / 'mlflow.db')}"
    named = {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    status, *_, folder = interrupted(signal.SIGKILL, "tracking.log_model=false", **named)
    assert status == -9
    other = main(f"sweep.resume={folder}", "tracking.uri=sqlite:///other.db")
    assert (other.rc, "other.db does not hold its run" in other.stderr) == (2, True)
    main(f"sweep.resume={folder}").check_ok(f"continues the sweep in sqlite:///{lab}/mlflow.db")
    assert not (lab / "outputs" / "mlflow.db").exists()
    assert "jobs finished" not in (folder / "report.md").read_text()  # all of them did
    sweep_id = read_json(folder / "sweep.json")["id"]
    shutil.move(folder, lab / "elsewhere")
    report = main("report", sweep_id, uri)  # made from the store, that has the dead run, too
    assert "jobs finished" not in report.stdout
    assert "failed" not in report.stdout


def test_failed_jobs_are_run_again_and_finished_or_diverged_ones_are_not(main, lab):
    (lab / "go").touch()
    assert main(*SWEEP, "tracking=none", "hydra/launcher=basic").rc == 0
    (folder,) = lab.glob("outputs/sweeps/*")
    for number, change in enumerate([{"diverged": True, "status": "failed"}, {"status": "failed"}]):
        path = folder / str(number) / "result.json"
        path.write_text(json.dumps(read_json(path) | change))
    done = main(f"sweep.resume={folder / '1'}")
    assert done.stdout.count(" before\n") == 2
    assert "diverged before" in done.stdout
    assert "resumed at step 12 of 12" in done.stdout
    alone = main(f"checkpoint.resume={folder / '0'}", "train.max_steps=13", "tracking=none")
    assert (alone.rc, f"Type sweep.resume={folder}" in alone.stderr) == (2, True)


def test_sweeps_that_cannot_be_resumed_are_refused(main, lab):
    def refused(*typed):
        done = main(*typed)
        assert (done.rc, "Traceback" in done.stderr, done.stdout) == (2, False, "")
        return done.stderr

    assert "no sweep in outputs/sweeps is unfinished" in refused("sweep.resume=last")
    assert "no sweep is there" in refused("sweep.resume=lab/conf")
    assert "is neither a file, a folder nor the id" in refused("sweep.resume=abcdef")
    folder = lab / "outputs" / "sweeps" / "now"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text('{"id": "x", "command": [1]}')
    assert "sweep.json is damaged" in refused("sweep.resume=last")
    command = ["python", "-m", "runner", *SWEEP, "tracking=none"]
    Manifest("x", command, cwd=str(lab)).signed().write(folder)
    assert "Leave optimizer.lr=1 out" in refused("sweep.resume=last", "optimizer.lr=1")
    with folder_lock(folder):
        assert "another command is running" in refused("sweep.resume=last")
    Manifest("x", command, cwd="/").signed().write(folder)
    assert "Type cd / first" in refused("sweep.resume=last")


def test_a_search_finds_its_trials_again(main, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    asked = (
        "model=mlp model.hidden=[8] train.max_steps=3 tracking=none -m hydra/launcher=basic "
        "hydra/sweeper=optuna optimizer.lr=interval(0.0005,0.05) hydra.sweeper.n_trials=3 "
        "hydra.sweeper.sampler.seed=0"
    ).split()
    assert main(*asked).rc == 0
    (folder,) = tmp_path.glob("outputs/sweeps/*")
    best = (folder / "optimization_results.yaml").read_text()
    shutil.rmtree(folder / "2")
    done = main(f"sweep.resume={folder}").check_ok()
    assert done.stdout.count("finished before") == 2
    assert (folder / "optimization_results.yaml").read_text() == best
