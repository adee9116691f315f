"""Models, data and tasks that fail on a batch, in every precision or in some."""

import torch
from items import Items
from tiny_configs import tiny_config
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchvision.models.swin_transformer import SwinTransformer
from transformers import GPT2LMHeadModel

from runner.core.loop.task import Task
from runner.training.tasks.classification import Classification


def fft(h):
    return torch.fft.irfft(torch.fft.rfft(h), n=64)


def gram(h):
    m = h.view(-1, 8, 8)
    return m @ m.mT + torch.eye(8, dtype=m.dtype)


class Cube(torch.autograd.Function):
    """Its backward has an operation without a kernel in half precision."""

    @staticmethod
    def forward(ctx, x):
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return fft(grad)


def boom(h):
    raise RuntimeError("boom")


OPERATIONS = {
    "inverse": lambda h: torch.linalg.inv(gram(h)).flatten(1),
    "cholesky": lambda h: torch.linalg.cholesky(gram(h)).flatten(1),
    "distances": lambda h: torch.cdist(h, h).mean(1, keepdim=True) + h,
    "mask": lambda h: h * h.masked_fill(h > 5, -1e9).softmax(-1),
    "fft": fft,
    "float": torch.Tensor.float,
    "cube": Cube.apply,
    "numpy": lambda h: h + torch.from_numpy(h.numpy() * 0),
    "detached": lambda h: h + torch.from_numpy(h.detach().numpy() * 0),
    "boom": boom,
    "": lambda h: h,
}
"""Of [N, 64]."""
OUTPUTS = {
    "nothing": lambda y, x: None,
    "pair": lambda y, x: (y, x),
    "positions": lambda y, x: y.unsqueeze(1).expand(-1, 8, -1),
    "cut": lambda y, x: y.detach(),
    "argmax": lambda y, x: F.one_hot(y.argmax(1), 10).float(),
    "top": lambda y, x: y.topk(11),
    "": lambda y, x: y,
}
"""Of logits and inputs."""


class Op(nn.Module):
    """An operation of the table; train_<name> has it in training alone, late_<name> from the
    second training step on."""

    def __init__(self, name):
        super().__init__()
        self.when, _, self.name = name.rpartition("_")
        self.calls = 0

    def forward(self, h):
        self.calls += self.training
        acts = {"": True, "train": self.training, "late": self.training and self.calls > 1}
        return OPERATIONS[self.name](h) if acts[self.when] else h


class Ops(nn.Sequential):
    """The operation is a module between two layers."""

    def __init__(self, op):
        super().__init__()
        self.flat, self.layer = nn.Flatten(), nn.Linear(64, 64)
        self.op, self.head = Op(op), nn.Linear(64, 10)


class Blocks(nn.Module):
    """The operation is a module of each of two blocks."""

    def __init__(self, op):
        super().__init__()
        parts = ({"layer": nn.Linear(64, 64), "op": Op(op)} for _ in range(2))
        self.blocks = nn.ModuleList(map(nn.ModuleDict, parts))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        h = x.flatten(1)
        for block in self.blocks:
            h = block["op"](block["layer"](h))
        return self.head(h)


class Layers(nn.Module):
    """Two layers without a forward."""

    def __init__(self, inside="", after=""):
        super().__init__()
        self.inside, self.after = inside, after
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 10)


class Net(Layers):
    """`inside` names an operation of the forward itself, `after` what becomes of the output."""

    def forward(self, x):
        h = OPERATIONS[self.inside](self.layer(input=x.flatten(1)))
        return OUTPUTS[self.after](self.head(input=h), x)


class Unused(Layers):
    def forward(self, x):
        return x.flatten(1)[:, :10]


class Two(Net):
    def forward(self, a, b):
        return super().forward(a) + b


class NoGrad(Net):
    forward = torch.no_grad()(Net.forward)


class Row(nn.Linear):
    """A model of one layer, whose input is named `a`."""

    def __init__(self, width=8):
        super().__init__(width, width)

    def forward(self, a):
        return super().forward(a)


class Narrow(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(32, 10))


class Spectral(nn.Module):
    """The layer of a Fourier neural operator: [B, C, T] to the same."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.complex64) / 8)

    def forward(self, x):
        modes = torch.einsum("bcf,cof->bof", torch.fft.rfft(x), self.weight)
        return torch.fft.irfft(modes, n=x.shape[-1])


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.spectral, self.head = nn.Conv1d(8, 4, 1), Spectral(), nn.Linear(32, 10)

    def forward(self, x):
        h = self.lift(x.squeeze(1))
        return self.head((h + self.spectral(h)).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.rnn(x.flatten(1, 2))[0][:, -1])


class Built(nn.Module):
    """A model in the dtype of its constructor."""

    def __init__(self, dtype="float32"):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer, self.head = nn.Linear(256, 64), nn.Linear(64, 10)
        self.to(getattr(torch, dtype))

    def forward(self, x):
        return self.head(self.layer(self.norm(self.conv(x)).flatten(1)).relu())


class Swin(SwinTransformer):
    """torchvision's, whose attention reads the weights of its linear layers."""

    def __init__(self):
        super().__init__([2, 2], 16, [1, 1], [1, 2], [4, 4], num_classes=10)

    def forward(self, x):
        return super().forward(F.interpolate(x, size=16).expand(-1, 3, -1, -1))


def gpt():
    """Return a model with transformers' own output."""
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return GPT2LMHeadModel(tiny_config("gpt2", **sizes, use_cache=False))


def collate(pairs):
    images, labels = zip(*pairs, strict=True)
    return {"x": torch.stack(images), "labels": torch.stack(labels)}


def rows(kind):
    """Return data sets of eight examples of some layout."""

    def make(_):
        x = torch.randn(8, 8)
        return {
            "pair": ((x, x), 1),
            "three": (x, x.sum(0)[:1].expand(10), 1),
            "fields": {"a": x, "c": x, "label": 1},
            "target": (x, {"label": 1}),
        }[kind]

    return Items(make, 8), Items(make, 8)


def tensors(kind):
    """Return data sets of eight pairs of some dtypes."""
    x, ids = torch.randn(8, 8, 8), torch.arange(8).repeat(8, 1)
    pixels = ids.repeat(1, 8).to(torch.uint8).view(8, 1, 8, 8)
    pair = {
        "same": (x, x),
        "tokens": (ids, ids),
        "floats": (ids.float(), ids),
        "yes": (ids.float(), ids % 2),
        "pixels": (pixels, ids[0]),
    }[kind]
    return TensorDataset(*pair), TensorDataset(*pair)


class EachLoss(Classification):
    def loss(self, output, target):
        return F.cross_entropy(output, target, reduction="none")


class NumberLoss(Classification):
    def loss(self, output, target):
        return float(F.cross_entropy(output, target))


class CutLoss(Classification):
    def loss(self, output, target):
        return F.cross_entropy(output.data, target)


class NumpyLoss(Classification):
    def loss(self, output, target):
        return super().loss(OPERATIONS["numpy"](output), target)


class Spread(Classification):
    """Of the whole batch: no mean over its examples."""

    def loss(self, output, target):
        return F.cross_entropy(output, target) + output.std(0).mean()


class DictTotals(Classification):
    def totals(self, output, target):
        return {"loss": 1.0}


class Unnamed(Classification):
    quality = "val/f1"


class Aimless(Task):
    def loss(self, output, target):
        return F.cross_entropy(output, target)

    totals = summarise = loss
