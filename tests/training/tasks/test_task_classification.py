import math

import pytest
import torch
from torch.nn import functional as F

from runner.training.tasks.classification import Classification
from runner.utils.errors import ConfigError

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [5.0, 0.0, 0.0]])
TARGET = torch.tensor([0, 1, 2, 1])


def test_batches_of_unequal_size_add_up_to_the_whole():
    task = Classification()
    sums = task.totals(LOGITS[:3], TARGET[:3]) + task.totals(LOGITS[3:], TARGET[3:])
    metrics = task.summarise(sums.tolist())
    assert metrics["val/accuracy"] == 0.75
    assert metrics["val/loss"] == pytest.approx(F.cross_entropy(LOGITS, TARGET).item())


def test_label_smoothing_is_in_the_training_loss_only():
    smooth, plain = Classification(label_smoothing=0.2), Classification()
    expected = F.cross_entropy(LOGITS, TARGET, label_smoothing=0.2)
    assert smooth.loss(LOGITS, TARGET) == expected != plain.loss(LOGITS, TARGET)
    assert torch.equal(smooth.totals(LOGITS, TARGET), plain.totals(LOGITS, TARGET))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loss_keeps_the_dtype_and_totals_are_double(dtype):
    task = Classification()
    assert task.loss(LOGITS.to(dtype), TARGET).dtype == dtype
    assert task.totals(LOGITS.to(dtype), TARGET).dtype == torch.float64


def test_nothing_syncs_with_the_device():
    """A meta tensor raises on any read of its value."""
    logits, target = torch.empty(4, 3, device="meta"), torch.empty(4, dtype=int, device="meta")
    assert Classification().loss(logits, target).device.type == "meta"
    assert Classification().totals(logits, target).shape == (3,)


def test_compared_by_accuracy_and_nan_without_examples():
    assert (Classification.quality, Classification.direction) == ("val/accuracy", "max")
    assert math.isnan(Classification().summarise([0.0, 0.0, 0.0])["val/accuracy"])


@pytest.mark.parametrize(
    ("output", "target"),
    [(LOGITS, TARGET[:3]), (LOGITS, TARGET.float()), (LOGITS[None], TARGET), (LOGITS, LOGITS)],
)
def test_refuses_what_is_not_classification(output, target):
    with pytest.raises(ValueError, match="integer targets"):
        Classification().loss(output, target)
    with pytest.raises(ValueError, match="integer targets"):
        Classification().totals(output, target)


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_refuses_label_smoothing_out_of_range(value):
    with pytest.raises(ConfigError, match=r"task\.label_smoothing=0\.1"):
        Classification(label_smoothing=value)
