"""Model, batches, optimizer and loss of the hand-written loops, from the same seed.

The runner gets the same values by its command (contenders.py) and builds them itself.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

from bench.peers.jobs import SEED, Job

MODELS = {
    "mlp": "runner.models.mlp.MLP",
    "resnet": "runner.models.resnet.resnet",
    "gpt": "runner.models.gpt.GPT",
}
DATA = {
    "synthetic_images": "runner.data.datasets.synthetic_images.synthetic_images",
    "synthetic_tokens": "runner.data.datasets.synthetic_tokens.synthetic_tokens",
}


def _call(path: str, arguments: Mapping[str, Any]) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)(**arguments)


def model(job: Job, device: str) -> nn.Module:
    """Return the job's model."""
    torch.manual_seed(SEED)
    return _call(MODELS[job.model], job.model_args).to(device)


def optimizer(net: nn.Module) -> Optimizer:
    """Return the optimizer of all contenders."""
    return AdamW(net.parameters(), lr=1e-3, fused=True)


class Batches:
    """As many batches as there are steps, shuffled anew in each pass.

    They are slices of tensors in memory, without the cost of a DataLoader. The length is for
    Lightning's Trainer, which takes the object as a loader.
    """

    def __init__(self, job: Job, steps: int, device: str) -> None:
        self.job, self.steps, self.device = job, steps, device
        data: TensorDataset = _call(DATA[job.data], job.data_args).train
        self.inputs, self.targets = data.tensors

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(self._endless(), self.steps)

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in count(1):
            generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
            order = torch.randperm(len(self.inputs), generator=generator)
            for chosen in order.split(self.job.batch):
                x, y = self.inputs[chosen], self.targets[chosen]
                if self.device != "cpu":
                    x, y = (t.to(self.device, non_blocking=True) for t in (x, y))
                yield x, y


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy, per token for sequences.

    The function is looked up at each call, because the worker counts steps there.
    """
    if output.dim() == 3:
        output, target = output.flatten(0, 1), target.flatten()
    return nn.functional.cross_entropy(output, target)
