"""Detection: losses by name, weighed, and evaluated in training mode."""

from types import SimpleNamespace

import pytest
import torch
from states import CPU
from torch import nn

from runner.core.base.errors import ConfigError
from runner.core.loop.training_loop import evaluation_mode
from runner.training.tasks.detection import Detection
from runner.training.tasks.regression import Regression

LOSSES = {"boxes": torch.tensor(2.0), "classes": torch.tensor([0.5])}


def test_the_losses_are_summed_by_their_weights():
    assert Detection().loss(LOSSES, None)[0] == 2.5
    loss, terms = Detection(loss_weights={"boxes": 0.25}).loss(LOSSES, None)
    assert loss == 1.0
    assert terms == {"boxes": torch.tensor(2.0), "classes": torch.tensor(0.5)}


def test_an_evaluation_is_a_mean_over_images():
    task = Detection()
    totals = task.totals(LOSSES, [{}, {}, {}]) + task.totals({"a": torch.tensor(6.5)}, [{}])
    assert task.summarise(totals.tolist()) == {"val/loss": 3.5}


def test_other_outputs_and_weights_are_refused():
    table = [
        ({}, torch.ones(2), "the model returns a Tensor, and not its losses"),
        ({}, [{"boxes": torch.ones(2, 4)}], "returns a list"),
        ({}, {"scores": torch.ones(2)}, "returns a dict with the keys scores"),
        ({"loss_weights": {"box": 2}}, LOSSES, "names box, and the model returns boxes, classes"),
    ]
    for keywords, output, said in table:
        with pytest.raises(ConfigError, match=said):
            Detection(**keywords).loss(output, None)
    with pytest.raises(ConfigError, match=r"loss_weights\.boxes=x does not fit"):
        Detection(loss_weights={"boxes": "x"})


def test_an_evaluation_is_in_training_mode_but_for_what_changes_the_model_or_draws():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), nn.Identity())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    drawn = []
    for _ in range(2):
        with evaluation_mode(SimpleNamespace(model=model, task=Detection(), device=CPU)):
            assert [m.training for m in model] == [True, False, False, True]
            drawn.append(torch.rand(1))
    assert torch.equal(*drawn)
    assert torch.equal(torch.rand(1), expected)
    with evaluation_mode(SimpleNamespace(model=model, task=Regression(), device=CPU)):
        assert not any(m.training for m in model.modules())
