"""Hand-written PyTorch, tuned: no framework, nothing is read from the device."""

import torch

from bench.peers import parts
from bench.peers.jobs import Job

HALF = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def train(job: Job, precision: str, steps: int, device: str, record: bool = False) -> None:
    """Train; with record, keep loss, learning rate, gradient norm, loss scale and overflow of every
    step in a list, as the runner records them."""
    net = parts.model(job, device)
    optimizer = parts.optimizer(net)
    params, records = list(net.parameters()), []
    half = HALF.get(precision)
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


def recording(job: Job, precision: str, steps: int, device: str) -> None:
    train(job, precision, steps, device, record=True)
