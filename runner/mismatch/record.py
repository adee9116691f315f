"""The numbers of a mismatch: how far the log-probabilities of two sides are apart.

Throughout, d is the log-probability of a token on the side that trains minus that on the side that
serves, and r = exp(d) the importance ratio by which reinforcement learning weighs the token.
docs/mismatch.md has the formulas and their sources.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from runner.core import batch_layout

QUANTILES = (0.5, 0.9, 0.99, 0.999)
NARROW, WIDE = (0.9, 1.1), (0.8, 1.25)
"""Intervals of the importance ratio outside of which tokens are counted."""


@dataclass(frozen=True)
class Mismatch:
    """How far two sides' log-probabilities of the same tokens are apart.

    Attributes:
        tokens: how many tokens, or labels, were compared.
        mean: of d, in nats.
        rms: root of the mean square of d, in nats.
        quantiles: of |d|, in nats, by their probability.
        worst: the d of the largest |d|, in nats.
        worst_place: its row and position, and the token or class where it is known.
        outside_narrow: share of ratios outside [0.9, 1.1].
        outside_wide: share of ratios outside [0.8, 1.25].
        mean_ratio: mean of exp(|d|), 1 for equal sides.
        k1: estimate of KL(serving || training) per token, mean of -d (Schulman 2020).
        k3: the same, mean of r - 1 - d, never negative.
        sequence_spread: standard deviation over sequences of the sum of d over their first n
            tokens, by n: powers of 2, and the longest sequence.
        kl_serving: KL(serving || training) over all classes, in nats; None without logits.
        kl_training: KL(training || serving) likewise.
        argmax_flips: share of tokens whose most probable class is another one; None without logits.
    """

    tokens: int
    mean: float
    rms: float
    quantiles: Mapping[str, float]
    worst: float
    worst_place: tuple[int, ...]
    outside_narrow: float
    outside_wide: float
    mean_ratio: float
    k1: float
    k3: float
    sequence_spread: Mapping[int, float] = field(default_factory=dict)
    kl_serving: float | None = None
    kl_training: float | None = None
    argmax_flips: float | None = None

    @property
    def kl(self) -> float:
        """Return KL(serving || training): exact where the logits are known, else k3."""
        return self.k3 if self.kl_serving is None else self.kl_serving

    def metrics(self, prefix: str = "mismatch") -> dict[str, float]:
        """Return the numbers by the names under which they are logged in each step."""
        values: dict[str, float] = {f"{prefix}/kl": self.kl}
        for name, value in vars(self).items():
            if isinstance(value, Mapping):
                values |= {f"{prefix}/{name}/{key}": number for key, number in value.items()}
            elif isinstance(value, int | float):
                values[f"{prefix}/{name}"] = float(value)
        return values


def compare_log_probabilities(
    training: Tensor, serving: Tensor, mask: Tensor | None = None
) -> Mismatch:
    """Compare the log-probabilities that two sides give to the same tokens.

    For a loop of one's own: log the record's metrics() in each step.

    Args:
        training: log-probabilities in nats, float [B, T], of the side that trains.
        serving: those of the side that serves, or that generated the tokens.
        mask: [B, T], true or 1 for the tokens that count; None for all.

    Raises:
        ValueError: the shapes differ, or no token counts.
    """
    shapes = {tuple(training.shape), tuple(serving.shape)}
    counted = torch.ones_like(training, dtype=torch.bool) if mask is None else mask.bool()
    if shapes != {tuple(counted.shape)} or training.dim() != 2 or not counted.any():
        given = ", ".join(map(str, [*training.shape]))
        raise ValueError(
            f"log-probabilities of one shape [B, T] and a mask with a true value are needed, got "
            f"[{given}], {[*serving.shape]} and a mask of {[*counted.shape]} with "
            f"{int(counted.sum())} true values"
        )
    difference = training.detach().cpu().double() - serving.detach().cpu().double()
    counted = counted.cpu()
    difference = difference.masked_fill(~counted, 0.0)
    d = difference[counted]
    size, ratio = d.abs(), d.exp()
    place = int(difference.abs().masked_fill(~counted, -1.0).argmax())
    levels = torch.tensor(QUANTILES, dtype=d.dtype)
    # torch.quantile takes 16 million elements at most.
    ordered = size.sort().values
    picked = ordered[(levels * (len(d) - 1)).round().long()]
    return Mismatch(
        tokens=len(d),
        mean=d.mean().item(),
        rms=d.square().mean().sqrt().item(),
        quantiles={f"{q:g}": v for q, v in zip(QUANTILES, picked.tolist(), strict=True)},
        worst=difference.flatten()[place].item(),
        worst_place=divmod(place, difference.shape[1]),
        outside_narrow=_outside(ratio, *NARROW),
        outside_wide=_outside(ratio, *WIDE),
        mean_ratio=size.exp().mean().item(),
        k1=-d.mean().item(),
        k3=(d.expm1() - d).mean().item(),
        sequence_spread=_sequence_spread(difference, counted),
    )


def _outside(ratio: Tensor, low: float, high: float) -> float:
    return ((ratio < low) | (ratio > high)).double().mean().item()


def _sequence_spread(difference: Tensor, counted: Tensor) -> dict[int, float]:
    """Return the standard deviation of the sums of d over the first n tokens of sequences."""
    sums = difference.cumsum(1)
    lengths = counted.cumsum(1)
    longest = int(lengths[:, -1].max())
    spread = {}
    for length in [*(2**i for i in range(1, longest.bit_length())), longest]:
        is_end = counted & (lengths == length)
        if int(is_end.sum()) > 1:
            spread[length] = sums[is_end].std().item()
    return spread


class TokenScores(NamedTuple):
    """What two sides say of the tokens of a batch, each [B, T].

    Attributes:
        training: log-probability of the token on the side that trains, in nats.
        serving: on the side that serves.
        labels: the tokens, of which -100 does not count.
        kl_serving: KL(serving || training) over all classes, in nats.
        kl_training: KL(training || serving).
        argmax_flips: whether the most probable class is another one.
    """

    training: Tensor
    serving: Tensor
    labels: Tensor
    kl_serving: Tensor
    kl_training: Tensor
    argmax_flips: Tensor

    @classmethod
    def of(cls, training: Tensor, serving: Tensor, labels: Tensor) -> "TokenScores":
        """Return the scores of a batch.

        Args:
            training: logits, or log-probabilities of all classes, [B, T, C].
            serving: those of the other side.
            labels: int64 [B, T], of which -100 does not count.
        """
        # Row by row: in float32 all logits would take several times their memory.
        rows = [cls._of_row(*row) for row in zip(training, serving, labels, strict=True)]
        return cls(*map(torch.stack, zip(*rows, strict=True)))

    @classmethod
    def _of_row(cls, training: Tensor, serving: Tensor, labels: Tensor) -> "TokenScores":
        index = labels.clamp(min=0).unsqueeze(-1)
        ours, theirs = log_probabilities(training), log_probabilities(serving)
        return cls(
            ours.gather(-1, index).squeeze(-1),
            theirs.gather(-1, index).squeeze(-1),
            labels,
            _divergence(theirs, ours),
            _divergence(ours, theirs),
            ours.argmax(-1) != theirs.argmax(-1),
        )

    @classmethod
    def record(cls, batches: Sequence["TokenScores"]) -> Mismatch:
        """Return the record of several batches.

        Raises:
            ValueError: no label counts.
        """
        width = max(batch.labels.shape[1] for batch in batches)
        ignored = batch_layout.IGNORED_LABEL
        training, serving, labels, *exact = (
            torch.cat([functional.pad(p, (0, width - p.shape[1]), value=ignored) for p in parts])
            for parts in zip(*batches, strict=True)
        )
        counted = labels != ignored
        base = compare_log_probabilities(training, serving, counted)
        kl_serving, kl_training, argmax_flips = (
            part[counted].double().mean().item() for part in exact
        )
        return replace(
            base,
            worst_place=(*base.worst_place, int(labels[base.worst_place])),
            kl_serving=kl_serving,
            kl_training=kl_training,
            argmax_flips=argmax_flips,
        )


def _divergence(scores: Tensor, others: Tensor) -> Tensor:
    """Return KL(p || q) of log-probabilities [..., C]; classes that p excludes add nothing."""
    p, q = scores.exp(), others.exp()
    # The terms q - p, whose sum is 0, make each summand positive: no digits cancel.
    return (torch.where(p > 0, p * (scores - others), 0.0) - p + q).sum(-1)


def widened(logits: Tensor) -> Tensor:
    """Return logits in float32; in float64 where they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log-probabilities in float32, or in float64 of such logits."""
    return widened(logits).log_softmax(-1)
