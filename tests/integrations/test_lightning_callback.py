"""What a record of Lightning's Trainer does beyond those of other trainers."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from foreign_trainings import Module, batches, fit, lightning_trainer

from runner.core.base.errors import ConfigError
from runner.integrations.lightning import PrecisionCallback, validation_metrics

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and devices


def test_validations_are_recorded_and_the_sanity_check_is_not(lab):
    _, trainer = fit(
        PrecisionCallback(), limit_val_batches=2, val_check_interval=2, num_sanity_val_steps=2
    )
    points = lab.points(lab.result(), "val/loss")
    assert list(points) == [2, 4]
    assert points[4] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert lab.result().metrics == {"val/loss": pytest.approx(points[4])}


def test_a_validation_after_the_training_belongs_to_its_run(lab):
    module, trainer = fit(PrecisionCallback(), limit_val_batches=2, check_val_every_n_epoch=9)
    trainer.validate(module, batches(8), verbose=False)
    result = lab.result()
    assert lab.points(result, "val/loss") == {4: pytest.approx(result.metrics["val/loss"])}


def test_names_of_validations():
    metrics = {"val_loss": 1, "val/acc": torch.tensor(2.0), "valid_f1": 3, "loss": 4, "value": 5}
    assert validation_metrics(metrics) == {"val/loss": 1.0, "val/acc": 2.0, "val/f1": 3.0}


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_precision_and_seed_are_those_of_the_training(lab, precision, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # as seed_everything sets it
    fit(PrecisionCallback(), precision=precision, max_steps=1)
    assert (lab.result().precision, lab.result().seed) == (precision, 7)
    assert "substituted" not in lab.tags(lab.result())


def test_two_callbacks_in_one_trainer_are_refused(lab):
    with pytest.raises(ConfigError, match="has 2 PrecisionCallbacks"):
        fit(PrecisionCallback(), PrecisionCallback())


def test_a_resumed_fit_continues_its_run(lab):
    _, first = fit(PrecisionCallback(folder="mine"), max_steps=2)
    first.save_checkpoint("two.ckpt")
    trainer = lightning_trainer(PrecisionCallback(folder="mine"))
    trainer.fit(Module(), batches(), ckpt_path="two.ckpt", weights_only=False)
    assert list(lab.points(lab.result(lab.folder / "mine"), "train/loss")) == [1, 2, 3, 4]
    (stored,) = lab.stored()
    assert stored.status == "FINISHED"


class Alternating(Module):
    """Takes two optimizer steps of its own in each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.net(**batch)["loss"])
            optimizer.step()


def test_each_step_of_manual_optimization_is_recorded(lab):
    module, _ = fit(PrecisionCallback(), module=Alternating())
    norms = lab.points(lab.result(), "train/grad_norm")
    assert list(norms.values()) == pytest.approx(module.norms)
    assert list(lab.points(lab.result(), "train/loss")) == [1, 2, 3, 4]


class Skipping(Module):
    """Leaves out its second batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_a_batch_that_is_left_out_is_a_step_without_values(lab):
    fit(PrecisionCallback(), module=Skipping())
    assert list(lab.points(lab.result(), "train/loss")) == [1, 3, 4]
