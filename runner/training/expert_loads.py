"""Show how a mixture of experts spreads its tokens, at each transfer of the records.

A forward keeps references to what its router chose, which the backward holds anyway; a step pays
nothing else. The loads are computed when a block of records is sent.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.special import entr

MAX_CHOICES = 1024
"""Tokens whose experts are told, of each layer."""


class ExpertLoads:
    """The choices of the routers in the last forward in training mode.

    A layer of experts is a module with an integer `num_experts` that is called as transformers
    calls its own: with the tokens, the numbers of each token's experts, int [N, k], and their
    weights, [N, k].

    Args:
        model: its layers of experts get a hook each, until `close`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._choices: dict[str, tuple[int, Tensor, Tensor]] = {}
        self._handles = [
            module.register_forward_pre_hook(partial(self._keep_choices, name), with_kwargs=True)
            for name, module in model.named_modules()
            if isinstance(getattr(module, "num_experts", None), int)
        ]

    def _keep_choices(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        """Keep what the tokens of a layer chose; a call with other arguments is no such layer's."""
        inputs = (*args, *kwargs.values())
        if not module.training or len(inputs) != 3:
            return
        _, index, weights = inputs
        is_choice = isinstance(index, Tensor) and not index.is_floating_point() and index.ndim == 2
        if is_choice and isinstance(weights, Tensor) and weights.shape == index.shape:
            self._choices[name] = (module.num_experts, index, weights.detach())

    def gauges(self) -> dict[str, Tensor]:
        """Return the metrics experts/* of each layer (metric_names.py), scalars on the device."""
        gauges = {}
        for name, (count, index, weights) in self._choices.items():
            # bincount and one_hot may read their input on the host, which waits for the device.
            numbers = torch.arange(count + 1, device=index.device)
            tokens = torch.searchsorted(index.flatten().sort().values, numbers).diff()
            load = tokens / tokens.sum()
            shares = weights.float() / weights.float().sum(-1, keepdim=True)
            gauges[f"experts/load_max/{name}"] = load.max() * count
            gauges[f"experts/load_entropy/{name}"] = entr(load).sum()
            # A token without any weight has no shares.
            gauges[f"experts/entropy/{name}"] = entr(shares).sum(-1).nanmean()
            gauges[f"experts/idle/{name}"] = (tokens == 0).sum()
            is_dropped = (weights == 0) | (index < 0) | (index >= count)
            gauges[f"experts/dropped/{name}"] = is_dropped.float().mean()
        return gauges

    def choices(self) -> dict[str, list[list[int]]]:
        """Return the sorted numbers of the experts of each token, of MAX_CHOICES at most, by
        layer."""
        return {
            name: index[:MAX_CHOICES].sort(-1).values.tolist()
            for name, (_, index, _) in self._choices.items()
        }

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
