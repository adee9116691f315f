"""The numbers of a mismatch have their closed forms."""

import math

import pytest
import torch

from runner.mismatch import compare_log_probabilities
from runner.mismatch.record import TokenScores
from runner.mismatch.sides import truncate

GENERATOR = torch.Generator().manual_seed(0)


def test_the_numbers_of_two_tokens_by_hand():
    training = torch.tensor([[-1.0, -2.0, -5.0]], dtype=torch.float64)
    serving = torch.tensor([[-1.3, -1.9, -9.0]], dtype=torch.float64)
    record = compare_log_probabilities(training, serving, torch.tensor([[1, 1, 0]]))
    assert record.tokens == 2
    assert record.mean == pytest.approx(0.1)
    assert record.rms == pytest.approx(math.sqrt((0.09 + 0.01) / 2))
    assert record.mean_ratio == pytest.approx((math.exp(0.3) + math.exp(0.1)) / 2)
    assert (record.outside_narrow, record.outside_wide) == (0.5, 0.5)  # exp(-0.1) is 0.905
    assert record.k1 == pytest.approx(-0.1)
    k3 = (math.exp(0.3) - 1.3 + math.exp(-0.1) - 0.9) / 2
    assert record.k3 == record.kl == pytest.approx(k3)
    assert (record.worst, record.worst_place) == (pytest.approx(0.3), (0, 0))
    metrics = record.metrics("policy")
    assert metrics["policy/mean_ratio"] == record.mean_ratio
    assert metrics["policy/quantiles/0.5"] == pytest.approx(0.1)
    assert all(isinstance(value, float) for value in metrics.values())


def test_the_spread_of_sequences_grows_with_their_length():
    noise = 0.01 * torch.randn(4000, 64, generator=GENERATOR, dtype=torch.float64)
    record = compare_log_probabilities(noise, torch.zeros_like(noise))
    for length in (2, 16, 64):
        assert record.sequence_spread[length] == pytest.approx(0.01 * math.sqrt(length), rel=0.05)


def test_estimates_of_the_divergence_are_near_the_exact_one():
    serving = torch.randn(1, 1, 50, generator=GENERATOR, dtype=torch.float64).log_softmax(-1)
    noise = 0.1 * torch.randn(1, 1, 50, generator=GENERATOR, dtype=torch.float64)
    training = (serving + noise).log_softmax(-1)
    drawn = torch.multinomial(serving[0, 0].exp(), 200_000, replacement=True, generator=GENERATOR)
    labels = drawn[None]
    rows = (1, len(drawn), 50)
    scores = TokenScores.of(training.expand(rows), serving.expand(rows), labels)
    record = TokenScores.record([scores])
    exact = (serving.exp() * (serving - training)).sum().item()
    assert record.kl_serving == pytest.approx(exact)
    assert record.k1 == pytest.approx(exact, rel=0.2)
    assert record.k3 == pytest.approx(exact, rel=0.03)
    assert record.kl_training == pytest.approx((training.exp() * (training - serving)).sum().item())


def test_labels_that_do_not_count_and_shorter_batches_are_left_out():
    classes = torch.randn(2, 3, 5, generator=GENERATOR).log_softmax(-1)
    labels = torch.tensor([[1, 2, -100], [-100, 4, 0]])
    one = TokenScores.of(classes, classes + torch.tensor(0.0), labels)
    other = TokenScores.of(classes[:, :2], classes[:, :2].roll(1, -1), labels[:, :2])
    record = TokenScores.record([one, other])
    assert record.tokens == 4 + 3
    assert len(record.worst_place) == 3
    assert record.worst_place[0] >= 2
    assert 0 < record.argmax_flips < 1


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (None, 0.7), (3, 0.9), (None, 1.0)])
def test_truncation_shifts_log_probabilities_by_the_kept_mass(top_k, top_p):
    scores = torch.randn(7, 40, generator=GENERATOR, dtype=torch.float64).log_softmax(-1)
    truncated, kept = truncate(scores, top_k, top_p)
    is_kept = truncated.isfinite()
    assert truncated.exp().sum(-1).numpy() == pytest.approx(1, abs=1e-6)
    bias = (truncated - scores).masked_select(is_kept)
    assert bias.numpy() == pytest.approx((-kept.log())[:, None].expand(7, 40)[is_kept].numpy())
    assert kept.numpy() == pytest.approx(scores.exp().where(is_kept, 0.0).sum(-1).numpy(), abs=1e-6)
    count = is_kept.sum(-1)
    if top_k:
        assert (count <= top_k).all()
    if top_p < 1 and not top_k:
        # One token fewer would not reach the probability.
        least = scores.exp().masked_fill(~is_kept, 2).min(-1).values
        assert (kept >= top_p).all()
        assert (kept - least < top_p).all()
    if top_k is None and top_p == 1:
        assert (count == 40).all()


@pytest.mark.parametrize(
    ("shape", "mask"), [((2, 3), None), ((2, 4), torch.zeros(2, 4)), ((2, 4), torch.ones(2, 3))]
)
def test_log_probabilities_of_other_shapes_are_refused(shape, mask):
    with pytest.raises(ValueError, match=r"of one shape \[B, T\] and a mask"):
        compare_log_probabilities(torch.zeros(2, 4), torch.zeros(shape), mask)


def test_excluded_classes_add_nothing_to_the_divergence():
    logits = torch.randn(2, 3, 6, generator=GENERATOR)
    logits[..., 4] = -math.inf
    labels = torch.zeros(2, 3, dtype=torch.int64)
    record = TokenScores.record([TokenScores.of(logits, logits, labels)])
    assert (record.kl_serving, record.kl_training, record.rms) == (0, 0, 0)
    other = logits.clone()
    other[..., 4] = 0.0
    record = TokenScores.record([TokenScores.of(logits, other, labels)])
    assert record.kl_serving == math.inf  # the training side excludes what serves
    assert 0 < record.kl_training < math.inf
