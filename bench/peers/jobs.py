"""What every contender trains: the same model, batches and optimizer from the same seed.

Everything here is what a hand-written script would hold. The runner gets the same values as
overrides (runner_.py) and builds the same things from its own config.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

SEED = 0
MODELS = {
    "mlp": "runner.models.mlp.MLP",
    "resnet": "runner.models.resnet.resnet",
    "gpt": "runner.models.gpt.GPT",
}
DATA = {
    "synthetic_images": "runner.data.synthetic_images.synthetic_images",
    "synthetic_tokens": "runner.data.synthetic_tokens.synthetic_tokens",
}


@dataclass(frozen=True)
class Job:
    """One thing to train.

    Attributes:
        name: in the tables.
        model, data: options of the runner's config, and keys of MODELS and DATA.
        model_args, data_args: what their targets are called with.
        batch: examples in a batch.
        steps: in a segment, that is between two readings of the clocks.
        rounds: segments of each contender.
        real: realistic, so that throughput is what matters; else the cost of a step is.
    """

    name: str
    model: str
    model_args: Mapping[str, Any]
    data: str
    data_args: Mapping[str, Any]
    batch: int
    steps: int
    rounds: int
    real: bool = True


def _images(side: int, examples: int) -> dict[str, Any]:
    return {"shape": [3, side, side], "classes": 10, "count": examples}


def _resnet(depth: int, side: int) -> dict[str, Any]:
    return {"depth": depth, "classes": 10, "input_shape": [3, side, side]}


def _gpt(vocab: int, context: int, layers: int, width: int) -> dict[str, Any]:
    return {"vocab_size": vocab, "context": context, "layers": layers, "heads": width // 32,
            "width": width}  # fmt: skip


def _tokens(context: int, examples: int) -> dict[str, Any]:
    return {"vocab": 64, "context": context, "count": examples}


MLP = Job(
    "mlp", "mlp", {"input_shape": [16], "classes": 4, "hidden": [16]},
    "synthetic_images", {"shape": [16], "classes": 4, "count": 640}, 8, 1000, 15, real=False,
)  # fmt: skip
RESNET18 = Job(
    "resnet18", "resnet", _resnet(18, 32), "synthetic_images", _images(32, 320), 4, 20, 7
)
RESNET50 = Job(
    "resnet50", "resnet", _resnet(50, 32), "synthetic_images", _images(32, 320), 4, 20, 5
)
GPT = Job("gpt", "gpt", _gpt(64, 64, 4, 128), "synthetic_tokens", _tokens(64, 320), 4, 20, 9)
JOBS = {job.name: job for job in (MLP, RESNET18, RESNET50, GPT)}
GPU_JOBS = {
    job.name: job
    for job in (
        MLP,
        Job("resnet50", "resnet", _resnet(50, 224),
            "synthetic_images", _images(224, 640), 64, 40, 9),
        Job("gpt124m", "gpt", {**_gpt(50304, 1024, 12, 768), "heads": 12},
            "synthetic_tokens", _tokens(1024, 320), 8, 40, 9),
    )
}  # fmt: skip


def jobs(device: str) -> dict[str, Job]:
    return GPU_JOBS if device == "cuda" else JOBS


def _call(path: str, arguments: Mapping[str, Any]) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)(**arguments)


def model(job: Job, device: str) -> nn.Module:
    torch.manual_seed(SEED)
    return _call(MODELS[job.model], job.model_args).to(device)


def optimizer(net: nn.Module) -> Optimizer:
    return AdamW(net.parameters(), lr=1e-3, fused=True)


class Batches:
    """As many batches as there are steps, shuffled anew in each pass; slices of tensors in memory,
    without the cost of a DataLoader. It has a length, so that the Trainer takes it as a loader."""

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
    """Mean cross entropy, per token for sequences. The name is looked up at each call, because the
    worker counts steps there."""
    if output.dim() == 3:
        output, target = output.flatten(0, 1), target.flatten()
    return nn.functional.cross_entropy(output, target)
