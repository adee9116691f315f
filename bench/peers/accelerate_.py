"""Hugging Face Accelerate: the same loop; Accelerate owns precision, backward and the step."""

from accelerate import Accelerator

from bench.peers import parts
from bench.peers.jobs import Job

NAMES = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def train(job: Job, precision: str, steps: int, device: str) -> None:
    accelerator = Accelerator(mixed_precision=NAMES[precision], cpu=device == "cpu")
    net = parts.model(job, device)
    net, optimizer = accelerator.prepare(net, parts.optimizer(net))
    for x, y in parts.Batches(job, steps, device):
        optimizer.zero_grad(set_to_none=True)
        loss = parts.loss(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
