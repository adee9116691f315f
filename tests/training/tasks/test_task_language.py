import math

import pytest
import torch
from torch.nn import functional as F

from runner.training.tasks.language import Language


def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, 7, generator=generator)
    return logits, torch.randint(7, (4, 5), generator=generator)


def test_every_token_weighs_the_same():
    (logits, tokens), task = batch(), Language()
    sums = task.totals(logits[:1], tokens[:1]) + task.totals(logits[1:], tokens[1:])
    metrics = task.summarise(sums.tolist())
    expected = F.cross_entropy(logits.transpose(1, 2), tokens).item()
    assert task.loss(logits, tokens).item() == pytest.approx(expected)
    assert metrics["val/loss"] == pytest.approx(expected)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(expected))
    assert sums.dtype == torch.float64


@pytest.mark.parametrize(("loss", "expected"), [(1e6, math.inf), (math.inf, math.inf)])
def test_a_diverged_run_has_infinite_perplexity(loss, expected):
    assert Language().summarise([loss, 1.0])["val/perplexity"] == expected


def test_nan_stays_nan():
    assert all(math.isnan(v) for v in Language().summarise([math.nan, 1.0]).values())


def test_double_stays_double():
    logits, tokens = batch()
    assert Language().loss(logits.double(), tokens).dtype == torch.float64


def test_compared_by_loss():
    assert (Language.quality, Language.direction) == ("val/loss", "min")
    assert Language.quality in Language().summarise([1.0, 1.0])


def test_refuses_other_shapes():
    logits, tokens = batch()
    with pytest.raises(ValueError, match="B, T, V"):
        Language().loss(logits, tokens[:, :-1])
    with pytest.raises(ValueError, match="B, T, V"):
        Language().totals(logits[0], tokens[0])
