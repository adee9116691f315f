"""Names of precisions by the dtypes of a step."""

import sys
from importlib import import_module
from subprocess import PIPE

import pytest
import torch
from forked_process import ForkedProcess
from torch import nn

from runner.core.base.errors import Unavailable
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.integrations.training_source import (
    PrecisionRequest,
    numeric_switches,
    step_dtypes,
    substitution_text,
)

FLOAT32 = PrecisionRequest("Trainer()", "32-true")


def watched(weights, autocast, has_scale=False, request=FLOAT32):
    """Dtypes of a step of a small network."""
    # A norm with weights in bfloat16 takes no float16 on a CPU.
    is_mixed_up = (weights, autocast) == (torch.bfloat16, torch.float16)
    norm = nn.Identity() if is_mixed_up else nn.LayerNorm(4)
    net = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2)).to(weights)
    probe = DtypeProbe(net)
    with probe, torch.autocast("cpu", autocast, enabled=autocast is not None):
        net(torch.randn(2, 4, dtype=weights)).sum().backward()
    return step_dtypes(probe.table(), net, has_scale, request)


@pytest.mark.parametrize(
    ("weights", "autocast", "label"),
    [
        (torch.float32, None, "32-true"),
        (torch.float64, None, "64-true"),
        (torch.bfloat16, None, "bf16-true"),
        (torch.float16, None, "16-true"),
        (torch.float32, torch.bfloat16, "bf16-mixed"),
        (torch.float32, torch.float16, "16-mixed"),
        (torch.bfloat16, torch.bfloat16, "bf16-true"),
        (torch.bfloat16, torch.float16, "16-mixed"),
    ],
)
def test_the_label_follows_from_what_was_computed(weights, autocast, label):
    assert watched(weights, autocast).label == label


def test_float16_without_a_loss_scale_is_named():
    request = PrecisionRequest("Trainer(precision='16-mixed')", "16-mixed")
    bare = watched(torch.float32, torch.float16, False, request)
    assert substitution_text(request, bare).startswith("float16 was computed without a loss scale")
    scaled = watched(torch.float32, torch.float16, True, request)
    assert substitution_text(request, scaled) == ""


def test_half_weights_under_another_autocast_are_named():
    request = PrecisionRequest("Trainer(precision='16-mixed')", "16-mixed")
    dtypes = watched(torch.bfloat16, torch.float16, True, request)
    assert "has its weights in bfloat16" in substitution_text(request, dtypes)


@pytest.mark.parametrize("label", ["bf16-mixed", "fp8-mixed"])
def test_what_no_probe_sees_has_the_label_that_was_asked_for(label):
    request = PrecisionRequest("Trainer()", label)
    dtypes = step_dtypes([], nn.Linear(2, 2), False, request)
    assert (dtypes.label, dtypes.is_observed) == (label, False)
    assert substitution_text(request, dtypes) == ""


def test_torchs_switches_are_read_in_both_ways_of_setting_them(clean):
    code = (
        "import torch; from runner.integrations.training_source import numeric_switches as read;"
        "torch.backends.fp32_precision = 'tf32'; print(read()['cuda_matmul_fp32_precision'])"
    )
    # A process of its own: torch has no way back from the new switches to the old ones.
    with ForkedProcess([sys.executable, "-c", code], stdout=PIPE, env=clean, text=True) as process:
        assert process.communicate()[0].strip() == "tf32"
    assert numeric_switches()["cuda_matmul_fp32_precision"] in ("none", "ieee", "tf32")


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("transformers", "transformers", "hf,accelerate"),
        ("lightning", "lightning", "lightning"),
        ("accelerate", "accelerate", "accelerate"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, module, package, extra):
    name = f"runner.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for hidden in ("transformers", "lightning", "accelerate"):
        if hidden == package:
            monkeypatch.setitem(sys.modules, hidden, None)
            for found in [key for key in sys.modules if key.startswith(f"{hidden}.")]:
                monkeypatch.setitem(sys.modules, found, None)
    with pytest.raises(Unavailable) as raised:
        import_module(name)
    assert str(raised.value).startswith(f"{name} needs the package")
    assert f'pip install -e ".[{extra}]"' in str(raised.value)
