"""train.compile_rounding through the real compiler: compiled numbers round as eager ones do."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.config.schema import RunSpec, TrainSpec
from runner.models.gpt import GPT
from runner.precision import registry
from runner.training.compile import (
    CXX_COMPILERS,
    EAGER_ROUNDING,
    check_compile_options,
    compiled_modules,
    fused_rounding,
    prepare_model,
)
from runner.utils.errors import ConfigError

CPU = torch.device("cpu")
PLAIN = registry.load_precision("32-true")
HAS_COMPILER = any(map(shutil.which, CXX_COMPILERS))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="a C++ compiler is missing")


class Gate(nn.Module):
    """Four pointwise operations, which the compiler fuses into one kernel."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4096, generator=generator).to(dtype))

    def forward(self, x):
        return F.silu(x * self.weight) * self.weight + x


def spec_of(**train):
    return replace(RunSpec(), train=TrainSpec(**train))


def run_gate(dtype, **train):
    """Return the output and the gradient of a Gate, compiled as a run would."""
    model = Gate(dtype)
    prepare_model(spec_of(**train), PLAIN, CPU, model)
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    output = model(x)
    output.sum().backward()
    return output.detach(), model.weight.grad


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore")  # torch's own while it compiles
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.extended)]
)
def test_compiled_elements_equal_the_eager_ones(dtype):
    """In one process and with torch's cache on: each rounding has its own compiled code."""
    from torch._inductor import config

    plain = run_gate(dtype)
    fused = run_gate(dtype, compile=True)
    eager = run_gate(dtype, compile=True, compile_rounding="eager")
    assert not getattr(config, EAGER_ROUNDING)  # an option of that compilation alone
    again = run_gate(dtype, compile=True)
    different = (fused[0] != plain[0]).float().mean()
    assert 0.05 < different < 0.3  # measured: 0.12 of them
    assert torch.equal(eager[0], plain[0])
    assert torch.equal(eager[1], plain[1])
    assert torch.equal(again[0], fused[0])


@pytest.fixture
def options(monkeypatch):
    """What each module is asked to be compiled with."""
    asked = []
    monkeypatch.setattr(nn.Module, "compile", lambda _, **keys: asked.append(keys))
    return asked


@pytest.mark.parametrize("mode", [True, "default", "regional", "max-autotune-no-cudagraphs"])
def test_a_mode_keeps_its_options(options, mode):
    spec = spec_of(compile=mode, compile_rounding="eager")
    prepare_model(spec, PLAIN, CPU, GPT(16, 8, layers=2, heads=2, width=16))
    own = {"max_autotune": True, "coordinate_descent_tuning": True}
    expected = {**(own if mode == "max-autotune-no-cudagraphs" else {}), EAGER_ROUNDING: True}
    assert options == [{"mode": None, "options": expected, "dynamic": False}] * len(options)
    assert len(options) == (2 if mode == "regional" else 1)


def test_fused_asks_for_nothing(options):
    prepare_model(spec_of(compile="max-autotune"), PLAIN, CPU, Gate(torch.float32))
    assert options == [{"mode": "max-autotune", "options": None, "dynamic": False}]


def test_what_held_is_named():
    from torch._inductor import config

    assert fused_rounding(TrainSpec()) == ""
    assert fused_rounding(TrainSpec(compile=True)) == "fused"
    assert fused_rounding(TrainSpec(compile=True, compile_rounding="eager")) == "eager"
    # As TORCHINDUCTOR_EMULATE_PRECISION_CASTS=1 sets it.
    with config.patch({EAGER_ROUNDING: True}):
        assert fused_rounding(TrainSpec(compile=True)) == "eager"


def test_the_modules_that_are_compiled():
    model = GPT(16, 8, layers=2, heads=2, width=16)
    assert compiled_modules(TrainSpec(), model) == set()
    assert compiled_modules(TrainSpec(compile=True), model) == dict(model.named_modules()).keys()
    regional = compiled_modules(TrainSpec(compile="regional"), model)
    assert regional == {n for n, _ in model.named_modules() if n.startswith("blocks.")}


def test_a_tpu_is_refused(monkeypatch):
    monkeypatch.setattr("runner.training.compile.is_tpu", lambda device: True)
    spec = spec_of(compile=True, compile_rounding="eager")
    with pytest.raises(ConfigError, match=r"a TPU has its own. Type train.compile_rounding=fused"):
        check_compile_options(spec, PLAIN, CPU, Gate(torch.float32))
