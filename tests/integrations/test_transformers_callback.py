"""What a record of transformers.Trainer does beyond those of other trainers."""

import warnings

import pytest
import torch
from foreign_models import FailingNet, tiny_net

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from foreign_trainings import train_with_transformers, transformers_trainer

from runner.core.base.errors import ConfigError
from runner.integrations.transformers import PrecisionCallback, evaluation_metrics
from runner.tracking import history


def trained(*callbacks, **changes):
    """Train a tiny model; return its Trainer."""
    trainer = transformers_trainer(*callbacks, **changes)
    trainer.train()
    return trainer


def test_the_record_has_the_trainers_own_rates_losses_and_arguments(lab):
    trainer = trained(PrecisionCallback())
    result = lab.result()
    assert list(lab.points(result, "train/lr").values()) == pytest.approx([0.1, 0.075, 0.05, 0.025])
    mean = sum(lab.points(result, "train/loss").values()) / 4
    assert mean == pytest.approx(trainer.state.log_history[-1]["train_loss"], rel=1e-4)
    assert lab.params(result)["arguments.learning_rate"] == "0.1"


def test_an_evaluation_after_the_training_belongs_to_its_run(lab):
    trainer = trained(PrecisionCallback())
    loss = trainer.evaluate()["eval_loss"]
    result = lab.result()
    assert result.metrics == {"val/loss": pytest.approx(loss)}
    assert lab.points(result, "val/loss") == {4: pytest.approx(loss)}
    (stored,) = lab.stored()
    assert stored.status == "FINISHED"


def test_several_evaluation_sets_have_a_metric_each():
    times = {"eval_a_runtime": 3.0, "eval_b_runtime": 3.0}
    metrics = {"eval_a_loss": 1.0, "eval_b_loss": 2.0, **times, "epoch": 1}
    assert evaluation_metrics(metrics, {"a": [], "b": []}) == {
        "val/a/loss": 1.0,
        "val/loss": 1.0,
        "val/b/loss": 2.0,
    }


@pytest.mark.parametrize("order", [("val", "val_hard"), ("val_hard", "val")])
def test_evaluation_sets_whose_names_begin_alike_keep_their_metrics(order):
    sets = dict.fromkeys(order)
    # The second is a metric of the set val that is called hard_loss.
    easy = {"eval_val_loss": 1.0, "eval_val_hard_loss": 3.0, "eval_val_runtime": 0.1}
    hard = {"eval_val_hard_loss": 2.0, "eval_val_hard_runtime": 0.1}
    recorded = evaluation_metrics(easy, sets) | evaluation_metrics(hard, sets)
    named = {key: value for key, value in recorded.items() if key.count("/") == 2}
    assert named == {"val/val/loss": 1.0, "val/val/hard_loss": 3.0, "val/val_hard/loss": 2.0}
    assert recorded["val/loss"] == {"val": 1.0, "val_hard": 2.0}[order[0]]


def half_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)


def test_a_resumed_training_continues_its_run_in_its_folder(lab):
    callback = PrecisionCallback(folder="mine")
    options = {"fp16": True, "save_strategy": "steps", "save_steps": 2}
    trained(callback, **options, scaler=half_scaler())
    first = lab.result(lab.folder / "mine")
    trainer = transformers_trainer(callback, **options, scaler=half_scaler(), max_steps=6)
    # Steps 3 and 4 are trained again, and stand once in the record.
    trainer.train(resume_from_checkpoint="trainer/checkpoint-2")
    result = lab.result(lab.folder / "mine")
    assert result.run_id == first.run_id
    assert list(lab.points(result, "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert lab.tags(result)["resumed_at_step"] == "2"
    steps, _, _ = history.from_folder(lab.folder / "mine")["train/loss"]
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    # The skipped steps of the earlier part count, too.
    overflows = lab.points(result, "loss_scale/overflow")
    assert overflows[1] == 1
    assert lab.points(result, "loss_scale/skipped_steps")[6] == sum(overflows.values())
    assert result.skipped_steps == sum(overflows.values())


def test_a_resumed_training_without_a_folder_is_a_new_run_from_its_step_on(lab):
    trained(save_strategy="steps", save_steps=2)
    trainer = transformers_trainer(PrecisionCallback())
    trainer.train(resume_from_checkpoint="trainer/checkpoint-2")
    assert list(lab.points(lab.result(), "train/loss")) == [3, 4]


def test_each_training_of_a_trainer_is_a_run(lab):
    trainer = trained(PrecisionCallback(), max_steps=1)
    trainer.train()
    assert [lab.result(folder).steps for folder in lab.runs] == [1, 1]
    assert [run.status for run in lab.stored()] == ["FINISHED", "FINISHED"]


def test_a_run_is_not_written_into_the_folder_of_another_one(lab):
    train_with_transformers(steps=1, folder="mine")
    with pytest.raises(ConfigError, match="folder=mine holds a run"):
        train_with_transformers(steps=1, folder="mine")


def test_two_callbacks_in_one_trainer_are_refused(lab):
    with pytest.raises(ConfigError, match="has 2 PrecisionCallbacks"):
        trained(PrecisionCallback(), PrecisionCallback())


def test_a_callback_of_two_trainers_records_the_one_that_trains(lab):
    callback = PrecisionCallback()
    first = transformers_trainer(callback, max_steps=1)
    second = transformers_trainer(callback, max_steps=2)
    first.train()
    second.train()
    assert [lab.result(folder).steps for folder in lab.runs] == [1, 2]


def test_a_callback_that_was_added_later_records_until_an_error(lab):
    trainer = transformers_trainer(net=FailingNet(ValueError("a bad row")))
    trainer.add_callback(PrecisionCallback())
    with pytest.raises(ValueError, match="a bad row"):
        trainer.train()
    (stored,) = lab.stored()
    assert stored.status == "FAILED"
    assert list(lab.points(lab.result(), "train/loss")) == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"logevery": 3},
            r"PrecisionCallback\(logevery=...\) is not known. Allowed: folder, group",
        ),
        ({"log_every": 0}, "log_every=0.: it is a number of steps, 1 or more"),
        ({"log_every": None}, "log_every=None.: it is a number of steps, 1 or more"),
        ({"numerics_every": True}, "numerics_every=True"),
        ({"quality": "accuracy"}, "Type quality='val/accuracy'"),
        ({"direction": "up"}, "direction='up'.: allowed are 'max' and 'min'"),
        ({"group": "../x"}, "it becomes a folder in outputs/groups"),
        ({"group": "a", "folder": "b"}, "Leave one of them out"),
        ({"expected": "fp16"}, "expected='fp16'.: allowed are .*16-mixed"),
    ],
)
def test_wrong_options_are_refused_when_the_callback_is_made(options, message):
    with pytest.raises(ConfigError, match=message):
        PrecisionCallback(**options)


def test_weights_that_were_loaded_in_another_dtype_are_named(lab, capsys):
    trained(PrecisionCallback(), net=tiny_net().to(torch.bfloat16))
    assert lab.result().precision == "bf16-true"
    assert "from_pretrained(..., dtype=torch.float32)" in capsys.readouterr().out


def test_mlflows_own_callback_may_record_beside_it(lab, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{lab.folder}/outputs/mlflow.db")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's own
        trained(PrecisionCallback(), report_to=["mlflow"], logging_steps=1)
    assert list(lab.points(lab.result(), "train/loss")) == [1, 2, 3, 4]
    assert len(lab.stored()) == 2


def test_runs_of_a_group_are_one_report(lab, main, capsys):
    for precision in ({}, {"bf16": True}, {"fp16": True, "scaler": half_scaler()}):
        trained(PrecisionCallback(group="tiny"), eval_strategy="epoch", **precision)
    assert "python -m runner report outputs/groups/tiny" in capsys.readouterr().out
    (parent,) = [run for run in lab.stored() if run.name == "tiny"]
    assert parent.status == "FINISHED"
    store = f"tracking.uri=sqlite:///{lab.folder}/outputs/mlflow.db"
    # Of the folder, and of MLflow alone.
    for words in ([lab.folder / "outputs" / "groups" / "tiny"], [parent.id, store]):
        done = main("report", *words).check_ok()
        rows = [f"│ {name} transformers " for name in ("32-true", "bf16-mixed", "16-mixed")]
        assert all(row in done.stdout for row in rows)
        assert "baseline" in done.stdout


def test_the_numerics_of_steps_are_measured(lab):
    train_with_transformers(steps=5, numerics_every=2)
    assert list(lab.points(lab.result(), "numerics/underflow_share")) == [2, 4]
    assert {"numerics.json", "numerics.html"} <= {path.name for path in lab.run.iterdir()}
