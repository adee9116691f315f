import math

import pytest
import torch

from runner.data.datasets.signals import signals
from runner.data.datasets.synthetic_images import synthetic_images
from runner.data.datasets.synthetic_tokens import synthetic_tokens
from runner.utils.errors import ConfigError


def test_images_have_unit_variance_and_balanced_classes():
    (images, labels), (held, truth) = (
        s.tensors for s in synthetic_images([2, 6, 5], classes=4, count=400)
    )
    assert images.shape == (320, 2, 6, 5)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.std().item() == pytest.approx(1, abs=0.1)
    assert torch.cat([labels, truth]).bincount().tolist() == [100] * 4
    assert len(held) == 80


def test_images_can_be_learned():
    (images, labels), (held, truth) = (s.tensors for s in synthetic_images(count=1000))
    means = torch.stack([images[labels == c].flatten(1).mean(0) for c in range(10)])
    assert (torch.cdist(held.flatten(1), means).argmin(1) == truth).float().mean() > 0.95


def test_tokens_follow_a_chain_with_the_promised_loss():
    (inputs, targets), (held, truth) = (
        s.tensors for s in synthetic_tokens(vocab=16, context=32, count=1000, branches=4)
    )
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs.dtype == targets.dtype == torch.int64
    counts = torch.zeros(16, 16).index_put_((inputs, targets), torch.ones(()), accumulate=True)
    assert (counts > 0).sum(1).tolist() == [4] * 16
    chances = counts / counts.sum(1, keepdim=True)
    loss = -chances[held, truth].log().mean().item()
    assert loss == pytest.approx(math.log(4), abs=0.02)


def test_signals_obey_the_linear_recurrence():
    (given, following), _ = (s.tensors for s in signals())
    assert given.dtype == following.dtype == torch.float64
    assert given.shape == (288, 8)
    solution = torch.linalg.lstsq(given[:144], following[:144], driver="gelsd").solution
    assert (given[144:] @ solution - following[144:]).abs().max() < 1e-10
    assert following.std().item() == pytest.approx(0.8, abs=0.3)


@pytest.mark.parametrize("make", [synthetic_images, synthetic_tokens, signals])
def test_the_seed_moves_the_data(make):
    zero, one = (make(count=64, seed=s).train.tensors[0] for s in (0, 1))
    assert not torch.equal(zero, one)


@pytest.mark.parametrize(
    ("make", "keywords", "message"),
    [
        (synthetic_images, {"classes": 1}, r"data\.classes=2 or more"),
        (synthetic_images, {"val_fraction": 0}, r"data\.val_fraction="),
        (synthetic_tokens, {"branches": 65}, r"data\.branches=4"),
        (synthetic_tokens, {"context": 0}, r"data\.context=1 or more"),
        (signals, {"window": 5}, r"data\.window=6 or more"),
    ],
)
def test_refuses_bad_sizes(make, keywords, message):
    with pytest.raises(ConfigError, match=message):
        make(**keywords)
