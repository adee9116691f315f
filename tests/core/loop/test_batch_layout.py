"""Batches of every layout are split into inputs and target, and reach the model as they should."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from runner.core.base.errors import ConfigError
from runner.core.loop.batch_layout import BatchLayout, KeywordInputs, PositionalInputs
from runner.core.loop.model_call import call_model, describe_call
from runner.data.loader import Loader, LoaderOptions
from runner.precision.casting import cast_nest

X = torch.arange(6.0).reshape(3, 2)
Y = torch.arange(3)


@pytest.mark.parametrize(
    ("layout", "batch", "inputs"),
    [
        (BatchLayout(), (X, Y), X),
        (BatchLayout(), [[X, X], Y], [X, X]),
        (BatchLayout(), (X, X, Y), PositionalInputs([X, X])),
        (BatchLayout(inputs=("a", "b")), (X, X, Y), KeywordInputs(a=X, b=X)),
        (BatchLayout(inputs=("a",)), (X, Y), KeywordInputs(a=X)),
        (BatchLayout(), {"a": X, "labels": Y}, KeywordInputs(a=X)),
        (BatchLayout(target="y"), {"a": X, "y": Y, "b": X}, KeywordInputs(a=X, b=X)),
        (BatchLayout(inputs=("b",)), {"a": X, "target": Y, "b": X}, KeywordInputs(b=X)),
        (BatchLayout(passes_target=True), {"a": X, "labels": Y}, KeywordInputs(a=X, labels=Y)),
        (BatchLayout(passes_target=True), (X, Y), PositionalInputs([X, Y])),
    ],
)
def test_a_batch_is_split_into_inputs_and_target(layout, batch, inputs):
    found, target = layout.split(batch)
    assert target is Y
    assert type(found) is type(inputs)
    same = found is inputs if torch.is_tensor(inputs) else [*found] == [*inputs]
    assert same


@pytest.mark.parametrize(
    ("layout", "batch", "said"),
    [
        (BatchLayout(), {"a": X, "b": Y}, "has the fields a, b; a field of labels is not among"),
        (BatchLayout(target="y"), {"a": X}, r"task\.target=y is not among them"),
        (BatchLayout(inputs=("c",)), {"a": X, "label": Y}, r"Type task\.inputs=\[a\]"),
        (BatchLayout(inputs=("a", "b")), (X, Y), r"names 2 inputs, and a batch has 1 before"),
        (BatchLayout(), X, "a batch is a Tensor. Yield"),
        (BatchLayout(), (X,), "a batch is a tuple. Yield"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(layout, batch, said):
    with pytest.raises(ConfigError, match=said):
        layout.split(batch)


class Named(nn.Module):
    def forward(self, a, b=None, **more):
        return a, b, more


class Whole(nn.Module):
    def forward(self, inputs):
        return inputs


class AnyKeyword(nn.Module):
    def forward(self, **inputs):
        return inputs


@pytest.mark.parametrize(
    ("model", "inputs", "output", "said"),
    [
        (Whole(), 1, 1, ""),
        (Whole(), [1, 2], [1, 2], ""),
        (Named(), PositionalInputs([1, 2]), (1, 2, {}), "2 inputs of a batch go to Named.forward"),
        (Named(), KeywordInputs(b=1, a=2), (2, 1, {}), "b, a of a batch go to Named.forward"),
        (Named(), KeywordInputs(a=1, id=2), (1, None, {}), "not taken by it: id"),
        (Named(), {"a": 1, "id": 2}, (1, None, {"id": 2}), "a, id of a batch go to Named"),
        (AnyKeyword(), KeywordInputs(x=1), {"x": 1}, "x of a batch go to AnyKeyword.forward"),
        (Whole(), KeywordInputs(x=1), {"x": 1}, "go to Whole.forward as one dict: x"),
        (Whole(), {"x": 1}, {"x": 1}, "go to Whole.forward as one dict: x"),
    ],
)
def test_inputs_reach_the_model_as_its_forward_takes_them(model, inputs, output, said):
    assert call_model(model, inputs) == output
    assert said in describe_call(model, inputs)
    assert bool(said) == bool(describe_call(model, inputs))


@pytest.mark.parametrize("inputs", [KeywordInputs(a=X, b=Y), PositionalInputs([X, Y])])
def test_casting_and_mapping_keep_the_kind_of_inputs(inputs):
    for result in (cast_nest(inputs, torch.float64), tree_map(torch.Tensor.double, inputs)):
        assert type(result) is type(inputs)
        first = result["a"] if isinstance(result, dict) else result[0]
        assert first.dtype is torch.float64


def test_a_label_that_does_not_count_reaches_the_task_as_that_of_cross_entropy():
    masks = torch.tensor([[0, 255], [1, 255]], dtype=torch.uint8)
    _, target = BatchLayout(ignored_label=255).split((X[:2], masks))
    assert target.tolist() == [[0, -100], [1, -100]]
    assert BatchLayout().split((X[:2], masks))[1] is masks


def test_a_loader_splits_the_tensors_of_a_data_set():
    options = LoaderOptions(layout=BatchLayout(inputs=("a", "b")))
    cpu = torch.device("cpu")
    loader = Loader(TensorDataset(X, -X, Y), 2, shuffle=False, seed=0, device=cpu, options=options)
    inputs, target = next(loader.epoch(0))
    assert torch.equal(inputs["b"], -X[:2])
    assert target.tolist() == [0, 1]
