"""A small network with low-rank additions."""

import torch
from torch import nn
from torch.nn import functional as F

from runner.core.config.schema import RunSpec
from runner.precision import registry
from runner.training.model import ModelBuilder

CPU = torch.device("cpu")
ADDITIONS = ("lora_A.default.weight", "lora_B.default.weight")


class Net(nn.Module):
    """Two layers, a norm and a head; 64 wide, as a block of 4-bit codes is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 3, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(self.norm(x))


def adapted(model):
    """Names of the layers that hold an addition."""
    ends = f".{ADDITIONS[0]}"
    return [name.removesuffix(ends) for name, _ in model.named_parameters() if name.endswith(ends)]


def shake(model, seed=1):
    """Move everything that trains, as a training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) / 8
                parameter.add_(noise.to(parameter.dtype))


def built(name, node, seed=0):
    """(the model in a precision, the precision, its spec)."""
    torch.manual_seed(seed)
    spec = RunSpec(
        model={"_target_": f"{__name__}.Net"},
        adapter=node,
        scheduler={"_target_": None},
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.1},
    )
    precision = registry.load_precision(name)
    return ModelBuilder(spec, precision).build(CPU).model, precision, spec


def outputs(model, precision, seed=2):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
    with precision.session(model, CPU), precision.forward(CPU):
        return model(precision.cast(x))
