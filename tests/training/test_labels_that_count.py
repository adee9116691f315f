"""Micro-batches with masked labels and padding train as one large batch does, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_language import GPT2, IGNORED, LONGEST, by_hand, pad, sequences, sets
from run_folders import read_json
from states import make_state, optimizer_gradients
from torch import nn
from torch.nn import functional as F

from runner.core.base.errors import ConfigError
from runner.core.loop.step import train_step
from runner.core.loop.task import Task
from runner.diagnostics.data_checks import labels_of
from runner.modes.replay import _traced
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import Language
from runner.training.tasks.regression import Regression

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def float64_state(model, task):
    return make_state(model, "64-true", task=task)


def step_of(state, micros):
    """Return the loss of a step, and the gradients that its optimizer is given."""
    seen = optimizer_gradients(state)
    return train_step(state, micros).loss, seen


def gradients(model):
    return [p.grad for p in model.parameters()]


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


LENGTHS = st.lists(st.integers(1, LONGEST), min_size=1, max_size=3)
BATCHES = st.lists(LENGTHS, min_size=2, max_size=5)


@settings(max_examples=10, deadline=None)
@given(
    batches=BATCHES,
    shares=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
def test_padded_and_masked_micro_batches_of_gpt2_equal_one_large_batch(batches, shares, seed):
    drawn = zip(batches, shares, strict=False)
    parts = [sequences(lengths, share, seed + len(lengths)) for lengths, share in drawn]
    parts[0][0].counts[0] = True  # else no label may count at all
    whole = GPT2().double()
    wanted = by_hand(whole, *pad([one for part in parts for one in part]))
    loss, found = step_of(float64_state(GPT2(), Language()), [pad(part) for part in parts])
    torch.testing.assert_close(loss, wanted, **CLOSE)
    close(found, gradients(whole))


@settings(max_examples=10, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=2, max_size=5),
    smoothing=st.sampled_from([0.0, 0.2]),
)
def test_masked_classes_with_label_smoothing_equal_one_large_batch(masks, smoothing):
    masks = [[True], *masks]
    generator = torch.Generator().manual_seed(len(masks))
    micros = []
    for mask in masks:
        target = torch.randint(4, (len(mask),), generator=generator)
        target = torch.where(torch.tensor(mask), target, IGNORED)
        micros.append((torch.randn(len(mask), 3, generator=generator), target))
    inputs, target = (torch.cat(part) for part in zip(*micros, strict=True))
    whole = mlp().double()
    counted = target != IGNORED
    wanted = F.cross_entropy(
        whole(inputs.double())[counted], target[counted], reduction="sum", label_smoothing=smoothing
    )
    (wanted / counted.sum()).backward()
    loss, found = step_of(float64_state(mlp(), Classification(smoothing)), micros)
    torch.testing.assert_close(loss, (wanted / counted.sum()).detach(), **CLOSE)
    close(found, gradients(whole))


def test_signals_of_unequal_lengths_weigh_by_elements():
    def net():
        torch.manual_seed(0)
        return nn.Conv1d(2, 2, 3, padding=1)

    micros = [(torch.randn(2, 2, t), torch.randn(2, 2, t)) for t in (4, 9, 5)]
    whole = net().double()
    errors = [(whole(x.double()) - y.double()).square().sum() for x, y in micros]
    wanted = sum(errors) / sum(y.numel() for _, y in micros)
    wanted.backward()
    loss, found = step_of(float64_state(net(), Regression()), micros)
    torch.testing.assert_close(loss, wanted.detach(), **CLOSE)
    close(found, gradients(whole))


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25])


class Weighted(Classification):
    """Cross entropy whose classes have weights, of which the mean is taken."""

    def loss(self, output, target):
        return F.cross_entropy(output, target, weight=WEIGHTS.to(output.dtype))

    def labels(self, target):
        return WEIGHTS.double()[target].sum()


class Examples(Classification):
    """A task that says nothing of labels."""

    labels = Task.labels


@pytest.mark.parametrize("kind", [Weighted, Examples], ids=["by fractions", "by examples"])
def test_a_task_of_ones_own_says_how_micro_batches_weigh(kind):
    inputs, target = torch.randn(8, 3), torch.tensor([0, 0, 0, 1, 1, 2, 3, 1])
    micros = [*zip(inputs.split(3), target.split(3), strict=True)]
    whole, ours = mlp().double(), float64_state(mlp(), kind())
    kind().loss(whole(inputs.double()), target).backward()
    close(step_of(ours, micros)[1], gradients(whole))


@pytest.mark.parametrize(
    ("count", "said"), [(lambda target: target != IGNORED, r"a tensor \[2\]"), (len, "returned 2")]
)
def test_a_count_that_is_no_scalar_tensor_is_refused(count, said):
    task = Classification()
    task.labels = count
    with pytest.raises(ConfigError, match=rf"labels\(\) .*{said}|{said}.*mask\.sum\(\)"):
        labels_of(task, torch.tensor([1, 2]))


@pytest.mark.parametrize("name", ["32-true", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_step_without_a_label_has_no_loss_and_no_gradient(name, micros, smoothing):
    state = make_state(mlp(), name, task=Classification(smoothing))
    batch = torch.randn(4, 3), torch.full((4,), IGNORED)
    loss, found = step_of(state, [batch] * micros)
    assert math.isnan(loss.item())
    assert all((g == 0).all() for g in found)


@pytest.mark.parametrize("task", [Classification(), Language(), Regression()])
def test_counting_reads_nothing_from_the_device(task):
    """A meta tensor raises on any read of its value."""
    target = torch.empty(4, 3, device="meta", dtype=torch.int64)
    assert task.labels(target).shape == ()


def test_a_replay_weighs_by_labels_and_passes_over_micro_batches_without_one():
    state = float64_state(mlp(), Classification())
    inputs = torch.randn(6, 3).double()
    target = torch.tensor([IGNORED, IGNORED, IGNORED, 1, 2, 3])
    micros = [*zip(inputs.split(2), target.split(2), strict=True)]
    found = _traced(state, micros, 1.0)
    assert found.loss == pytest.approx(F.cross_entropy(state.model(inputs), target).item())
    assert not any(row.nonfinite_share for row in found.rows)
    empty = _traced(state, micros[:1], 1.0)
    assert math.isnan(empty.loss)
    assert empty.rows


# Whole runs

OWN = (
    *("~model", "+model._target_=masked_language.GPT2"),
    *("~data", "+data._target_=masked_language.sets", "train.batch_size=3"),
    *("task=language", "tracking=none", "precision=64-true", "scheduler=constant"),
    *("optimizer=sgd", "optimizer.lr=0.1", "train.max_steps=3", "train.log_every=1"),
)


@pytest.fixture
def run_gpt2(main, tmp_path):
    """Run with GPT-2 and masked sequences; the command's outcome and its result."""

    def run(*typed):
        done = main(*OWN, *typed)
        found = [*tmp_path.glob("outputs/runs/*/result.json")]
        return done, read_json(found[0]) if found else {}

    return run


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_validation_is_the_mean_over_the_labels_that_count(run_gpt2, tmp_path, share):
    """With nine of ten labels at -100, and with padding alone."""
    done, result = run_gpt2(f"+data.share={share}", "train.batch_size=13")
    assert done.rc == 0, done.stderr
    (path,) = tmp_path.glob("outputs/runs/*/checkpoints/step-*.pt")
    model = GPT2().double()
    model.load_state_dict(torch.load(path)["model"])
    inputs, target = pad(sets(share=share)[1].sequences)
    assert share == 1.0 or (target == IGNORED).float().mean() > 0.85
    loss = by_hand(model, inputs, target).item()
    assert result["metrics"]["val/loss"] == pytest.approx(loss, rel=1e-12)
    assert result["metrics"]["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)


def test_accumulation_trains_as_larger_batches_do(run_gpt2, tmp_path):
    """The loss of every step, with micro-batches of which some have no label."""
    losses = []
    for sizes in (("train.batch_size=4",), ("train.batch_size=1", "train.accumulate=4")):
        done, result = run_gpt2(*sizes, f"hydra.run.dir=outputs/runs/{len(losses)}")
        assert done.rc == 0, done.stderr
        losses.append(result["metrics"]["val/loss"])
        (tmp_path / f"outputs/runs/{len(losses) - 1}/result.json").unlink()
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_step_without_a_label_is_named(run_gpt2):
    done, _ = run_gpt2("train.batch_size=1", "data.shuffle=false", "guard.data=ignore")
    done.check_refused(
        "guard.non_finite: the loss is nan at step",
        "No label of its 1 samples counts (cross entropy leaves -100 out)",
        status=1,
    )
    assert "Try " not in done.stderr


def test_a_set_without_a_label_is_refused_before_training(run_gpt2):
    done, _ = run_gpt2("+data.share=0")
    said = "data: no label of the {} set that were looked at"
    messages = (said.format(split) for split in ("13 samples of the train", "7 samples of the val"))
    done.check_refused(*messages, "guard.data=warn", status=1)
