"""Whole runs, as the command line starts them."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from run_folders import metrics_in, read_json

from runner.core.record import journals

# An initial scale that overflows and a short interval: the scale falls, then rises and falls.
SCALED = (
    "precision=16-mixed precision.loss_scale.init_scale=16777216 "
    "precision.loss_scale.growth_interval=2"
).split()
TINY = "model=mlp model.hidden=[16] train.log_every=5 train.eval_every=6".split()
STEPS = 12


@pytest.fixture(scope="module")
def tracked(run_once, store, reader):
    """A run with a loss scale in a real store: (its folder, its MLflow run, the client)."""
    run = run_once(*TINY, *SCALED, f"train.max_steps={STEPS}", f"tracking.uri={store}")
    client = reader()
    return run.folder, client.get_run(run.result["run_id"]), client


def points(tracked, key):
    _, run, client = tracked
    history = client.get_metric_history(run.info.run_id, key)
    return sorted((point.step, point.value) for point in history)


def journal(folder):
    """(step, values) of every metric record that the run wrote."""
    return [
        (record["step"], record["values"])
        for record, _ in journals.read_records(folder / "journal.jsonl")
        if record["kind"] == "metrics"
    ]


def in_journal(folder, key):
    return [(step, values[key]) for step, values in journal(folder) if key in values]


KEYS = (
    "train/loss train/lr train/grad_norm loss_scale/value loss_scale/overflow "
    "loss_scale/skipped_steps"
)


@pytest.mark.parametrize("key", KEYS.split())
def test_every_step_is_stored_with_its_value(tracked, key):
    stored = points(tracked, key)
    assert [step for step, _ in stored] == list(range(1, STEPS + 1))
    expected = in_journal(tracked[0], key)
    finite = [(step, value) for step, value in expected if abs(value) < float("inf")]
    assert [point for point in stored if point[0] in dict(finite)] == finite


def test_the_loss_scale_fell_at_each_overflow_and_rose_after_two_steps(tracked):
    scales, overflows = (dict(points(tracked, f"loss_scale/{k}")) for k in ("value", "overflow"))
    assert scales[1] == 2.0**24
    assert overflows[1] == 1.0
    good = 0
    for step in range(1, STEPS):
        good = 0 if overflows[step] else good + 1
        factor = 0.5 if overflows[step] else 2.0 if good == 2 else 1.0
        good = 0 if good == 2 else good
        assert scales[step + 1] == scales[step] * factor, step
    skipped = dict(points(tracked, "loss_scale/skipped_steps"))
    assert skipped == {s: sum(overflows[i] for i in range(1, s + 1)) for s in overflows}


def test_the_changes_alone_draw_the_same_line(tracked):
    scales, changes = (points(tracked, f"loss_scale/{key}") for key in ("value", "changes"))
    drawn = dict(changes)
    assert {step: value for step, value in scales if step in drawn}.items() >= drawn.items()
    for (_, before), (step, after) in pairwise(scales):
        if before != after:
            assert drawn[step - 1] == before
            assert drawn[step] == after
    assert changes[0] == scales[0]
    assert changes[-1] == scales[-1]


def test_evaluations_rates_and_memory(tracked):
    assert [step for step, _ in points(tracked, "val/loss")] == [6, 12]
    assert [step for step, _ in points(tracked, "val/accuracy")] == [6, 12]
    for key in ("perf/step_ms", "perf/examples_per_second", "memory/peak_mib"):
        assert [step for step, _ in points(tracked, key)] == [5, 6, 10, 12], key
    assert [step for step, _ in points(tracked, "memory/weights_mib")] == [0]
    ((_, size),) = points(tracked, "memory/optimizer_mib")
    assert size > 0


def test_the_params_are_the_whole_config(tracked, compose, store):
    _, run, _ = tracked
    spec = compose(*TINY, *SCALED, f"train.max_steps={STEPS}", f"tracking.uri={store}")
    assert run.data.params == spec.flat()


def test_tags_and_status(tracked):
    folder, run, _ = tracked
    tags = run.data.tags
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "16-mixed mlp digits"
    assert tags["precision"] == "16-mixed"
    assert (tags["model"], tags["data"], tags["mode"]) == ("mlp", "digits", "train")
    assert tags["accelerator"] in ("cpu", "cuda", "mps")
    assert tags["device_name"]
    assert (tags["quality"], tags["direction"]) == ("val/accuracy", "max")
    assert tags["output_dir"] == str(folder)
    assert "error" not in tags


def test_artifacts(tracked, compose):
    folder, run, client = tracked
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    expected = "config.yaml environment.json conversion.json dtypes.json loss_scale.png"
    assert names == {*expected.split(), "result.json", "history.npz"}
    for name in names - {"result.json"}:  # the folder's knows the run's id, too
        stored = Path(run.info.artifact_uri.removeprefix("file://")) / name
        assert stored.read_bytes() == (folder / name).read_bytes()
    assert OmegaConf.load(folder / "config.yaml").precision.loss_scale.growth_interval == 2


def test_the_result_is_that_of_the_metrics(tracked):
    outcome = read_json(tracked[0] / "result.json")
    assert outcome["status"] == "finished"
    assert outcome["steps"] == STEPS
    assert outcome["metrics"]["val/loss"] == points(tracked, "val/loss")[-1][1]
    assert outcome["loss_scale"] == points(tracked, "loss_scale/value")[-1][1]
    assert outcome["skipped_steps"] == points(tracked, "loss_scale/skipped_steps")[-1][1]
    assert outcome["run_id"] == tracked[1].info.run_id


def test_a_run_that_fails_is_failed_in_the_store_and_its_note(lab, main, store, reader, run_named):
    name = "fails on purpose"
    typed = "--config-dir lab/conf model=net model.fail_at=3 train.log_every=1".split()
    done = main(*typed, f"tracking.uri={store}", f"tracking.run_name={name}")
    assert done.rc == 1
    assert "ArithmeticError: failed as it was told to" in done.stderr
    run = run_named(name)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "ArithmeticError: failed as it was told to"
    assert len(reader().get_metric_history(run.info.run_id, "train/loss")) == 2
    note = run.data.tags["mlflow.note.content"]
    assert note.startswith("**FAILED**: ArithmeticError: failed as it was told to")
    assert "--config-dir lab/conf" in note
    assert "model.fail_at=3" in note


def state_of_torch():
    cudnn = torch.backends.cudnn
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.get_rng_state().tolist(),
    )


def test_a_run_neither_sees_nor_leaves_anything_in_the_process(own, tmp_path, result):
    """The same seed gives the same numbers first, last, and after anything in between. The model
    has dropout, so that the random stream counts."""

    def numbers(*more):
        assert own("train.max_steps=5", "train.eval_every=2", *more).rc == 0
        outcome = result(tmp_path)
        return outcome["train_loss"], outcome["metrics"]

    before = state_of_torch()
    first = numbers("seed=3")
    for between in ("64-true", "bf16-true", "16-mixed"):
        assert own(f"precision={between}", "deterministic=true", "debug=anomaly").rc == 0
        assert state_of_torch() == before, between
    assert own("precision=64-true", "deterministic=true", "model.fail_at=2").rc == 1
    assert state_of_torch() == before
    torch.rand(7)
    assert numbers("seed=3") == first
    assert numbers("seed=4") != first


def test_evaluating_more_often_trains_the_same(own, tmp_path, result):
    assert own("data=mine", "train.max_steps=4", "train.eval_every=4").rc == 0
    seldom = result(tmp_path)
    assert own("data=mine", "train.max_steps=4", "train.eval_every=1").rc == 0
    assert result(tmp_path)["train_loss"] == seldom["train_loss"]


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("deterministic=true", "are_deterministic_algorithms_enabled"),
        ("debug=anomaly", "is_anomaly_enabled"),
    ],
)
def test_a_run_computes_as_its_key_says(own, lab, word, state):
    model = ("model._target_=lab.needs.Needs", f"+model.state={state}")
    assert own(*model, word, "precision=bf16-mixed").rc == 0
    assert "AssertionError" in own(*model).stderr


def test_a_plan_trains_and_tracks_nothing(main, tmp_path):
    main("mode=plan", "model=mlp", "precision=bf16-true").check_ok(
        "plan: bf16-true mlp digits", "bfloat16 (85,002)", "optimizer state"
    )
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not {"mlflow.db", "journal.jsonl"} & set(left)
    assert not [name for name in left if name.endswith(".pt")]


@pytest.mark.parametrize("how", ["file", "folder", "run id"])
def test_a_checkpoint_is_evaluated_by_name(tracked, main, store, result, how):
    folder, run, _ = tracked
    where = {
        "folder": folder,
        "run id": run.info.run_id,
        "file": folder / "checkpoints" / f"step-{STEPS:08d}.pt",
    }[how]
    # The model is not named: the checkpoint knows it.
    command = ("mode=evaluate", f"checkpoint={where}", f"tracking.uri={store}")
    main(*command, "precision=16-mixed").check_ok()
    outcome = result(Path.cwd())
    assert outcome["metrics"] == metrics_in(folder)
    assert outcome["steps"] == STEPS


def test_a_checkpoint_is_evaluated_in_another_precision(tracked, main, result):
    typed = ("mode=evaluate", f"checkpoint={tracked[0]}", "precision=bf16-true", "tracking=none")
    assert main(*typed).rc == 0
    found, trained = result(Path.cwd())["metrics"], metrics_in(tracked[0])
    assert found["val/loss"] == pytest.approx(trained["val/loss"], rel=0.05)
    assert found != trained


def test_an_evaluation_is_stored_at_the_checkpoints_step(tracked, main, store, reader, result):
    assert main("mode=evaluate", f"checkpoint={tracked[0]}", f"tracking.uri={store}").rc == 0
    run = reader().get_run(result(Path.cwd())["run_id"])
    assert run.data.tags["mode"] == "evaluate"
    (point,) = reader().get_metric_history(run.info.run_id, "val/accuracy")
    assert point.step == STEPS
    assert run.info.status == "FINISHED"


@pytest.fixture
def debugged(main, tmp_path, result):
    """Return the result of a run with a debug preset."""

    def run(*typed):
        main("model=mlp", "tracking=none", *typed).check_ok()
        return result(tmp_path)

    return run


def test_smoke_takes_four_steps(debugged):
    assert debugged("debug=smoke")["steps"] == 4


def test_overfitting_learns_its_few_examples(debugged):
    found = debugged("debug=overfit", "train.max_steps=100", "optimizer.lr=0.01")
    assert found["metrics"]["val/accuracy"] == 1.0
    assert found["metrics"]["val/loss"] < 0.05


def test_a_profile_is_left_in_the_folder(debugged):
    folder = Path(debugged("debug=profile", "train.max_steps=4")["folder"])
    assert {"profile.txt", "profile.json"} <= {path.name for path in folder.iterdir()}


def test_early_stop_ends_a_run_before_its_last_step(quick, tmp_path, result):
    done = quick("train.max_steps=50", "train.eval_every=2", "train.early_stop=2", "optimizer.lr=0")
    done.check_ok()
    assert result(tmp_path)["steps"] == 6


def test_failed_jobs_leave_no_model_in_memory(own):
    """Six jobs that fail with a 50 MB model: the last starts with no more than the second."""
    sweep = "-m seed=0,1,2,3,4,5 train.batch_size=2 optimizer=sgd hydra/launcher=basic"
    done = own("model.width=180000", "model.fail_at=1", *sweep.split())
    assert done.rc == 1
    assert done.stderr.count("failed as it was told to") >= 6
    from lab.nets import RSS

    assert len(RSS) == 6
    assert max(RSS[2:]) - RSS[1] < 50, RSS
