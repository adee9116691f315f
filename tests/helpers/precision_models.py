"""Precisions as a CPU runs them, and the steps that their tests repeat."""

import io

import pytest
import torch
from torch import nn

from runner.core.base.errors import Unavailable
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.precision import registry
from runner.training.own_state import own_hooks
from runner.training.tasks.classification import Classification

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")
EMULATED = ("tf32", "float8", "torchao-", "transformer-engine")
UNIT = {
    "64-true": 2**-21,
    "32-true": 2**-21,  # float32's 2**-24, summed one after the other
    "bf16-mixed": 2**-8,
    "bf16-true": 2**-8,
    "16-mixed": 2**-11,
    "16-true": 2**-11,
    "bnb-nf4": 0.138,
    "bnb-nf4-dq": 0.138,
    "bnb-fp4": 0.167,
    "bnb-fp4-dq": 0.167,
    "bnb-int8": 1 / 254 + 2**-8,
    "bnb-int8-training": 1 / 254 + 2**-8,  # and bfloat16's
    "float8-tensorwise": 2**-4,
    "float8-rowwise": 2**-4,
    "float8-rowwise-hp": 2**-4,
    "torchao-mxfp8": 2**-4,
    "tf32": 2**-11,
    "transformer-engine": 2**-4,
    "transformer-engine-current": 2**-4,
    "transformer-engine-block": 2**-4,
    "transformer-engine-mxfp8": 2**-4,
    "transformer-engine-float16": 2**-4,
    "transformer-engine-nvfp4": 2**-2,
    "int4": 1 / 15,
    "qat-int4": 1 / 15,
    "int8": 1 / 254,
    "qat-int8": 1 / 254,
    "nvfp4": 2**-2,
    "qat-nvfp4": 2**-2,
}
"""The largest relative rounding error of one number: see tests/precision/test_numerics.py."""
DELAYED_SCALING = ("transformer-engine", "transformer-engine-float16")


def load_precision(name, **options):
    """Return a precision; what a CPU has no hardware for is emulated."""
    if name.startswith(EMULATED):
        options.setdefault("emulate", True)
    return registry.load_precision(name, **options)


def load_or_skip(name, device, **options):
    """Return a precision; skip the test where the device cannot run it."""
    precision = registry.load_precision(name, **options)
    try:
        precision.require(device)
    except Unavailable as error:
        pytest.skip(f"{error.what} {error.remedy}")
    return precision


def precisions_on_cpu():
    """Return the names of the precisions that run here on a CPU, emulated where they must be."""
    return [name for name in registry.precision_names() if _runs_on_cpu(name)]


def _runs_on_cpu(name):
    try:
        load_precision(name).require(CPU)
    except Unavailable:
        return False
    return True


def train_state(precision, model, optimizer=None, task=None):
    """Return the state of a training on the CPU; without an optimizer, of AdamW on what trains."""
    if optimizer is None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=3e-3, eps=1e-4)
    state = TrainState(
        model,
        precision,
        task or Classification(),
        precision.scale(CPU),
        [ScheduledOptimizer(optimizer)],
        CPU,
    )
    state.hooks.add(*own_hooks(state))
    return state


def run_forward(precision, model, inputs):
    """Return a model's outputs in its precision, as a step computes them."""
    torch.manual_seed(1)  # of stochastic rounding
    with precision.session(model, CPU), precision.forward(CPU):
        return model(precision.cast(inputs))


def raise_inside(context):
    """Raise a RuntimeError("inside") within a context."""
    with context:
        raise RuntimeError("inside")


def random_parameters(shapes, dtype):
    """Return parameters of some shapes, with the same normal numbers in every call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_random_gradients(params, step, rounded=None):
    """Give parameters the normal gradients of a step, rounded to a dtype where one is named."""
    generator = torch.Generator().manual_seed(step + 1)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(rounded or p.dtype).to(p.dtype)


def relative_error(found, wanted):
    """Return the norm of the difference of two tensors, relative to that of the second."""
    difference = found.detach().double() - wanted.detach().double()
    return (difference.norm() / wanted.detach().double().norm()).item()


def skip_reasons(report):
    """Return why each module of a report was not converted, by name; empty where it was."""
    return {row.module: row.why for row in report.modules}


def reloaded(state):
    """Return a state dict after it was saved to a file and read."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_tensors(first, second):
    """Check that two state dicts have equal keys, dtypes and bits."""
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert value.dtype is second[key].dtype, key
        assert torch.equal(value, second[key]), key


def pretend_gpu(monkeypatch, capability, name="NVIDIA X"):
    """Make torch report a GPU of a compute capability; none is used."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)


def count_calls(monkeypatch, module):
    """Return a list that grows by one entry with each forward of a module; it has no hook."""
    calls, kind = [], type(module)
    forward = kind.forward

    def counted(self, *args, **keywords):
        if self is module:
            calls.append(1)
        return forward(self, *args, **keywords)

    monkeypatch.setattr(kind, "forward", counted)
    return calls


def values_of_many_magnitudes(*shape, seed=0):
    """Return normal numbers over many powers of ten, with a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    x[:1, :16] = 0
    return x


class ResidualBlock(nn.Module):
    """A residual block, one norm of which goes into one linear layer alone."""

    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.into = nn.LayerNorm(width, eps=1e-3), nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width, bias=False)
        self.norm2, self.gate = nn.LayerNorm(width), nn.Linear(width, width)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x):
        x = x + self.out(torch.relu(self.into(self.norm1(x))))
        normed = self.norm2(x)
        return normed * self.gate(normed)
