import pytest
import torch

from runner.training.tasks.regression import Regression


def test_mean_over_all_elements_of_unequal_batches():
    task, output = Regression(), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])
    target = torch.tensor([[1.0, 1.0], [3.0, 2.0], [5.0, 8.0]])
    sums = task.totals(output[:2], target[:2]) + task.totals(output[2:], target[2:])
    assert task.loss(output, target).item() == 1.0
    assert task.summarise(sums.tolist()) == {"val/loss": 1.0}


def test_double_keeps_errors_below_single_precision():
    output = torch.tensor([[1.0 + 1e-12]], dtype=torch.float64)
    target = torch.ones(1, 1, dtype=torch.float64)
    assert Regression().loss(output, target).item() == pytest.approx(1e-24, rel=1e-3)
    assert Regression().totals(output, target)[0].item() == pytest.approx(1e-24, rel=1e-3)


def test_single_precision_squares_are_added_in_double():
    output, target = torch.full((1, 1), 1e-30), torch.zeros(1, 1)  # the square underflows float32
    assert Regression().totals(output, target)[0].item() == pytest.approx(1e-60, rel=1e-3)


def test_compared_by_loss():
    assert (Regression.quality, Regression.direction) == ("val/loss", "min")


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (torch.zeros(3, 1), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(3, dtype=int)),
        (torch.zeros(3, dtype=torch.complex64), torch.zeros(3)),
    ],
)
def test_refuses_broadcasting_and_other_numbers(output, target):
    with pytest.raises(ValueError, match="one shape"):
        Regression().loss(output, target)
    with pytest.raises(ValueError, match="one shape"):
        Regression().totals(output, target)
