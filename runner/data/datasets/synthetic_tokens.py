"""Generate token sequences whose best possible loss is known, without files."""

import torch

from runner.core import ConfigError
from runner.data.splits import Splits, first_for_validation, held_out, require_at_least


def synthetic_tokens(
    vocab: int = 64,
    context: int = 64,
    count: int = 1024,
    branches: int = 4,
    val_fraction: float = 0.2,
    seed: int = 0,
) -> Splits:
    """Generate sequences of a random Markov chain that the seed fixes. No files are read.

    Each token is followed by one of `branches` successors of its own, all equally likely, so a
    perfect model reaches a perplexity of exactly `branches` (a loss of ln `branches` nats).

    Args:
        vocab: number of different tokens, at least 2.
        context: T, tokens in a sequence, at least 1.
        count: training and validation sequences together, at least 2.
        branches: successors of each token, from 1 to `vocab`.
        val_fraction: share for validation, between 0 and 1.
        seed: of the data alone; the run's seed does not change them. The global random state is not
            touched.

    Returns:
        Inputs and targets, int64 [N, T] each; the target is the input shifted by one token.

    Raises:
        ConfigError: a size is too small or too large, or a split would be empty.
    """
    require_at_least("synthetic_tokens", vocab=(vocab, 2), context=(context, 1), count=(count, 2))
    if not 1 <= branches <= vocab:
        raise ConfigError(
            f"data=synthetic_tokens: branches={branches} is not between 1 and vocab={vocab}. "
            f"Type data.branches={min(4, vocab)}."
        )
    val = held_out(count, val_fraction, "synthetic_tokens")
    generator = torch.Generator().manual_seed(seed)
    successors = torch.rand(vocab, vocab, generator=generator).argsort(1)[:, :branches]
    choices = torch.randint(branches, (count, context + 1), generator=generator)
    sequences = torch.empty(count, context + 1, dtype=torch.int64)
    sequences[:, 0] = torch.randint(vocab, (count,), generator=generator)
    for step in range(1, context + 1):
        sequences[:, step] = successors[sequences[:, step - 1], choices[:, step]]
    inputs = sequences[:, :-1].contiguous()
    targets = sequences[:, 1:].contiguous()
    return first_for_validation(inputs, targets, val)
