"""Freeze the parameters that train.freeze names, before a strategy and an optimizer see them."""

from collections.abc import Sequence

from torch import nn

from runner.training.parameter_groups import nearest_names
from runner.utils.errors import ConfigError
from runner.utils.modules import matches_pattern
from runner.utils.tensors import MIB, tensor_bytes


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names, or whose modules' names, match a pattern.

    Args:
        model: converted, with its adapter; changed in place.
        patterns: of dotted names; none freezes nothing.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    named = dict(model.named_parameters())
    had_trainable = any(p.requires_grad for p in named.values())
    problems: list[str] = []
    for pattern in patterns:
        matches = [p for name, p in named.items() if matches_pattern(pattern, name)]
        if not matches:
            problems.append(
                f"train.freeze: {pattern} matches no parameter of the model. Nearest names: "
                f"{nearest_names(pattern, named)}. `*` stands for any part of one segment."
            )
        for p in matches:
            # Codes of packed weights are integers, which never train.
            if p.requires_grad:
                p.requires_grad_(False)
    if problems:
        raise ConfigError(*problems)
    if had_trainable and not any(p.requires_grad for p in named.values()):
        raise ConfigError(
            f"train.freeze=[{','.join(patterns)}] leaves nothing to train: it freezes all "
            f"{len(named)} parameters of the model. Leave out a pattern."
        )


def describe_frozen(model: nn.Module) -> str:
    """Return how many parameters of a model are frozen, and their size."""
    params = [*model.parameters()]
    frozen = [p for p in params if not p.requires_grad]
    size = tensor_bytes(*frozen) / MIB
    return f"frozen: {len(frozen)} of {len(params)} parameters, {size:.1f} MiB"
