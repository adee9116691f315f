"""The contenders: one function each, which trains a job to its end.

Each imports its own framework, and nothing of another one. The hand-written loops share model,
batches, optimizer and loss, from the same seed (parts.py); the runner gets the same values by its
command and builds them itself.
"""

import json
import os
import sys
from collections.abc import Iterator

from bench.peers.jobs import SEED, Job

FOLDER = "PEERS_FOLDER"
"""Environment variable: where the runner's runs and its store go."""


def raw(job: Job, precision: str, steps: int, device: str, record: bool = False) -> None:
    """Train by hand in PyTorch, tuned: no framework, and nothing is read from the device.

    Args:
        record: keep loss, learning rate, gradient norm and loss scale of every step in a list, as
            the runner records them.
    """
    import torch

    from bench.peers import parts

    net = parts.model(job, device)
    optimizer = parts.optimizer(net)
    params, records = list(net.parameters()), []
    half = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(precision)
    autocast = torch.autocast(device, half, enabled=half is not None)
    scaler = torch.amp.GradScaler(device, enabled=half is torch.float16)
    scaled = scaler.is_enabled()
    for x, y in parts.Batches(job, steps, device):
        optimizer.zero_grad(set_to_none=True)
        if half is None:
            loss = parts.loss(net(x), y)
        else:
            with autocast:
                loss = parts.loss(net(x), y)
        scaler.scale(loss).backward() if scaled else loss.backward()
        if record:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.get_total_norm([p.grad for p in params]).item()
            scale = scaler.get_scale()
            records.append((loss.item(), optimizer.param_groups[0]["lr"], norm, scale))
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def raw_recording(job: Job, precision: str, steps: int, device: str) -> None:
    """Train by hand in PyTorch, and record in a list."""
    raw(job, precision, steps, device, record=True)


def fabric(job: Job, precision: str, steps: int, device: str) -> None:
    """Train the same loop with Lightning Fabric, which owns precision, backward and step."""
    from lightning.fabric import Fabric

    from bench.peers import parts

    runner = Fabric(accelerator=device, devices=1, precision=precision)
    net = parts.model(job, device)
    net, optimizer = runner.setup(net, parts.optimizer(net))
    for x, y in parts.Batches(job, steps, device):
        optimizer.zero_grad(set_to_none=True)
        loss = parts.loss(net(x), y)
        runner.backward(loss)
        optimizer.step()


def accelerate(job: Job, precision: str, steps: int, device: str) -> None:
    """Train the same loop with Hugging Face Accelerate, which owns precision, backward and step."""
    from accelerate import Accelerator

    from bench.peers import parts

    names = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}
    accelerator = Accelerator(mixed_precision=names[precision], cpu=device == "cpu")
    net = parts.model(job, device)
    net, optimizer = accelerator.prepare(net, parts.optimizer(net))
    for x, y in parts.Batches(job, steps, device):
        optimizer.zero_grad(set_to_none=True)
        loss = parts.loss(net(x), y)
        accelerator.backward(loss)
        optimizer.step()


def trainer(job: Job, precision: str, steps: int, device: str) -> None:
    """Train with Lightning's Trainer, barebones, the fastest that it runs.

    It has no logger, checkpoints, progress bar and profiler, and one epoch of all steps, so that no
    epoch ends in between.
    """
    import lightning

    from bench.peers import parts

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = parts.model(job, device)

        def training_step(self, batch, index: int):
            return parts.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return parts.optimizer(self.net)

    barebones = lightning.Trainer(
        barebones=True, max_steps=steps, accelerator=device, devices=1, precision=precision
    )
    barebones.fit(Module(), parts.Batches(job, steps, device))


def runner(job: Job, precision: str, steps: int, device: str) -> None:
    """Train with this runner by its command, recorded in MLflow, in a SQLite store.

    What a user types is what is measured: Hydra, the guards, the loop, the record of every step and
    the process that sends it. Left out is what the others do not do at the end either: the last
    checkpoint and the exported model.
    """
    store = f"tracking.uri=sqlite:///{os.environ[FOLDER]}/mlflow.db"
    run_command([*overrides(job, precision, steps, device), store, "tracking.log_model=false"])


def runner_untracked(job: Job, precision: str, steps: int, device: str) -> None:
    """Train with this runner by its command, without MLflow."""
    run_command([*overrides(job, precision, steps, device), "tracking=none"])


def overrides(job: Job, precision: str, steps: int, device: str) -> Iterator[str]:
    """Yield the overrides of the runner's command."""
    yield from (f"model={job.model}", f"data={job.data}", f"precision={precision}")
    yield f"accelerator={device}"
    for group, arguments in (("model", job.model_args), ("data", job.data_args)):
        yield from (f"{group}.{key}={json.dumps(value)}" for key, value in arguments.items())
    yield from (f"seed={SEED}", "optimizer=adamw", "optimizer.lr=1e-3")
    yield from (f"train.batch_size={job.batch}", f"train.max_steps={steps}")
    yield from ("train.eval_every=1000000000", "checkpoint.final=false")
    if precision == "16-mixed":  # PyTorch's own kernels, as the others
        yield "precision.cpu_float16=native"


def run_command(arguments: list[str]) -> None:
    """Run the runner's command in this process."""
    from runner.__main__ import main

    sys.argv = ["runner", *arguments, f"hydra.run.dir={os.environ[FOLDER]}/runs/{os.getpid()}"]
    if status := main():
        raise SystemExit(status)


CONTENDERS = {
    "raw": raw,
    "raw, recording": raw_recording,
    "runner": runner,
    "runner, tracking=none": runner_untracked,
    "Fabric": fabric,
    "Trainer": trainer,
    "Accelerate": accelerate,
}
