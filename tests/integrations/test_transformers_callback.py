"""Trainings of a real transformers.Trainer, recorded as runs of this runner."""

import pytest
from foreign_models import examples, norm_of_gradients, tiny_net

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback, TrainingArguments

from runner.integrations.transformers import PrecisionCallback


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
