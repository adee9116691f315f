"""Lightning's Trainer, barebones: without logger, checkpoints, progress bar and profiler, which is
the fastest that it goes. It gets one epoch of all steps: none ends in between."""

import lightning
from torch import Tensor
from torch.optim import Optimizer

from bench.peers import jobs


class Module(lightning.LightningModule):
    def __init__(self, job: jobs.Job, device: str) -> None:
        super().__init__()
        self.net = jobs.model(job, device)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return jobs.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return jobs.optimizer(self.net)


def train(job: jobs.Job, precision: str, steps: int, device: str) -> None:
    trainer = lightning.Trainer(
        barebones=True, max_steps=steps, accelerator=device, devices=1, precision=precision
    )
    trainer.fit(Module(job, device), jobs.Batches(job, steps, device))
