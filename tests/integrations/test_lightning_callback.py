"""Trainings of Lightning's real Trainer, and loops with its Fabric, recorded as runs."""

import warnings

import pytest
import torch
from foreign_models import examples, norm_of_gradients, tiny_net
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.plugins import MixedPrecision

from runner.integrations.lightning import FabricRecord, PrecisionCallback, validation_metrics
from runner.utils.errors import ConfigError


class Module(L.LightningModule):
    """TinyNet with a loss, a validation and the norms of its gradients by hand."""

    def __init__(self, error=None):
        super().__init__()
        self.net = tiny_net()
        self.error = error
        self.norms = []

    def training_step(self, batch, batch_idx):
        if self.error is not None and batch_idx == 2:
            raise self.error
        return self.net(**batch)["loss"]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(**batch)["loss"])

    def on_after_backward(self):
        # Before Lightning unscales and clips: the scale is in them.
        self.norms.append(norm_of_gradients(self))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def batches(count=64, size=4):
    return DataLoader(examples(count), batch_size=size)


def trainer(*callbacks, **changes):
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": 4,
        "limit_val_batches": 0,
    }
    return L.Trainer(callbacks=[*callbacks], **(quiet | changes))


def trained(*callbacks, module=None, size=4, **changes):
    """Train the module; return it with its Trainer."""
    module = module or Module()
    ours = trainer(*callbacks, **changes)
    validation = batches(8) if changes.get("limit_val_batches") else None
    ours.fit(module, batches(size=size), validation)
    return module, ours


@pytest.fixture(autouse=True)
def _quiet_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers and devices
        yield


def test_every_step_is_in_the_store(lab):
    module, _ = trained(PrecisionCallback(), gradient_clip_val=0.01, limit_val_batches=2)
    result = lab.result()
    assert (result.precision, result.model, result.status) == ("32-true", "Module", "finished")
    norms = lab.points(result, "train/grad_norm")
    assert list(norms) == [1, 2, 3, 4]
    assert list(norms.values()) == pytest.approx(module.norms)
    assert list(lab.points(result, "train/loss")) == [1, 2, 3, 4]
    assert set(lab.points(result, "train/lr").values()) == {0.1}
    assert lab.points(result, "loss_scale/value") == {}
    assert lab.tags(result)["trainer"].startswith("lightning ")
    assert lab.table()["net.first"]["computes"] == "float32"


def test_skipped_steps_and_the_loss_scale_are_recorded(lab):
    # Trainer(precision="16-mixed") runs this plugin on a GPU; on a CPU it takes bf16-mixed.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    module, _ = trained(
        PrecisionCallback(log_every=3), plugins=[plugin], max_steps=14, gradient_clip_val=0.01
    )
    result = lab.result()
    assert (result.precision, result.steps) == ("16-mixed", 14)
    scales = lab.points(result, "loss_scale/value")
    overflows = lab.points(result, "loss_scale/overflow")
    assert list(scales) == list(overflows) == list(range(1, 15))
    skipped = [step for step, is_skipped in overflows.items() if is_skipped]
    assert skipped[0] == 1
    assert scales[1] == 2.0**24
    assert all(scales[step + 1] == scales[step] / 2 for step in skipped if step < 14)
    assert max(scales[step + 1] / scales[step] for step in range(1, 14)) == 2
    assert result.skipped_steps == len(skipped)
    # The gradients that Lightning had not unscaled yet, over the scale of that step.
    norms = lab.points(result, "train/grad_norm")
    good = [step for step in norms if step not in skipped]
    by_hand = {step: module.norms[step - 1] / scales[step] for step in good}
    assert {step: norms[step] for step in good} == pytest.approx(by_hand, rel=1e-4)
    losses = lab.points(result, "train/loss")
    assert all(0 < losses[step] < 10 for step in good)


def test_micro_batches_make_one_step(lab):
    trained(PrecisionCallback(folder="four"), accumulate_grad_batches=4, size=2, max_steps=3)
    trained(PrecisionCallback(folder="one"), size=8, max_steps=3)
    four, one = (lab.result(lab.folder / name) for name in ("four", "one"))
    for name in ("train/loss", "train/grad_norm"):
        assert lab.points(four, name) == pytest.approx(lab.points(one, name), rel=1e-4)
    assert list(lab.points(four, "train/loss")) == [1, 2, 3]


def test_validations_are_recorded_and_the_sanity_check_is_not(lab):
    _, ours = trained(
        PrecisionCallback(), limit_val_batches=2, val_check_interval=2, num_sanity_val_steps=2
    )
    points = lab.points(lab.result(), "val/loss")
    assert list(points) == [2, 4]
    assert points[4] == pytest.approx(float(ours.callback_metrics["val_loss"]))
    assert lab.result().metrics == {"val/loss": pytest.approx(points[4])}


def test_the_seed_is_that_of_seed_everything(lab, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    trained(PrecisionCallback(), max_steps=1)
    assert lab.result().seed == 7


def test_names_of_validations():
    metrics = {"val_loss": 1, "val/acc": torch.tensor(2.0), "valid_f1": 3, "loss": 4, "value": 5}
    assert validation_metrics(metrics) == {"val/loss": 1.0, "val/acc": 2.0, "val/f1": 3.0}


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [(ValueError("a bad row"), ValueError, "FAILED"), (KeyboardInterrupt(), SystemExit, "KILLED")],
)
def test_a_training_that_does_not_finish_ends_its_run(lab, error, raised, status):
    with pytest.raises(raised):
        trained(PrecisionCallback(), module=Module(error))
    (stored,) = lab.stored()
    assert stored.status == status
    assert list(lab.points(lab.result(), "train/loss")) == [1, 2]


def test_what_lightning_replaced_is_named(lab, capsys):
    trained(PrecisionCallback(expected="16-mixed"), precision="16-mixed")
    assert lab.result().precision == "bf16-mixed"
    assert "Lightning replaces 16-mixed by bf16-mixed on a CPU." in capsys.readouterr().out
    assert "16-mixed" in lab.tags(lab.result())["substituted"]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_the_precision_is_that_of_the_first_step(lab, precision):
    trained(PrecisionCallback(), precision=precision, max_steps=1)
    assert lab.result().precision == precision
    assert "substituted" not in lab.tags(lab.result())


def test_two_callbacks_in_one_trainer_are_refused(lab):
    with pytest.raises(ConfigError, match="has 2 PrecisionCallbacks"):
        trained(PrecisionCallback(), PrecisionCallback())


def test_a_resumed_fit_continues_its_run(lab):
    folder = lab.folder / "mine"
    _, first = trained(PrecisionCallback(folder=folder), max_steps=2)
    first.save_checkpoint(lab.folder / "two.ckpt")
    ours = trainer(PrecisionCallback(folder=folder))
    ours.fit(Module(), batches(), ckpt_path=lab.folder / "two.ckpt", weights_only=False)
    assert list(lab.points(lab.result(folder), "train/loss")) == [1, 2, 3, 4]
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
    module, _ = trained(PrecisionCallback(), module=Alternating(), max_steps=4)
    norms = lab.points(lab.result(), "train/grad_norm")
    assert list(norms.values()) == pytest.approx(module.norms)
    assert list(lab.points(lab.result(), "train/loss")) == [1, 2, 3, 4]


class Skipping(Module):
    """Leaves out its second batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_a_batch_that_is_left_out_is_a_step_without_values(lab):
    trained(PrecisionCallback(), module=Skipping())
    assert list(lab.points(lab.result(), "train/loss")) == [1, 3, 4]


def test_a_validation_after_the_training_belongs_to_its_run(lab):
    module, ours = trained(PrecisionCallback(), limit_val_batches=2, check_val_every_n_epoch=9)
    ours.validate(module, batches(8), verbose=False)
    result = lab.result()
    assert lab.points(result, "val/loss") == {4: pytest.approx(result.metrics["val/loss"])}


def fabric_parts(**changes):
    fabric = L.Fabric(accelerator="cpu", **changes)
    net = tiny_net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return fabric, model, optimizer


def fabric_loop(steps=4, clip=None, fabric=None, **options):
    """Train with Fabric; return the norms by hand, whole and scaled."""
    fabric, model, optimizer = fabric or fabric_parts()
    norms = []
    with FabricRecord(fabric, model, optimizer, **options) as record:
        for batch, _ in zip(batches(), range(steps), strict=False):
            fabric.backward(model(**batch)["loss"])
            norms.append(norm_of_gradients(model))
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=clip, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            record.step(examples=4)
        record.evaluation({"loss": 0.5})
    return norms


def test_a_loop_with_fabric_is_recorded(lab):
    norms = fabric_loop(clip=0.01)
    result = lab.result()
    assert list(lab.points(result, "train/grad_norm").values()) == pytest.approx(norms)
    assert list(lab.points(result, "train/loss")) == [1, 2, 3, 4]
    assert (result.precision, result.metrics) == ("32-true", {"val/loss": 0.5})
    assert lab.points(result, "perf/examples_per_second")[4] > 0


def test_the_loss_scale_of_a_loop_with_fabric(lab):
    from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    plugin = FabricMixedPrecision("16-mixed", "cpu", scaler)
    norms = fabric_loop(12, 0.01, fabric_parts(plugins=[plugin]))
    result = lab.result()
    assert result.precision == "16-mixed"
    scales = lab.points(result, "loss_scale/value")
    skipped = [
        s for s, is_skipped in lab.points(result, "loss_scale/overflow").items() if is_skipped
    ]
    assert skipped
    assert len(skipped) < 12
    recorded = lab.points(result, "train/grad_norm")
    good = [step for step in scales if step not in skipped]
    by_hand = {step: norms[step - 1] / scales[step] for step in good}
    assert {step: recorded[step] for step in good} == pytest.approx(by_hand, rel=1e-4)


def test_wrong_use_of_the_record_of_a_loop_says_what_to_type(lab):
    fabric, model, optimizer = fabric_parts()
    with pytest.raises(ConfigError, match=r"takes what fabric\.setup returned"):
        FabricRecord(fabric, tiny_net(), optimizer)
    record = FabricRecord(fabric, model, optimizer)
    with pytest.raises(ConfigError, match="Type with FabricRecord"):
        record.step()
    with pytest.raises(ConfigError, match=r"fabric.backward\(loss\) was not since"), record:
        record.step()
    with pytest.raises(ConfigError, match="Make a new one for each training"), record:
        pass
