import pytest
import torch

from runner.models.mlp import MLP


def test_shapes_and_module_names():
    model = MLP([1, 8, 8], 10, hidden=[32, 16])
    assert model(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    assert {n.rsplit(".", 1)[0] for n in model.state_dict()} == {"layers.0", "layers.1", "head"}


def test_layers_are_not_linear_together():
    model = MLP([4], 2, hidden=[8])
    x = torch.randn(5, 4)
    assert not torch.allclose(model(x) + model(-x), 2 * model(torch.zeros(5, 4)), atol=1e-3)


def test_no_hidden_layer_is_a_linear_model():
    assert [n for n, _ in MLP([4], 2, hidden=[]).named_parameters()] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("bad", [{"hidden": [0]}, {"classes": 0}, {"input_shape": [0, 3]}])
def test_refuses_empty_widths(bad):
    with pytest.raises(ValueError, match="widths of 1 or more"):
        MLP(**{"input_shape": [4], "classes": 2, "hidden": [8]} | bad)
