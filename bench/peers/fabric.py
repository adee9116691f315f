"""Lightning Fabric: the same loop; Fabric owns precision, backward and the optimizer's step."""

from lightning.fabric import Fabric

from bench.peers import jobs


def train(job: jobs.Job, precision: str, steps: int, device: str) -> None:
    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    net = jobs.model(job, device)
    net, optimizer = fabric.setup(net, jobs.optimizer(net))
    for x, y in jobs.Batches(job, steps, device):
        optimizer.zero_grad(set_to_none=True)
        loss = jobs.loss(net(x), y)
        fabric.backward(loss)
        optimizer.step()
