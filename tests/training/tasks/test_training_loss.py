"""task.loss: a loss of torch or of one's own in place of the task's."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_folders import read_json
from states import CPU, make_state, optimizer_gradients
from torch import nn
from torch.nn import functional as F

from runner.core.base.errors import ConfigError
from runner.core.loop.step import train_step
from runner.core.loop.training_loop import evaluation_mode
from runner.data.task_target import build_task
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import CausalLM
from runner.training.tasks.segmentation import Segmentation

CLASS_WEIGHTS = {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1.0, 5.0, 0.5]}
WEIGHTED = {**CLASS_WEIGHTS, "label_smoothing": 0.1}
BATCH = (torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2] * 2))


def classification(loss):
    return build_task({"_target_": Classification.__module__ + ".Classification", "loss": loss})


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def stepped(precision, micros, task):
    state = make_state(net(), precision, task=task)
    seen = optimizer_gradients(state)
    return train_step(state, micros).loss, seen


@pytest.mark.parametrize("precision", ["64-true", "32-true", "16-true", "bf16-mixed"])
def test_class_weights_take_the_dtype_of_the_outputs(precision):
    loss, _ = stepped(precision, [BATCH], classification(WEIGHTED))
    weight = torch.tensor(WEIGHTED["weight"])
    wanted = F.cross_entropy(net()(BATCH[0]), BATCH[1], weight, label_smoothing=0.1)
    torch.testing.assert_close(loss.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_class_weights_fit_a_loss_in_half_precision(precision):
    state = make_state(net(), precision, task=classification(WEIGHTED), autocast_loss=True)
    assert train_step(state, [BATCH]).loss.isfinite()


def test_class_weights_are_counted_without_rounding():
    """Half precision has no number between 10,496 and 10,560, and float16 none above 65,504."""
    task = classification({**WEIGHTED, "weight": [0.1, 5.3, 1.0]})
    state = make_state(net(), "bf16-mixed", task=task, autocast_loss=True)
    train_step(state, [BATCH])
    labels = torch.ones(20_001, dtype=torch.int64)
    assert task.labels(labels).item() == pytest.approx(5.3 * 20_001, rel=1e-6)


def test_micro_batches_weigh_by_the_weights_of_their_labels():
    labels = torch.tensor([0, 1, -100, 2, 2, 0])
    micros = [(BATCH[0][:2], labels[:2]), (BATCH[0][2:], labels[2:])]
    one_loss, one = stepped("64-true", [(BATCH[0], labels)], classification(WEIGHTED))
    loss, parts = stepped("64-true", micros, classification(WEIGHTED))
    torch.testing.assert_close(loss, one_loss, rtol=1e-12, atol=1e-12)
    for part, whole in zip(parts, one, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)


def test_a_path_names_a_class_or_a_function():
    logits = BATCH[0][:, :3]
    expected = F.cross_entropy(logits, BATCH[1])
    for path in ("torch.nn.CrossEntropyLoss", "torch.nn.functional.cross_entropy"):
        assert classification(path).loss(logits, BATCH[1]) == expected
    assert classification("torch.nn.CrossEntropyLoss").labels(torch.tensor([0, -100])) == 1


def test_class_weights_may_be_given_by_position():
    node = {"_target_": WEIGHTED["_target_"], "_args_": [WEIGHTED["weight"]]}
    logits = BATCH[0][:, :3]
    weight = torch.tensor(WEIGHTED["weight"])
    expected = F.cross_entropy(logits, BATCH[1], weight)
    assert classification(node).loss(logits, BATCH[1]) == expected


def test_tokens_and_pixels_reach_the_loss_as_torch_takes_them():
    logits = torch.randn(2, 4, 3)
    tokens = torch.tensor([[0, 1, 2, -100], [2, 0, 1, 1]])
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    task = CausalLM(loss=loss)
    assert task.loss(logits, tokens) == loss(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert task.labels(tokens) == 2 + 3 + 1 + 2 + 2
    margin = nn.MultiMarginLoss()  # it knows no label that does not count
    whole = torch.tensor([[0, 1, 2, 1]])
    assert CausalLM(loss=margin).loss(logits[:1], whole) == margin(logits[0, :-1], whole[0, 1:])
    pixels = torch.randint(3, (2, 5, 5))
    assert Segmentation(loss=loss).loss(torch.ones(2, 3, 5, 5), pixels).isfinite()


def test_no_value_is_read_from_the_device():
    task = classification(WEIGHTED)
    logits, labels = torch.empty(4, 3, device="meta"), torch.empty(4, dtype=int, device="meta")
    assert task.labels(labels).device.type == task.loss(logits, labels).device.type == "meta"


def tensor_of_losses(output, target):
    return F.cross_entropy(output, target, reduction="none")


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"tensor_of_losses returned a tensor \[6\].*mean"):
        Classification(loss=tensor_of_losses).loss(BATCH[0], BATCH[1])


def test_val_loss_is_the_training_loss_over_all_labels():
    """Batches of other weights, one of them without a label."""
    labels = torch.tensor([0, 1, -100, -100, 2, 0])
    task, logits = classification(WEIGHTED), BATCH[0][:, :3]
    parts = [slice(0, 2), slice(2, 4), slice(4, 6)]
    sums = sum(task.evaluation_totals(logits[part], labels[part]) for part in parts)
    metrics = task.evaluation_metrics(sums.tolist())
    weight = torch.tensor(WEIGHTED["weight"])
    wanted = F.cross_entropy(logits, labels, weight, label_smoothing=0.1).item()
    assert metrics["val/loss"] == pytest.approx(wanted, rel=1e-6)
    assert metrics["val/plain_loss"] == pytest.approx(F.cross_entropy(logits, labels).item())
    plain = classification(None)
    assert torch.equal(plain.evaluation_totals(logits, labels), plain.totals(logits, labels))


def test_a_run_trains_on_the_loss_and_evaluates_it(quick, main, tmp_path):
    found = []
    for i, words in enumerate(([], ["task.loss={_target_: torch.nn.MultiMarginLoss}"])):
        done = quick("task=classification", "train.max_steps=1", *words, f"hydra.run.dir=run{i}")
        done.check_ok()
        found.append(read_json(tmp_path / f"run{i}" / "result.json"))
    assert found[0]["train_loss"] != found[1]["train_loss"]


CROSS = "_target_: torch.nn.CrossEntropyLoss"
PARTIAL = "{_target_: torch.nn.functional.cross_entropy, _partial_: true, reduction: sum}"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("torch.nn.CrossLoss", "task.loss=torch.nn.CrossLoss does not import"),
        ("torch.pi", "task.loss=torch.pi is a float, not a class or function"),
        ("{weight: [1, 2]}", "Allowed: a dotted path, package.module.Name, or a node"),
        ("{_target_: torch.nn.CrossLoss}", "task.loss._target_=torch.nn.CrossLoss does not import"),
        (f"{{{CROSS}, wieght: [1]}}", "takes no wieght. It takes: weight"),
        (f"{{{CROSS}, weight: 3}}", "weight=3 does not fit. Allowed: a list of numbers, as in ["),
        (f"{{{CROSS}, _args_: [[a]]}}", "task.loss._args_[0]=['a'] does not fit. Allowed: a list"),
        (f"{{{CROSS}, weight: [a]}}", "Allowed: a list of numbers"),
        (f"{{{CROSS}, reduction: sum}}", "task.loss.reduction=sum: the"),
        (f"{{{CROSS}, ignore_index: 255}}", "task.loss.ignore_index=255"),
        (PARTIAL, "reduction of a partial function cannot be seen"),
        ("torch.nn.CTCLoss", "takes (log_probs, targets, input_lengths, target_lengths), and is"),
        ("{_target_: torch.nn.Linear, in_features: 1, out_features: 1}", "has parameters, which"),
    ],
)
def test_a_wrong_loss_is_refused(refusal, loss, message):
    assert message in refusal(f"task.loss={loss}")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("torch.nn.CrossLoss", "task.loss=torch.nn.CrossLoss does not import"),
        (f"{{{CROSS}, weight: [1, 2]}}", "weight tensor should be defined"),
    ],
)
def test_a_run_with_a_wrong_loss_ends_with_the_message(quick, loss, message):
    quick("task=classification", f"task.loss={loss}").check_refused(message)


def test_label_smoothing_belongs_to_the_loss(quick):
    quick("task.label_smoothing=0.1", "task.loss=torch.nn.CrossEntropyLoss").check_refused(
        "task.label_smoothing=0.1 is not part of task.loss"
    )


class Noisy(nn.CrossEntropyLoss):
    """Keeps generators of each library, in a list, too."""

    def __init__(self):
        super().__init__()
        self.own, self.python = torch.Generator(), random.Random(1)
        self.others = [np.random.default_rng(2), np.random.RandomState(3)]
        self.twice = self.own

    def drawn(self):
        return [
            float(torch.rand((), generator=self.own)),
            self.python.random(),
            *(other.uniform() for other in self.others),
        ]


def test_an_evaluation_leaves_the_generators_of_a_loss_as_they_were():
    undisturbed, loss = Noisy(), Noisy()
    task, drawn = Classification(loss=loss), []
    for _ in range(2):
        with evaluation_mode(SimpleNamespace(model=net(), task=task, device=CPU)):
            drawn.append(loss.drawn())
    assert drawn[0] == drawn[1]
    assert loss.drawn() == undisturbed.drawn()
