import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.data.datasets.signals import signals
from runner.models.complex_mlp import ComplexLinear, ComplexMLP, ModReLU


def widen(model):
    for parameter in model.parameters():
        complex_ = parameter.is_complex()
        parameter.data = parameter.data.to(torch.complex128 if complex_ else torch.float64)
    return model


class Dtypes(TorchDispatchMode):
    """Collects the dtype of every tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


def test_parameters_are_complex64_and_output_is_real():
    model = ComplexMLP([2, 4], 3, hidden=[8])
    dtypes = {p.dtype for n, p in model.named_parameters() if not n.startswith("layers.0.1.")}
    assert dtypes == {torch.complex64}
    for dtype in (torch.float32, torch.complex64):
        output = model(torch.randn(5, 2, 4, dtype=dtype))
        assert (output.shape, output.dtype) == ((5, 3), torch.float32)


def test_imaginary_part_of_the_input_counts():
    model, x = ComplexMLP([4], 3), torch.randn(5, 4, dtype=torch.complex64)
    assert not torch.allclose(model(x), model(x.real))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_everything_is_double_after_the_cast(dtype):
    model = widen(ComplexMLP([4], 3))
    with Dtypes() as dtypes:
        model(torch.randn(5, 4, dtype=dtype)).sum().backward()
    assert dtypes.seen <= {torch.float64, torch.complex128, torch.bool}


def test_modrelu_shrinks_magnitudes_and_keeps_phases():
    z = torch.randn(6, 3, dtype=torch.complex64)
    unit = ModReLU(3)
    torch.testing.assert_close(unit(z), z)
    torch.nn.init.constant_(unit.bias, -0.3)
    torch.testing.assert_close(unit(z).abs(), (z.abs() - 0.3).relu())
    alive = z.abs() > 0.31
    torch.testing.assert_close(unit(z)[alive].angle(), z[alive].angle())


@pytest.mark.parametrize("bias", [-0.5, 0.0, 0.5])
def test_modrelu_at_zero_has_bounded_gradients(bias):
    unit = ModReLU(2)
    torch.nn.init.constant_(unit.bias, bias)
    z = torch.zeros(1, 2, dtype=torch.complex64, requires_grad=True)
    unit(z).real.sum().backward()
    assert z.grad.abs().max() <= 1 / torch.finfo(torch.float32).eps
    assert unit.bias.grad.isfinite().all()


def test_weights_start_circular_with_glorots_variance():
    weight = ComplexLinear(200, 300).weight
    assert weight.abs().square().mean().item() == pytest.approx(2 / 500, rel=0.05)
    assert weight.square().mean().abs().item() < 1e-4


def fit(dtype, steps=40):
    """Full-batch L-BFGS, 20 iterations a step; the validation loss at the end."""
    torch.manual_seed(0)
    model = ComplexMLP([8], 4)
    model = widen(model) if dtype == torch.float64 else model
    (x, y), (vx, vy) = ([t.to(dtype) for t in split.tensors] for split in signals())
    exact = {"history_size": 100, "tolerance_grad": 0, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", **exact)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    with torch.no_grad():
        return (model(vx).double() - vy.double()).square().mean().item()


def test_complex128_ends_orders_of_magnitude_below_complex64():
    single, double = fit(torch.float32), fit(torch.float64)
    assert double < 1e-3 * single
    assert single < 1e-8, "single precision trains too; only its floor is higher"


def test_refuses_empty_widths():
    with pytest.raises(ValueError, match="widths of 1 or more"):
        ComplexMLP([4], 2, hidden=[0])
