"""Hugging Face Accelerate: the same loop; Accelerate owns precision, backward and the step."""

from accelerate import Accelerator

from bench.peers import jobs

NAMES = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def train(job: jobs.Job, precision: str, steps: int, device: str) -> None:
    accelerator = Accelerator(mixed_precision=NAMES[precision], cpu=device == "cpu")
    net = jobs.model(job, device)
    net, optimizer = accelerator.prepare(net, jobs.optimizer(net))
    for x, y in jobs.Batches(job, steps, device):
        optimizer.zero_grad(set_to_none=True)
        loss = jobs.loss(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
