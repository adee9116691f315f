"""torchao's float8 training on the hardware's own kernels."""

import warnings

import pytest
import torch
from precision_models import load_or_skip
from torch import nn

from runner.core.loop.step import loss_of, train_step
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.models.gpt import GPT
from runner.precision import registry
from runner.training.tasks.language import Language

CUDA = torch.device("cuda", 0)
NAMES = ("float8-tensorwise", "float8-rowwise", "float8-rowwise-hp")
WEIGHTS = ("float32", "bfloat16")
E4M3 = 2**-4  # the largest relative rounding; tests/precision/test_float8.py


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


def layer(name, **changes):
    precision = load_or_skip(name, CUDA, **changes)
    torch.manual_seed(0)
    made, _ = precision.convert(nn.Linear(256, 128), CUDA)
    return precision, made.to(CUDA)


def passes(precision, made, x, g):
    """Outputs and gradients of inputs, weight and bias, in float32."""
    x = precision.cast(x).clone().requires_grad_()
    made.zero_grad()
    with precision.forward(CUDA):
        out = made(x)
    out.backward(g.to(out.dtype))
    return [t.detach().float() for t in (out, x.grad, made.weight.grad, made.bias.grad)]


def numbers(rows):
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(rows, n, generator=generator).to(CUDA) for n in (256, 128))


@pytest.mark.imitated
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 13, 64, 257])
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_agree_with_the_emulation(name, rows, weights):
    x, g = numbers(rows)
    real, emulated = (
        passes(*layer(name, weights=weights, emulate=emulate), x, g) for emulate in (False, True)
    )
    for a, b in zip(real, emulated, strict=True):
        assert a.isfinite().all()
        # They sum in another order and round to bfloat16 (2**-8), rowwise also between.
        assert (a - b).norm() <= 2**-6 * b.norm()


@pytest.mark.imitated
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_are_as_far_from_bfloat16_as_the_format_says(name):
    x, g = numbers(128)
    exact = registry.load_precision("bf16-mixed")
    torch.manual_seed(0)
    plain = exact.convert(nn.Linear(256, 128))[0].to(CUDA)
    for i, (a, b) in enumerate(
        zip(passes(*layer(name), x, g), passes(exact, plain, x, g), strict=True)
    ):
        error = (a - b).norm() / b.norm()
        assert error < 2 * E4M3, i
        if i == 0:
            assert error > E4M3 / 4


def gpt(name, **changes):
    precision = load_or_skip(name, CUDA, **changes)
    torch.manual_seed(0)
    model, _ = precision.convert(GPT(256, 64, layers=2, heads=4, width=128), CUDA)
    model.to(CUDA)
    driven = [ScheduledOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True))]
    return TrainState(model, precision, Language(), precision.scale(CUDA), driven, CUDA)


def tokens(count):
    made = torch.randint(256, (count, 65), generator=torch.Generator().manual_seed(count))
    return made[:, :-1].to(CUDA), made[:, 1:].to(CUDA)


def losses(state):
    """Of 20 steps, each with a last micro-batch of 3 x 61 rows, which 16 does not divide."""
    odd = tuple(t[:, :61] for t in tokens(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pending = [train_step(state, [tokens(8), odd]) for _ in range(20)]
    return [p.loss.item() for p in pending]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_gpt_trains_as_in_bfloat16_on_an_odd_last_batch(name, weights):
    plain = losses(gpt("bf16-mixed" if weights == "float32" else "bf16-true"))
    ours = losses(gpt(name, weights=weights))
    assert abs(ours[0] - plain[0]) < E4M3 * plain[0]
    assert ours[-1] < 0.9 * ours[0]
    assert abs(ours[-1] - plain[-1]) < 0.1 * plain[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_float8_model_compiles(name):
    torch._dynamo.reset()
    state = gpt(name)
    batch = tokens(3)[0][:, :61], tokens(3)[1][:, :61]
    eager = loss_of(state, *batch)
    eager.backward()
    before = [p.grad.clone() for p in state.trainable_parameters]
    state.model.zero_grad()
    state.model = torch.compile(state.model, fullgraph=True)
    compiled = loss_of(state, *batch)
    compiled.backward()
    assert abs(compiled.item() - eager.item()) < 2**-6 * eager.item()
    for a, p in zip(before, state.trainable_parameters, strict=True):
        assert p.grad.isfinite().all()
        assert (p.grad - a).norm() <= 4 * E4M3 * a.norm()
