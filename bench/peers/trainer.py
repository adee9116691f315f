"""Lightning's Trainer, barebones: without logger, checkpoints, progress bar and profiler, which is
the fastest that it goes. It gets one epoch of all steps: none ends in between."""

import lightning
from torch import Tensor
from torch.optim import Optimizer

from bench.peers import parts
from bench.peers.jobs import Job


class Module(lightning.LightningModule):
    def __init__(self, job: Job, device: str) -> None:
        super().__init__()
        self.net = parts.model(job, device)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return parts.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return parts.optimizer(self.net)


def train(job: Job, precision: str, steps: int, device: str) -> None:
    trainer = lightning.Trainer(
        barebones=True, max_steps=steps, accelerator=device, devices=1, precision=precision
    )
    trainer.fit(Module(job, device), parts.Batches(job, steps, device))
