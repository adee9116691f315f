"""Losses and metrics of the built-in tasks, by hand and by torch's functions."""

import math

import pytest
import torch
from torch.nn import functional as F

from runner.core.base.errors import ConfigError
from runner.training.tasks.classification import Binary, Classification
from runner.training.tasks.language import Language
from runner.training.tasks.regression import Regression

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [5.0, 0.0, 0.0]])
TARGET = torch.tensor([0, 1, 2, 1])
GENERATOR = torch.Generator().manual_seed(0)
TEXT = torch.randn(4, 5, 7, generator=GENERATOR)
TOKENS = torch.randint(7, (4, 5), generator=GENERATOR)
NUMBERS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])
WANTED = torch.tensor([[1.0, 1.0], [3.0, 2.0], [5.0, 8.0]])
LOSS = ("val/loss", "min")
QUALITIES = {
    Classification: ("val/accuracy", "max"),
    Binary: LOSS,
    Language: LOSS,
    Regression: LOSS,
}
YES_OR_NO = torch.tensor([[1, 0, 0], [1, 1, 0], [-100, 1, 1], [0, 1, -100]])
COUNTED = YES_OR_NO != -100
BINARY_ENTROPY = F.binary_cross_entropy_with_logits(LOGITS[COUNTED], YES_OR_NO[COUNTED].float())
WAVES = torch.complex(NUMBERS, 2 * NUMBERS)


ENTROPY, TEXT_ENTROPY = F.cross_entropy(LOGITS, TARGET), F.cross_entropy(TEXT.mT, TOKENS)


@pytest.mark.parametrize(
    ("kind", "output", "target", "loss", "further"),
    [
        (Classification, LOGITS, TARGET, ENTROPY, {"val/accuracy": 0.75}),
        (Language, TEXT, TOKENS, TEXT_ENTROPY, {"val/perplexity": TEXT_ENTROPY.exp().item()}),
        (Regression, NUMBERS, WANTED, torch.tensor(1.0), {}),
        (Regression, WAVES, WANTED + 0j, (WAVES - WANTED).abs().square().mean(), {}),
        (Binary, LOGITS, YES_OR_NO, BINARY_ENTROPY, {"val/accuracy": 0.6}),
        (Binary, LOGITS, YES_OR_NO.float(), BINARY_ENTROPY, {"val/accuracy": 0.6}),
    ],
)
def test_batches_of_unequal_size_add_up_to_the_whole(kind, output, target, loss, further):
    task = kind()
    sums = task.totals(output[:1], target[:1]) + task.totals(output[1:], target[1:])
    assert task.summarise(sums.tolist()) == pytest.approx({"val/loss": loss.item(), **further})
    assert task.loss(output, target).item() == pytest.approx(loss.item())
    assert (task.quality, task.direction) == QUALITIES[kind]
    assert math.isnan(task.summarise([0.0] * len(sums))[task.quality])  # without examples


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loss_keeps_the_dtype_and_totals_are_double(dtype):
    for task, output, target in ((Classification(), LOGITS, TARGET), (Language(), TEXT, TOKENS)):
        assert task.loss(output.to(dtype), target).dtype == dtype
        assert task.totals(output.to(dtype), target).dtype == torch.float64


def test_nothing_syncs_with_the_device():
    """A meta tensor raises on any read of its value."""
    logits, target = torch.empty(4, 3, device="meta"), torch.empty(4, dtype=int, device="meta")
    assert Classification().loss(logits, target).device.type == "meta"
    assert Classification().totals(logits, target).shape == (3,)


NOT_CLASSES = "integer targets"
OTHER_SHAPES = "B, T, V"
NO_NUMBERS = "one shape"


@pytest.mark.parametrize(
    ("task", "output", "target", "message"),
    [
        (Classification(), LOGITS, TARGET[:3], NOT_CLASSES),
        (Classification(), LOGITS, TARGET.float(), NOT_CLASSES),
        (Classification(), LOGITS[None], TARGET, NOT_CLASSES),
        (Classification(), LOGITS, LOGITS, NOT_CLASSES),
        (Language(), TEXT, TOKENS[:, :-1], OTHER_SHAPES),
        (Language(), TEXT[0], TOKENS[0], OTHER_SHAPES),
        (Regression(), torch.zeros(3, 1), torch.zeros(3), NO_NUMBERS),  # no broadcasting
        (Regression(), torch.zeros(3), torch.zeros(3, dtype=int), NO_NUMBERS),
        (Regression(), torch.zeros(3, dtype=torch.complex64), torch.zeros(3), NO_NUMBERS),
    ],
)
def test_other_shapes_and_dtypes_are_refused(task, output, target, message):
    for compute in (task.loss, task.totals):
        with pytest.raises(ValueError, match=message):
            compute(output, target)


def test_label_smoothing_is_in_the_training_loss_only():
    smooth, plain = Classification(label_smoothing=0.2), Classification()
    expected = F.cross_entropy(LOGITS, TARGET, label_smoothing=0.2)
    assert smooth.loss(LOGITS, TARGET) == expected != plain.loss(LOGITS, TARGET)
    assert torch.equal(smooth.totals(LOGITS, TARGET), plain.totals(LOGITS, TARGET))
    for value in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=r"task\.label_smoothing=0\.1"):
            Classification(label_smoothing=value)


@pytest.mark.parametrize("loss", [1e6, math.inf])
def test_a_diverged_run_has_infinite_perplexity(loss):
    assert Language().summarise([loss, 1.0])["val/perplexity"] == math.inf
    assert all(math.isnan(v) for v in Language().summarise([math.nan, 1.0]).values())


def test_squared_errors_below_single_precision_are_kept():
    one, above = (torch.full((1, 1), v, dtype=torch.float64) for v in (1.0, 1.0 + 1e-12))
    assert Regression().loss(above, one).item() == pytest.approx(1e-24, rel=1e-3)
    assert Regression().totals(above, one)[0].item() == pytest.approx(1e-24, rel=1e-3)
    tiny = torch.full((1, 1), 1e-30)  # its square underflows float32
    assert Regression().totals(tiny, 0 * tiny)[0].item() == pytest.approx(1e-60, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_error_of_complex_numbers_is_their_squared_distance(dtype):
    output = torch.tensor([3 + 4j, 1j], dtype=dtype, requires_grad=True)
    target = torch.zeros(2, dtype=dtype)
    loss = Regression().loss(output, target)
    assert loss.item() == pytest.approx((25 + 1) / 2)
    loss.backward()
    assert output.grad.tolist() == [3 + 4j, 1j]  # d|z|^2 = 2 z, over two numbers
    assert Regression().totals(output, target).tolist() == [26, 2]


def test_one_answer_for_each_example_has_one_logit_for_each():
    column, labels = LOGITS[:, :1], torch.tensor([1, 0, -100, 1])
    assert Binary().loss(column, labels) == Binary().loss(column[:, 0], labels)
    predictions, answers = Binary().metric_inputs(column, labels)
    assert answers.tolist() == [1, 0, 1]
    torch.testing.assert_close(predictions, LOGITS[[0, 1, 3], 0].sigmoid())
    with pytest.raises(ConfigError, match=r"the targets hold 2\. Allowed: 0 or 1"):
        Binary().check_target(torch.tensor([0, 1, 2]))
    logits = column.clone().requires_grad_()
    loss = Binary().loss(logits, torch.full((4,), -100))
    loss.backward()
    assert loss.isnan()
    assert not logits.grad.any()


@pytest.mark.parametrize("loss", [torch.nn.BCELoss(), torch.nn.functional.binary_cross_entropy])
def test_outputs_are_probabilities_where_the_loss_takes_them(loss):
    probabilities = torch.tensor([0.9, 0.4, 0.2, 1.0, 0.0])
    labels = torch.tensor([1, 0, 1, 1, 0])
    task = Binary(loss=loss)
    metrics = task.evaluation_metrics(task.evaluation_totals(probabilities, labels).tolist())
    assert metrics["val/accuracy"] == pytest.approx(0.8)
    assert metrics["val/plain_loss"] == pytest.approx(metrics["val/loss"], rel=1e-6)
    predictions, _ = task.metric_inputs(probabilities, labels)
    assert torch.allclose(predictions.float(), probabilities)
    assert task.describe_output(probabilities.repeat(2)) == ""


def test_outputs_that_look_like_probabilities_are_warned_of():
    torch.manual_seed(0)
    logits = torch.randn(64) / 3
    assert "task.loss=torch.nn.BCELoss" in Binary().describe_output(logits.sigmoid())
    for others in (logits, logits[:4].sigmoid(), logits.abs().clamp(max=0.3)):
        assert Binary().describe_output(others) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [2, 10, 50_000])
def test_a_softmax_before_the_cross_entropy_is_warned_of(dtype, classes):
    torch.manual_seed(0)
    logits = (3 * torch.randn(8, classes)).to(dtype)
    probabilities = logits.softmax(1)
    assert "leave it out" in Classification().describe_output(probabilities)
    assert "leave it out" in Classification(output="y").describe_output({"y": probabilities})
    one_row = probabilities.clone()
    one_row[0] = logits[0].abs()
    nan = torch.full_like(logits, torch.nan)
    for others in (logits, logits.log_softmax(1), logits.sigmoid(), logits * 0, one_row, nan):
        assert Classification().describe_output(others) == ""
    assert Classification().describe_output((probabilities, probabilities)) == ""
    own = Classification(loss=torch.nn.NLLLoss())
    assert own.describe_output(probabilities) == ""
