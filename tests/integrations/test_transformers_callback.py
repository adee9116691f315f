"""Trainings of a real transformers.Trainer, recorded as runs of this runner."""

import shutil
import warnings

import pytest
import torch
from foreign_models import TinyNet, examples, norm_of_gradients, tiny_net

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback, TrainingArguments

from runner.integrations.transformers import PrecisionCallback, evaluation_metrics
from runner.tracking import history
from runner.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def _new_accelerate_state():
    """Accelerate keeps the first precision of a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def arguments(folder, **changes):
    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder / "trainer"), **(given | changes))


class HandNorms(TrainerCallback):
    """Norms by hand: with max_grad_norm=0 the gradients are whole at on_pre_optimizer_step."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.norms.append(norm_of_gradients(model))


def trained(lab, *callbacks, net=None, kind=Trainer, **changes):
    """Train a tiny model; return its Trainer."""
    trainer = kind(
        net or tiny_net(),
        arguments(lab.folder, **changes),
        train_dataset=examples(),
        eval_dataset=examples(8),
        callbacks=[*callbacks],
    )
    trainer.train()
    return trainer


def test_every_step_is_in_the_store(lab):
    hand = HandNorms()
    trainer = trained(lab, PrecisionCallback(), hand, max_grad_norm=0, eval_strategy="epoch")
    result = lab.result()
    assert (result.precision, result.model, result.status) == ("32-true", "TinyNet", "finished")
    assert list(lab.points(result, "train/loss")) == [1, 2, 3, 4]
    assert list(lab.points(result, "train/lr").values()) == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert list(lab.points(result, "train/grad_norm").values()) == pytest.approx(hand.norms)
    mean = sum(lab.points(result, "train/loss").values()) / 4
    assert mean == pytest.approx(trainer.state.log_history[-1]["train_loss"], rel=1e-4)
    assert lab.points(result, "loss_scale/value") == {}
    assert lab.points(result, "perf/step_ms")[4] > 0
    assert lab.tags(result)["trainer"].startswith("transformers ")
    assert lab.params(result)["arguments.learning_rate"] == "0.1"
    assert {"config.yaml", "environment.json", "history.npz"} <= {p.name for p in lab.run.iterdir()}
    assert lab.table()["first"]["computes"] == "float32"


class HalfTrainer(Trainer):
    """A Trainer with fp16=True that runs on a CPU what Accelerate runs on a GPU.

    Accelerate makes no GradScaler on a CPU. The rest of its path is the real one: autocast to
    float16, scaled backward, unscaling before the clipping, skipped steps.
    """

    init_scale = 2.0**24

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale, growth_interval=2)
        self.accelerator.scaler = scaler


class QuietTrainer(HalfTrainer):
    """One whose first steps do not overflow."""

    init_scale = 1024.0


def test_skipped_steps_and_the_loss_scale_are_recorded(lab):
    trained(lab, PrecisionCallback(log_every=3), kind=HalfTrainer, fp16=True, max_steps=12)
    result = lab.result()
    assert (result.precision, result.steps) == ("16-mixed", 12)
    scales = lab.points(result, "loss_scale/value")
    overflows = lab.points(result, "loss_scale/overflow")
    assert list(scales) == list(overflows) == list(range(1, 13))
    skipped = [step for step, is_skipped in overflows.items() if is_skipped]
    # Each skipped step halves the scale of the next one; two good steps double it.
    assert skipped
    assert skipped[0] == 1
    assert scales[1] == 2.0**24
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step < 12)
    assert max(scales[step + 1] / scales[step] for step in range(1, 12)) == 2
    assert lab.points(result, "loss_scale/skipped_steps")[12] == len(skipped)
    assert result.skipped_steps == len(skipped)
    assert result.loss_scale == scales[12]
    changes = lab.points(result, "loss_scale/changes")
    assert changes == {step: scales[step] for step in changes}
    assert (lab.run / "loss_scale.png").is_file()
    assert lab.table()["first"]["computes"] == "float16"


def test_the_norm_is_unscaled_and_that_of_before_the_clipping(lab):
    hand = HandNorms()
    trained(lab, PrecisionCallback(), hand, max_grad_norm=0, max_steps=1)
    shutil.rmtree(lab.run)
    AcceleratorState._reset_state(True)
    changes = {"fp16": True, "max_grad_norm": 0.001, "max_steps": 1}
    trained(lab, PrecisionCallback(), kind=QuietTrainer, **changes)
    norms = lab.points(lab.result(), "train/grad_norm")
    assert norms[1] == pytest.approx(hand.norms[0], rel=0.01)


def test_micro_batches_make_one_step(lab):
    hand = HandNorms()
    accumulation = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    trained(lab, PrecisionCallback(), hand, max_grad_norm=0, max_steps=3, **accumulation)
    result = lab.result()
    norms = lab.points(result, "train/grad_norm")
    assert list(norms.values()) == pytest.approx(hand.norms)
    assert list(lab.points(result, "train/loss")) == [1, 2, 3]
    # The same examples in one batch have the same mean loss.
    shutil.rmtree(lab.run)
    AcceleratorState._reset_state(True)
    trained(lab, PrecisionCallback(), max_grad_norm=0, max_steps=3, per_device_train_batch_size=8)
    whole = lab.points(lab.result(), "train/loss")
    assert lab.points(result, "train/loss") == pytest.approx(whole, rel=1e-4)


def test_an_evaluation_after_the_training_belongs_to_its_run(lab):
    trainer = trained(lab, PrecisionCallback())
    loss = trainer.evaluate()["eval_loss"]
    result = lab.result()
    assert result.metrics == {"val/loss": pytest.approx(loss)}
    assert lab.points(result, "val/loss") == {4: pytest.approx(loss)}
    (stored,) = lab.stored()
    assert stored.status == "FINISHED"


def test_several_evaluation_sets_have_a_metric_each():
    metrics = {"eval_a_loss": 1.0, "eval_b_loss": 2.0, "eval_a_runtime": 3.0, "epoch": 1}
    assert evaluation_metrics(metrics, {"a": [], "b": []}) == {
        "val/a/loss": 1.0,
        "val/loss": 1.0,
        "val/b/loss": 2.0,
    }


class Failing(TinyNet):
    """Raises an error in its third forward."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.calls = 0

    def forward(self, x, labels=None):
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return super().forward(x, labels)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("a bad row"), "FAILED", "ValueError: a bad row"),
        (KeyboardInterrupt(), "KILLED", "Interrupted."),
    ],
)
def test_a_training_that_does_not_finish_ends_its_run(lab, error, status, text):
    with pytest.raises(type(error)):
        trained(lab, PrecisionCallback(), net=Failing(error))
    result = lab.result()
    (stored,) = lab.stored()
    assert (stored.status, lab.tags(result)["error"]) == (status, text)
    assert result.status == {"FAILED": "failed", "KILLED": "stopped"}[status]
    assert list(lab.points(result, "train/loss")) == [1, 2]


def test_a_resumed_training_continues_its_run_in_its_folder(lab):
    folder = lab.folder / "mine"
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(lab, PrecisionCallback(folder=folder), **saving)
    first = lab.result(folder)
    AcceleratorState._reset_state(True)
    trainer = Trainer(
        tiny_net(),
        arguments(lab.folder, **saving, max_steps=6),
        train_dataset=examples(),
        callbacks=[PrecisionCallback(folder=folder)],
    )
    # Steps 3 and 4 are trained again, and stand once in the record.
    trainer.train(resume_from_checkpoint=str(lab.folder / "trainer" / "checkpoint-2"))
    result = lab.result(folder)
    assert result.run_id == first.run_id
    assert list(lab.points(result, "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert lab.tags(result)["resumed_at_step"] == "2"
    assert history.from_folder(folder)["train/loss"][0].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_resumed_training_counts_the_skipped_steps_of_its_earlier_part(lab):
    folder = lab.folder / "mine"
    options = {"fp16": True, "save_strategy": "steps", "save_steps": 2}
    trained(lab, PrecisionCallback(folder=folder), kind=HalfTrainer, **options)
    AcceleratorState._reset_state(True)
    trainer = HalfTrainer(
        tiny_net(),
        arguments(lab.folder, **options, max_steps=6),
        train_dataset=examples(),
        callbacks=[PrecisionCallback(folder=folder)],
    )
    trainer.train(resume_from_checkpoint=str(lab.folder / "trainer" / "checkpoint-2"))
    result = lab.result(folder)
    overflows = lab.points(result, "loss_scale/overflow")
    assert list(overflows) == [1, 2, 3, 4, 5, 6]
    assert lab.points(result, "loss_scale/skipped_steps")[6] == sum(overflows.values())
    assert result.skipped_steps == sum(overflows.values())


def test_a_resumed_training_without_a_folder_is_a_new_run_from_its_step_on(lab):
    trained(lab, save_strategy="steps", save_steps=2)
    trainer = Trainer(
        tiny_net(), arguments(lab.folder), train_dataset=examples(), callbacks=[PrecisionCallback()]
    )
    trainer.train(resume_from_checkpoint=str(lab.folder / "trainer" / "checkpoint-2"))
    assert list(lab.points(lab.result(), "train/loss")) == [3, 4]


def test_each_training_of_a_trainer_is_a_run(lab):
    trainer = trained(lab, PrecisionCallback(), max_steps=1)
    trainer.train()
    assert [lab.result(folder).steps for folder in lab.runs] == [1, 1]
    assert [run.status for run in lab.stored()] == ["FINISHED", "FINISHED"]


def test_a_run_is_not_written_into_the_folder_of_another_one(lab):
    trained(lab, PrecisionCallback(folder="mine"), max_steps=1)
    with pytest.raises(ConfigError, match="folder=mine holds a run"):
        trained(lab, PrecisionCallback(folder="mine"), max_steps=1)


def test_two_callbacks_in_one_trainer_are_refused(lab):
    with pytest.raises(ConfigError, match="has 2 PrecisionCallbacks"):
        trained(lab, PrecisionCallback(), PrecisionCallback())


def test_a_callback_of_two_trainers_records_the_one_that_trains(lab):
    callback = PrecisionCallback()
    first, second = (
        Trainer(
            tiny_net(),
            arguments(lab.folder, max_steps=steps),
            train_dataset=examples(),
            callbacks=[callback],
        )
        for steps in (1, 2)
    )
    first.train()
    second.train()
    assert [lab.result(folder).steps for folder in lab.runs] == [1, 2]


def test_an_error_ends_the_run_of_a_callback_that_was_added_later(lab):
    net = Failing(ValueError("a bad row"))
    trainer = Trainer(net, arguments(lab.folder), train_dataset=examples())
    trainer.add_callback(PrecisionCallback())
    with pytest.raises(ValueError, match="a bad row"):
        trainer.train()
    (stored,) = lab.stored()
    assert stored.status == "FAILED"


def test_a_callback_that_was_added_later_records_too(lab):
    trainer = Trainer(tiny_net(), arguments(lab.folder, max_steps=2), train_dataset=examples())
    trainer.add_callback(PrecisionCallback())
    trainer.train()
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


def test_what_the_trainer_replaced_is_named(lab, capsys):
    trained(lab, PrecisionCallback(), fp16=True)
    result = lab.result()
    text = (
        "TrainingArguments(fp16=True) asks for 16-mixed, and the first step computed in float32 "
        "with weights in float32 and no loss scale: the run is recorded as 32-true. Accelerate "
        "runs fp16 on GPUs only, and on a CPU says nothing."
    )
    assert f"warning: {text}" in capsys.readouterr().out
    assert lab.tags(result)["substituted"] == text
    assert text.partition("(")[0] in lab.tags(result)["mlflow.note.content"]
    assert (result.precision, result.label) == ("32-true", "32-true transformers (asked: 16-mixed)")


def test_weights_that_were_loaded_in_another_dtype_are_named(lab, capsys):
    trained(lab, PrecisionCallback(), net=tiny_net().to(torch.bfloat16))
    assert lab.result().precision == "bf16-true"
    assert "from_pretrained(..., dtype=torch.float32)" in capsys.readouterr().out


def test_mlflows_own_callback_may_record_beside_it(lab, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{lab.folder}/outputs/mlflow.db")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's own
        trained(lab, PrecisionCallback(), report_to=["mlflow"], logging_steps=1)
    result = lab.result()
    assert list(lab.points(result, "train/loss")) == [1, 2, 3, 4]
    assert len(lab.stored()) == 2


def test_runs_of_a_group_are_one_report(lab, main, capsys):
    trained(lab, PrecisionCallback(group="tiny"), eval_strategy="epoch")
    AcceleratorState._reset_state(True)
    trained(lab, PrecisionCallback(group="tiny"), eval_strategy="epoch", bf16=True)
    AcceleratorState._reset_state(True)
    trained(
        lab, PrecisionCallback(group="tiny"), eval_strategy="epoch", fp16=True, kind=HalfTrainer
    )
    assert "python -m runner report outputs/groups/tiny" in capsys.readouterr().out
    done = main("report", lab.folder / "outputs" / "groups" / "tiny")
    assert done.rc == 0, done.stderr
    rows = [f"| {name} transformers |" for name in ("32-true", "bf16-mixed", "16-mixed")]
    assert all(row in done.stdout for row in rows)
    assert "baseline" in done.stdout
    # The same from MLflow alone.
    (parent,) = [run for run in lab.stored() if run.name == "tiny"]
    assert parent.status == "FINISHED"
    done = main("report", parent.id, f"tracking.uri=sqlite:///{lab.folder}/outputs/mlflow.db")
    assert done.rc == 0, done.stderr
    assert all(row in done.stdout for row in rows)


def test_the_numerics_of_steps_are_measured(lab):
    trained(lab, PrecisionCallback(numerics_every=2), max_steps=5)
    assert list(lab.points(lab.result(), "numerics/underflow_share")) == [2, 4]
    assert {"numerics.json", "numerics.html"} <= {path.name for path in lab.run.iterdir()}
