"""Lightning Fabric: the same loop; Fabric owns precision, backward and the optimizer's step."""

from lightning.fabric import Fabric

from bench.peers import parts
from bench.peers.jobs import Job


def train(job: Job, precision: str, steps: int, device: str) -> None:
    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    net = parts.model(job, device)
    net, optimizer = fabric.setup(net, parts.optimizer(net))
    for x, y in parts.Batches(job, steps, device):
        optimizer.zero_grad(set_to_none=True)
        loss = parts.loss(net(x), y)
        fabric.backward(loss)
        optimizer.step()
