"""Every kind of converted linear layer, and the steps that their contracts repeat."""

from collections import OrderedDict

import pytest
import torch
from precision_models import load_precision, run_forward
from torch import nn

# A precision and its options for each kind of layer.
KINDS = {
    "4-bit": ("bnb-nf4", {"compute_dtype": "float32"}),
    "4-bit with nested scales": ("bnb-fp4-dq", {}),
    "int8": ("bnb-int8", {}),
    "int8 that trains": ("bnb-int8-training", {"compute_dtype": "float32"}),
    "float8 by tensor": ("float8-tensorwise", {"weights": "bfloat16"}),
    "float8 by row": ("float8-rowwise", {}),
    "float8 by block": ("torchao-mxfp8", {}),
    "delayed scaling": ("transformer-engine", {}),
    "current scaling": ("transformer-engine-current", {}),
    "norm fused with linear": ("transformer-engine-current", {"fuse": True}),
    "imitated library": ("transformer-engine-block", {"emulate": False}),
    "packed int4": ("int4", {"group_size": 16}),
    "int8 products": ("int8", {}),
    "packed NVFP4": ("nvfp4", {}),
    "rounded to int4": ("qat-int4", {"group_size": 16}),
    "rounded to int8": ("qat-int8", {"compute_dtype": "bfloat16"}),
    "rounded to NVFP4": ("qat-nvfp4", {}),
}
PACKED = (
    "4-bit",
    "4-bit with nested scales",
    "int8",
    "packed int4",
    "int8 products",
    "packed NVFP4",
)
# Layers that round a weight as packing does leave a shared weight alone, as packing does.
ROUNDED = tuple(kind for kind in KINDS if kind.startswith("rounded to "))
UNPACKED = tuple(kind for kind in KINDS if kind not in PACKED)
every_kind = pytest.mark.parametrize("kind", KINDS)
packed_kinds = pytest.mark.parametrize("kind", PACKED)
unpacked_kinds = pytest.mark.parametrize("kind", UNPACKED)
kinds_that_skip_tied_weights = pytest.mark.parametrize("kind", [*PACKED, *ROUNDED])
kinds_that_take_tied_weights = pytest.mark.parametrize("kind", sorted({*UNPACKED} - {*ROUNDED}))

X = torch.linspace(-1, 1, 3 * 96).view(3, 96)


def plain_model(seed=0):
    """Return a model with two linear layers.

    96 is a multiple of 32 and not of 64, where bitsandbytes' own kernel on CPUs is wrong.
    """
    torch.manual_seed(seed)
    parts = {"body": nn.Linear(96, 32), "norm": nn.LayerNorm(32), "head": nn.Linear(32, 32)}
    return nn.Sequential(OrderedDict(parts))


def tied_model():
    """Return a model whose last two layers share their weight."""
    model = plain_model()
    model.add_module("twin", nn.Linear(32, 32))
    model.twin.weight = model.head.weight
    return model


def load(kind, **options):
    name, fixed = KINDS[kind]
    return load_precision(name, **fixed, **options)


def convert(kind, model=None, **options):
    """Return the precision of a kind and a model that it converted."""
    precision = load(kind, **options)
    return precision, precision.convert(plain_model() if model is None else model)[0]


def outputs(precision, model):
    """Return a model's outputs in training and in evaluation, without gradients."""
    with torch.no_grad():
        return [run_forward(precision, model.train(mode), X) for mode in (True, False)]


def assert_same_outputs(first, second):
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def train_step(precision, model):
    """Compute the gradients of one step; return the outputs."""
    output = run_forward(precision, model.train(), X)
    output.float().square().sum().backward()
    return output.detach()
