"""Commands that resume a run, and what the store shows of it."""

import shutil

import numpy as np
import pytest
import torch
from quiet_mlflow import client_of
from run_folders import copy_files, finished_run, read_json

from runner.core.base.files import folder_lock

QUICK = (
    "model=mlp model.hidden=[8] train.max_steps=6 train.log_every=2 train.eval_every=3 "
    "checkpoint.every_steps=2 checkpoint.keep=9"
).split()
BASIC = ("hydra/launcher=basic", "seed=0,1")


def make_unfinished(folder, *steps):
    """Give a folder the files of a run that died: no result, and these checkpoints only."""
    (folder / "result.json").unlink(missing_ok=True)
    for path in folder.glob("checkpoints/*"):
        if int(path.stem.removeprefix("step-")) not in steps:
            path.unlink()


@pytest.mark.slow
def test_a_run_is_resumed_by_its_id_as_the_same_run(main, tmp_path, empty_store):
    uri = f"tracking.uri={empty_store(tmp_path / 'mlflow.db')}"
    assert main(*QUICK, uri).rc == 0
    folder = finished_run(tmp_path)
    run_id = read_json(folder / "result.json")["run_id"]
    make_unfinished(folder, 2, 4)
    damaged = folder / "checkpoints" / "step-00000004.pt"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    main(f"checkpoint.resume={run_id}", "optimizer.lr=0.0001", "train.max_steps=8", uri).check_ok(
        f"skipped {damaged}: it is damaged", "resumed at step 2 of 8"
    )
    assert read_json(folder / "result.json")["run_id"] == run_id
    client = client_of(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.001"
    assert run.data.tags["resumed_at_step"] == "2"
    assert "optimizer.lr: 0.001 -> 0.0001 (from step 2)" in run.data.tags["changes"]
    assert "tracking" not in run.data.tags["changes"]
    note = run.data.tags["mlflow.note.content"]
    assert "Resumed at step 2; changed: train.max_steps: 6 -&gt; 8, optimizer.lr: 0.001 " in note
    losses = client.get_metric_history(run_id, "train/loss")
    assert sorted(point.step for point in losses) == list(range(1, 9))
    rates = {p.step: p.value for p in client.get_metric_history(run_id, "train/lr")}
    assert (rates[6], rates[7]) == (0.001, 0.0001)


@pytest.fixture
def folder(copy_of_run):
    """The folder of a finished run without a record."""
    return copy_of_run(*QUICK, "tracking=none")


@pytest.fixture
def refused(main):
    """Return the message of a command that is refused."""

    def run(*typed):
        done = main(*typed, "tracking=none").check_refused()
        return done.stderr

    return run


def test_where_nothing_can_be_resumed(refused):
    assert "was interrupted and left a checkpoint" in refused("checkpoint.resume=last")
    assert "no checkpoint is there" in refused("checkpoint.resume=no/where")
    assert "resumes nothing" in refused("checkpoint.resume=last", "mode=plan")


def test_what_cannot_be_resumed(refused, folder, main, tmp_path):
    assert "it is finished" in refused("checkpoint.resume=last")
    assert "train.max_steps=<more" in refused(f"checkpoint.resume={folder}")
    assert "resumes one run" in refused("-m", *BASIC, "checkpoint.resume=last")
    assert "is at step 6 already" in refused(f"checkpoint.resume={folder}", "train.max_steps=5")
    stray = tmp_path / "stray.pt"
    shutil.copy(next(folder.glob("checkpoints/step-*.pt")), stray)
    assert "is not in a run's folder" in refused(f"checkpoint.resume={stray}")
    inside = next(folder.glob("checkpoints/step-*.pt"))
    older = torch.load(inside, weights_only=True)
    del older["position"]
    torch.save(older, inside.with_name("step-00000099.pt"))
    assert "init.weights=<it>" in refused(f"checkpoint.resume={inside.parent}")
    inside.with_name("step-00000099.pt").unlink()
    stray.write_bytes(b"nothing of ours")
    assert "is no checkpoint or is cut short" in refused(f"checkpoint.resume={stray}")
    done = main(f"checkpoint.resume={folder}", "train.max_steps=7", "tracking=none")
    assert (done.rc, "resumed at step 6 of 7" in done.stdout) == (0, True)


def test_a_model_without_an_option_keeps_its_name(main, tmp_path):
    sizes = "input_shape: [1,8,8], classes: 10, hidden: [8]"
    node = f"+model={{_target_: runner.models.mlp.MLP, {sizes}}}"
    words = [word for word in QUICK if not word.startswith("model")]
    done = main("~model", node, *words, "tracking=none", "hydra.run.dir=run").check_ok()
    make_unfinished(tmp_path / "run", 2)
    resumed = main("checkpoint.resume=run")
    assert "32-true MLP digits" in done.stdout
    assert "32-true MLP digits" in resumed.stdout


def test_a_folder_is_one_commands_at_a_time(refused, folder):
    make_unfinished(folder, 2)
    for typed in ([f"checkpoint.resume={folder}"], [*QUICK, f"hydra.run.dir={folder}"]):
        with folder_lock(folder):
            assert f"{folder}: another command is running in this folder" in refused(*typed)


def test_checkpoints_after_the_resumed_one_are_superseded(main, folder):
    older = folder / "checkpoints" / "step-00000002.pt"
    done = main(f"checkpoint.resume={older}", "train.max_steps=3", "tracking=none")
    assert (done.rc, "resumed at step 2 of 3" in done.stdout) == (0, True), done.stderr
    left = {path.name for path in older.parent.iterdir()}
    assert {"step-00000002.pt", "step-00000003.pt"} <= left
    assert {"step-00000004.superseded", "step-00000006.superseded"} <= left
    assert not {"step-00000004.pt", "step-00000006.pt"} & left


def test_another_precision_or_optimizer(main, tmp_path):
    """Each continues and says what changes, or is refused before it trains."""
    assert main(*QUICK, "tracking=none", "precision=16-mixed").rc == 0
    folder = finished_run(tmp_path)

    def resumed(*typed):
        make_unfinished(folder, 4)
        return main(f"checkpoint.resume={folder}", *typed)

    resumed("precision=64-true", "checkpoint.final=false").check_ok(
        "the optimizer's state is cast from float32 to float64",
        "loss scale of 65536.0 is dropped: precision=64-true has none",
    )
    other = resumed("optimizer=sgd").check_refused(
        "its state is that of torch.optim.AdamW, which torch.optim.SGD cannot",
        f"init.weights={folder}",
    )
    assert "resumed at step" not in other.stdout
    resumed("precision=bf16-true", "scheduler=cosine", "optimizer.eps=1e-4").check_ok(
        "cast from float32 to bfloat16",
        "CosineAnnealingLR is not the checkpoint's schedule: it is taken up at its step 4",
    )


def test_an_init_scale_typed_again_says_that_the_scale_continues(main, tmp_path):
    typed = "precision.loss_scale.init_scale=1e30"
    assert main(*QUICK, "tracking=none", "precision=16-mixed", typed).rc == 0
    folder = finished_run(tmp_path)
    make_unfinished(folder, 4)
    main(f"checkpoint.resume={folder}", "precision=16-mixed", typed).check_ok(
        "the loss scale continues at ", "init_scale=1e+30 is where the run began"
    )


def test_auto_begins_or_continues(main, tmp_path):
    """The same command each time, as a job script has it."""
    typed = (*QUICK, "tracking=none", "hydra.run.dir=outputs/runs/7", "checkpoint.resume=auto")
    folder = tmp_path / "outputs/runs/7"
    main(*typed).check_ok("7 holds no checkpoint: the run begins.")
    make_unfinished(folder, 4)
    main(*typed).check_ok("resumed at step 4 of 6")
    make_unfinished(folder, 6)
    (damaged,) = folder.glob("checkpoints/*.pt")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    main(*typed).check_ok("starts over: ")
    assert damaged.with_suffix(".superseded").exists()
    assert "finished before" in main(*typed).stdout


def test_a_run_that_a_limit_of_time_ended_continues_with_its_length(main, tmp_path):
    typed = (*QUICK, "tracking=none", "hydra.run.dir=outputs/runs/7", "train.max_seconds=1e-9")
    folder = tmp_path / "outputs/runs/7"
    for step in (1, 2):
        done = main(*typed, "checkpoint.resume=auto").check_ok(
            "stopped by", "train.max_seconds", "Resume with: python -m runner checkpoint.resume="
        )
        result = read_json(folder / "result.json")
        assert (result["steps"], result["stopped_by"]) == (step, "train.max_seconds")
    assert "resumed at step 1 of 6" in done.stdout
    assert "resumed at step 2 of 6" in main("checkpoint.resume=last", "tracking=none").stdout
    rest = (*typed, "checkpoint.resume=auto", "train.max_seconds=null")
    main(*rest).check_ok("resumed at step 3 of 6")
    result = read_json(folder / "result.json")
    assert (result["steps"], result["stopped_by"]) == (6, "")
    assert "finished before" in main(*rest).stdout


def save_rows(rows):
    np.savez("rows.npz", images=rows, y=(rows[:, 0] > 0).astype("int64"))


ROWS = np.random.default_rng(0).normal(size=(90, 4)).astype("float32")
NPZ = (
    "data=npz data.path=rows.npz data.meta.classes=2 data.meta.input=[4] task=classification"
).split()


@pytest.mark.parametrize("rows", [ROWS[:60], np.concatenate([ROWS, ROWS]), ROWS[::-1]])
def test_data_that_changed_before_a_resume_are_refused(main, tmp_path, rows):
    save_rows(ROWS)
    assert main(*QUICK, *NPZ, "tracking=none", "hydra.run.dir=run").rc == 0
    make_unfinished(tmp_path / "run", 2)
    save_rows(rows)
    done = main("checkpoint.resume=run").check_refused(
        "error: checkpoint.resume: the data have changed since the checkpoint",
        "Put the former data back, or type guard.data=warn to train on",
    )
    assert len(done.stderr.splitlines()) == 1
    save_rows(ROWS)
    assert "warning" not in main("checkpoint.resume=run").stdout
    make_unfinished(tmp_path / "run", 6)
    save_rows(rows)
    done = main("checkpoint.resume=run", "train.max_steps=7", "guard.data=warn")
    assert (done.rc, "warning: the data have changed" in done.stdout) == (0, True)


def test_examples_that_are_others_each_time_are_not_compared(main, tmp_path):
    copy_files("drawn", tmp_path)
    data = ("data=digits", "data._target_=drawn.sets", "data.meta.input=[4]", "task=classification")
    assert main(*QUICK, *data, "tracking=none", "hydra.run.dir=run").rc == 0
    make_unfinished(tmp_path / "run", 2)
    done = main("checkpoint.resume=run")
    assert (done.rc, "have changed" in done.stdout) == (0, False), done.stderr


def test_the_best_checkpoint_and_the_weights_alone_are_written(main, tmp_path):
    from safetensors.torch import load_file

    more = ("checkpoint.best=true", "checkpoint.safetensors=true", "tracking=none")
    assert main(*QUICK, *more).rc == 0
    folder = finished_run(tmp_path)
    assert set(load_file(folder / "model.safetensors"))
    best = folder / "checkpoints" / "best.pt"
    main("mode=evaluate", f"checkpoint={best}", "tracking=none").check_ok()
