"""Find the first and last blocks of a model that `precision.keep_blocks` leaves unconverted.

The layers near a network's ends, and most of all its last ones, suffer most from narrow formats.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from runner.utils.errors import ConfigError
from runner.utils.modules import repeated_blocks

PAPER_FIRST = 1
"""Blocks at the start that `paper` keeps. Source: axolotl, `keep_hp_blocks: paper`."""
PAPER_LAST_SHARE = 0.13
"""Share of the blocks, at the end, that `paper` keeps: 8 of 62, as NVIDIA's 12B model in NVFP4.

NVIDIA kept 2 blocks at the start. Source: axolotl, `keep_hp_blocks: paper`, which is
round(0.13 * blocks); NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149,
section 4.1.
"""
KEPT_REASON = "kept by precision.keep_blocks"
_ALLOWED = "null, paper, or two whole numbers from 0, as in [1,2]"


def keep_blocks_problems(value: Any) -> list[str]:
    """Return a sentence where a value of precision.keep_blocks is not allowed; else no sentence."""
    if value is None or value == "paper" or _is_pair(value):
        return []
    return [f"precision.keep_blocks={value} is not known. Allowed: {_ALLOWED}."]


def find_kept_blocks(model: nn.Module, value: Any) -> list[nn.Module]:
    """Return the blocks at a model's start and end that are not converted.

    Args:
        model: unchanged; its repeated blocks are counted in the order in which it holds them.
        value: of precision.keep_blocks: None, "paper", or the numbers of first and last blocks.

    Raises:
        ConfigError: the model has no repeated blocks, or every one of them would be kept.
    """
    if value is None:
        return []
    blocks = repeated_blocks(model)
    typed = f"precision.keep_blocks={_as_typed(value)}"
    if not blocks:
        raise ConfigError(
            f"{typed} counts the repeated blocks of a model, and this one has none: members of one "
            "class, in a ModuleList, ModuleDict or Sequential, that hold modules of their own. "
            "Type precision.ignore_modules=[<module>], and leave precision.keep_blocks out."
        )
    first, last = _block_counts(value, len(blocks))
    if first + last >= len(blocks):
        raise ConfigError(
            f"{typed} keeps the first {first} and the last {last} of the model's {len(blocks)} "
            "repeated blocks, so that no block would be converted. Type two numbers whose sum is "
            f"below {len(blocks)}, or leave precision.keep_blocks out."
        )
    return [*blocks[:first], *blocks[len(blocks) - last :]]


def _is_pair(value: Any) -> bool:
    """Return whether a value is a list of two whole numbers from 0."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return False
    # By its type, because a bool is an int to isinstance.
    return all(type(count) is int and count >= 0 for count in value)


def _block_counts(value: Any, blocks: int) -> tuple[int, int]:
    """Return how many blocks are kept at the start and at the end of a model with `blocks`."""
    if value == "paper":
        # At least one, where the share of a small model rounds to none.
        return PAPER_FIRST, max(1, round(PAPER_LAST_SHARE * blocks))
    first, last = value
    return first, last


def _as_typed(value: Any) -> str:
    return value if isinstance(value, str) else f"[{','.join(map(str, value))}]"
