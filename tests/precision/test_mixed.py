"""Mixed precision: its loss scale, and what it refuses."""

import pytest
import torch
from precision_models import CPU, load_precision
from torch import nn

from runner.core.base.errors import ConfigError
from runner.core.policy.loss_scale import LossScale
from runner.precision.dynamic_loss_scale import DynamicLossScale


def test_float16_has_a_live_scale_and_bfloat16_has_none():
    scale = load_precision("16-mixed").scale(CPU)
    assert isinstance(scale, DynamicLossScale)
    assert scale.value.item() == 65536.0
    assert scale.growth == (2.0, 0.5, 2000)
    assert type(load_precision("bf16-mixed").scale(CPU)) is LossScale
    assert type(load_precision("16-mixed", loss_scale=None).scale(CPU)) is LossScale
    fixed = load_precision("16-mixed", loss_scale={"fixed": 128.0}).scale(CPU)
    assert (fixed.value.item(), fixed.is_fixed) == (128.0, True)


@pytest.mark.parametrize(
    ("name", "instead"), [("16-mixed", "16-true"), ("bf16-mixed", "bf16-true")]
)
def test_half_parameters_are_refused_by_name(name, instead):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half(), nn.Linear(2, 2).bfloat16())
    with pytest.raises(ConfigError) as error:
        load_precision(name).convert(model)
    assert "half ones: 1.weight, 1.bias, 2.weight and 1 more." in str(error.value)
    assert f"precision={instead}" in str(error.value)


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed", "bnb-nf4", "float8-rowwise"])
def test_inputs_under_autocast_are_float32(name):
    precision = load_precision(name)
    cast = precision.cast({"x": torch.ones(2, dtype=torch.float64), "n": torch.ones(2).long()})
    assert (cast["x"].dtype, cast["n"].dtype) == (torch.float32, torch.int64)
    assert precision.cast(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32
    for dtype in (torch.float32, torch.int64, torch.complex64):
        tensor = torch.ones(2, dtype=dtype)
        assert precision.cast(tensor) is tensor
    with precision.forward(CPU):
        nn.Linear(2, 2)(precision.cast(torch.ones(1, 2, dtype=torch.float64)))
