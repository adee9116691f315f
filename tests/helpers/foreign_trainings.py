"""One small training in each trainer whose steps are recorded, with its gradients by hand.

Each function of TRAININGS trains TinyNet and returns the norm of each step's gradients: whole, not
clipped yet, and multiplied by the loss scale where `scaler` scales the loss.
"""

import lightning as L
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from foreign_models import examples, norm_of_gradients, tiny_net
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from runner.integrations.accelerate import PrecisionRecord
from runner.integrations.lightning import FabricRecord
from runner.integrations.lightning import PrecisionCallback as LightningCallback
from runner.integrations.transformers import PrecisionCallback as TransformersCallback

CLIP = 0.01


def new_accelerate_state():
    """Let the next training choose its precision: Accelerate keeps the first of a process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class MeasuringTrainer(Trainer):
    """Measures each step's gradients before they are clipped.

    With a scaler it runs on a CPU what Accelerate runs on a GPU, where alone it makes a GradScaler.
    The rest of the path is the real one: autocast to float16, scaled backward, unscaling before
    the clipping, skipped steps.
    """

    def __init__(self, *args, scaler=None, **options):
        self.scaler = scaler
        self.norms = []
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.scaler is not None:
            self.accelerator.native_amp = True
            self.accelerator.scaler = self.scaler

    def training_step(self, model, *args, **options):
        loss = super().training_step(model, *args, **options)
        if self.accelerator.sync_gradients:
            self.norms.append(norm_of_gradients(model))
        return loss


def transformers_trainer(*callbacks, net=None, scaler=None, **changes):
    """Return a Trainer of TinyNet that says and saves nothing."""
    new_accelerate_state()
    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "max_grad_norm": CLIP,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return MeasuringTrainer(
        net or tiny_net(),
        TrainingArguments("trainer", **(given | changes)),
        train_dataset=examples(),
        eval_dataset=examples(8),
        callbacks=[*callbacks],
        scaler=scaler,
    )


def train_with_transformers(
    steps=4, size=4, accumulation=1, precision=None, scaler=None, net=None, **options
):
    trainer = transformers_trainer(
        TransformersCallback(**options),
        net=net,
        scaler=scaler,
        max_steps=steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        **({precision: True} if precision else {}),
    )
    trainer.train()
    return trainer.norms


class Module(L.LightningModule):
    """TinyNet with a loss and a validation; it measures gradients as MeasuringTrainer does."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or tiny_net()
        self.norms = []

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(**batch)["loss"])

    def on_after_backward(self):
        # Before Lightning unscales and clips.
        self.norms.append(norm_of_gradients(self))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def batches(count=64, size=4):
    return DataLoader(examples(count), batch_size=size)


def lightning_trainer(*callbacks, **changes):
    """Return a Trainer of Lightning's that says and saves nothing."""
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


def fit(*callbacks, module=None, size=4, **changes):
    """Train a module with Lightning; return it with its Trainer."""
    module = module or Module()
    trainer = lightning_trainer(*callbacks, **changes)
    validation = batches(8) if changes.get("limit_val_batches") else None
    trainer.fit(module, batches(size=size), validation)
    return module, trainer


def train_with_lightning(
    steps=4, size=4, accumulation=1, precision=None, scaler=None, net=None, **options
):
    # Trainer(precision="16-mixed") has this plugin on a GPU; on a CPU it takes bf16-mixed.
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if scaler else None
    module, _ = fit(
        LightningCallback(**options),
        module=Module(net),
        size=size,
        max_steps=steps,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=CLIP,
        precision=precision,
        plugins=plugins,
    )
    return module.norms


def fabric_parts(**changes):
    """Return a Fabric, and the model and optimizer that it has set up."""
    net = changes.pop("net", None) or tiny_net()
    fabric = L.Fabric(accelerator="cpu", **changes)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return fabric, model, optimizer


def train_with_fabric(
    steps=4, size=4, accumulation=1, precision=None, scaler=None, net=None, **options
):
    assert accumulation == 1, "a loop with Fabric has no micro-batches"
    plugins = [FabricMixedPrecision("16-mixed", "cpu", scaler)] if scaler else None
    fabric, model, optimizer = fabric_parts(net=net, precision=precision, plugins=plugins)
    norms = []
    with FabricRecord(fabric, model, optimizer, **options) as record:
        for batch, _ in zip(batches(size=size), range(steps), strict=False):
            fabric.backward(model(**batch)["loss"])
            norms.append(norm_of_gradients(model))
            fabric.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            record.step(examples=size)
        record.evaluation({"loss": 0.5})
    return norms


def accelerate_parts(size=4, scaler=None, net=None, **changes):
    """Return an Accelerator, and the model, optimizer and loader that it has prepared.

    Args:
        size: examples of a batch.
        scaler: what Accelerate makes of mixed_precision="fp16" on a GPU, and not on a CPU.
        net: the model; None for TinyNet.
        changes: arguments of Accelerator.
    """
    new_accelerate_state()
    accelerator = Accelerator(cpu=True, **changes)
    if scaler is not None:
        accelerator.native_amp = True
        accelerator.scaler = scaler
    net = net or tiny_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(net, optimizer, batches(size=size))


def train_with_accelerate(
    steps=4, size=4, accumulation=1, precision=None, scaler=None, net=None, **options
):
    accelerator, model, optimizer, loader = accelerate_parts(
        size, scaler, net, mixed_precision=precision, gradient_accumulation_steps=accumulation
    )
    norms = []
    with PrecisionRecord(accelerator, model, optimizer, **options) as record:
        for batch, _ in zip(loader, range(steps * accumulation), strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    norms.append(norm_of_gradients(model))
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                record.step()
    return norms


TRAININGS = {
    "transformers": train_with_transformers,
    "lightning": train_with_lightning,
    "fabric": train_with_fabric,
    "accelerate": train_with_accelerate,
}
