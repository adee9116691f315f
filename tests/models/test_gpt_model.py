import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.models.gpt import GPT


def tokens(length=16):
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(0))


def test_logits_for_every_position_and_shorter_sequences():
    model = GPT(64, 16, layers=1, width=32)
    assert model(tokens()).shape == (2, 16, 64)
    assert model(tokens(5)).shape == (2, 5, 64)


def test_no_position_sees_its_future():
    model, before = GPT(64, 16, layers=2, width=32).eval(), tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 64
    changed = (model(before) - model(after)).abs().amax((0, 2))
    assert changed[:9].max() == 0
    assert changed[9:].min() > 0


def test_positions_and_tokens_matter():
    model = GPT(64, 16, layers=1, width=32).eval()
    same = model(torch.full((1, 16), 3))
    assert (same[0, 3] - same[0, 7]).abs().max() > 1e-4


def test_starts_near_the_uniform_loss():
    others = (tokens() + 1) % 64  # not its input: with tied weights a token predicts itself
    loss = F.cross_entropy(GPT(64, 16)(tokens()).flatten(0, 1), others.flatten())
    assert loss.item() == pytest.approx(math.log(64), abs=0.5)


def test_residual_projections_start_smaller():
    model = GPT(64, 16, layers=8, width=128)
    for block in model.blocks:
        for scaled in (block.attention.projection, block.contract):
            assert scaled.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
            assert scaled.bias.abs().max() == 0
        assert block.expand.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_tying_is_a_choice_and_only_plain_layers_hold_parameters():
    tied, free = GPT(64, 16), GPT(64, 16, tie_weights=False)
    assert tied.head.weight is tied.token_embedding.weight
    assert free.head.weight is not free.token_embedding.weight
    owners = {type(m) for m in tied.modules() if list(m.parameters(recurse=False))}
    assert owners == {nn.Linear, nn.LayerNorm, nn.Embedding}


def test_dropout_acts_in_training_only():
    model = GPT(64, 16, layers=1, width=32, dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_refuses_bad_sizes_and_too_long_sequences():
    with pytest.raises(ValueError, match="heads=3"):
        GPT(64, 16, heads=3, width=32)
    with pytest.raises(ValueError, match="17 tokens, but its context is 16"):
        GPT(64, 16, layers=1, width=32)(tokens(17))
