import pytest
import torch
from torch import nn

from runner.precision import registry
from runner.precision.loss_scale import DynamicLossScale, NoLossScale
from runner.utils.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIXED = ("16-mixed", "bf16-mixed")


@pytest.mark.parametrize("name", MIXED)
def test_weights_stay_float32_and_the_product_is_half(name):
    precision = registry.load_precision(name)
    model, report = precision.convert(nn.Linear(2, 2))
    with precision.forward(CPU):
        out = model(torch.ones(1, 2))
    assert (model.weight.dtype, out.dtype) == (torch.float32, precision.compute)
    assert report.modules == ()


@pytest.mark.parametrize("name", MIXED)
def test_inputs_are_not_cast_before_autocast(name):
    for dtype in (torch.float32, torch.int64):
        tensor = torch.ones(1, dtype=dtype)
        assert registry.load_precision(name).cast(tensor) is tensor


@pytest.mark.parametrize("name", MIXED)
def test_the_forward_context_serves_again_and_restores(name):
    precision = registry.load_precision(name)
    assert precision.forward(CPU) is precision.forward(CPU)
    for _ in range(2):
        with precision.forward(CPU):
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is precision.compute
        assert not torch.is_autocast_enabled("cpu")


def test_float16_has_a_live_scale_and_bfloat16_has_none():
    scale = registry.load_precision("16-mixed").scale(CPU)
    assert isinstance(scale, DynamicLossScale)
    assert scale.value.item() == 65536.0
    assert (scale.growth_factor, scale.backoff_factor, scale.growth_interval) == (2.0, 0.5, 2000)
    assert isinstance(registry.load_precision("bf16-mixed").scale(CPU), NoLossScale)
    assert isinstance(registry.load_precision("16-mixed", loss_scale=None).scale(CPU), NoLossScale)
    fixed = registry.load_precision("16-mixed", loss_scale={"fixed": 128.0}).scale(CPU)
    assert (fixed.value.item(), fixed.is_fixed) == (128.0, True)


def test_lbfgs_is_refused_where_there_is_a_scale():
    lbfgs = torch.optim.LBFGS([nn.Parameter(torch.ones(1))])
    with pytest.raises(ConfigError, match=r"lbfgs evaluates the loss several times.*32-true"):
        registry.load_precision("16-mixed").check_optimizers([lbfgs])
    registry.load_precision("bf16-mixed").check_optimizers([lbfgs])
    registry.load_precision("16-mixed").check_optimizers(
        [torch.optim.AdamW([nn.Parameter(torch.ones(1))])]
    )


@pytest.mark.parametrize(
    ("name", "instead"), [("16-mixed", "16-true"), ("bf16-mixed", "bf16-true")]
)
def test_half_parameters_are_refused_by_name(name, instead):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half(), nn.Linear(2, 2).bfloat16())
    with pytest.raises(ConfigError) as error:
        registry.load_precision(name).convert(model)
    assert "half ones: 1.weight, 1.bias, 2.weight and 1 more." in str(error.value)
    assert f"precision={instead}" in str(error.value)


@pytest.mark.parametrize("choice", ["native", "float32_accumulate"])
def test_kernels_returns_the_float16_kernels_that_ran(choice):
    precision, model = registry.load_precision("16-mixed", cpu_float16=choice), nn.Linear(2, 2)
    with precision.session(model, CPU):
        assert precision.kernels() == choice
    other = registry.load_precision("bf16-mixed")
    with other.session(model, CPU):
        assert other.kernels() == ""


@pytest.mark.parametrize("name", MIXED)
def test_the_session_governs_the_products_that_autocast_leaves(name):
    precision = registry.load_precision(name, float32_matmul="high", cpu_float16="native")
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with precision.session(nn.Linear(2, 2), CPU):
        assert torch.get_float32_matmul_precision() == "high"
    with registry.load_precision(name).session(nn.Linear(2, 2), CPU):
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed"])
def test_float64_inputs_meet_float32_weights(name):
    precision = registry.load_precision(name)
    batch = {"x": torch.ones(2, dtype=torch.float64), "n": torch.ones(2, dtype=torch.int64)}
    cast = precision.cast(batch)
    assert (cast["x"].dtype, cast["n"].dtype) == (torch.float32, torch.int64)
    half = torch.ones(2, dtype=torch.bfloat16)
    assert precision.cast(half) is half
    with precision.forward(torch.device("cpu")):
        torch.nn.Linear(2, 2)(precision.cast(torch.ones(1, 2, dtype=torch.float64)))
