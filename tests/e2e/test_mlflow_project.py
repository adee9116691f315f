"""`mlflow run .` is the parent of the runs that it starts; tags with dots and a note are typed."""

import os
import shutil
import sys
import warnings
from pathlib import Path

from quiet_mlflow import client_of, runs_in

QUICK = "model=mlp model.hidden=[16] train.max_steps=2 tracking.log_model=false"


def test_a_project_is_the_parent_of_a_sweep_it_starts(tmp_path, root, empty_store, monkeypatch):
    arguments = f"-m seed=0,1 hydra/launcher=basic {QUICK} tracking.note='a word'"
    shutil.copy(root / "MLproject", tmp_path)
    monkeypatch.chdir(tmp_path)
    store = empty_store(tmp_path / "mlflow.db")
    # The project's command begins with `python`.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's imports, not ours
        from mlflow import projects

        done = projects.run(
            str(tmp_path),
            parameters={"arguments": arguments},
            experiment_name="mine",
            env_manager="local",
        )
    assert done.get_status() == "FINISHED"
    runs = runs_in(client_of(store), "mine")
    parents = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in runs}
    (project,) = [run_id for run_id, parent in parents.items() if parent is None]
    (sweep,) = [run_id for run_id, parent in parents.items() if parent == project]
    assert list(parents.values()).count(sweep) == 2
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_a_run_with_a_note_is_nested_under_the_outer_run(main, empty_store, tmp_path, monkeypatch):
    store = empty_store(tmp_path / "mlflow.db")
    client = client_of(store)
    experiment = client.create_experiment("mine")
    parent = client.create_run(experiment).info.run_id
    for name, value in (("TRACKING_URI", store), ("EXPERIMENT_ID", experiment), ("RUN_ID", parent)):
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    main(*QUICK.split(), "tracking.tags.mlflow.note.content=hello").check_ok()
    (run,) = [run for run in client.search_runs([experiment]) if run.info.run_id != parent]
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert run.data.tags["mlflow.note.content"].startswith("hello\n\n")


def test_tags_with_dots_and_a_note_are_recorded(main, empty_store, tmp_path):
    store = empty_store(tmp_path / "mlflow.db")
    typed = ("tracking.tags.ci.job=4711", "tracking.tags={team: vision}")
    note = "tracking.note=Before the new driver"
    main(*QUICK.split(), f"tracking.uri={store}", *typed, note).check_ok()
    (run,) = runs_in(client_of(store))
    tags = run.data.tags
    assert (tags["ci.job"], tags["team"]) == ("4711", "vision")
    assert tags["mlflow.note.content"].startswith("Before the new driver\n\n**val/loss")
    assert "ci" not in tags
