"""Check the values of a precision's keys.

Every check returns sentences with the value that was given and what to type.
"""

from collections.abc import Collection, Mapping

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def choice_problems(key: str, value: object, allowed: Collection[str]) -> list[str]:
    """Return a sentence for a key under precision whose value is none of the allowed ones, in a
    list that is empty where it is one."""
    if value in allowed:
        return []
    return [f"precision.{key}={value} is not known. Allowed: {', '.join(allowed)}."]


def name_problems(name: str, key: str, value: object, built_in: Mapping[str, str]) -> list[str]:
    """Return a sentence for a value under the name of a built-in precision that has another one.

    A built-in name labels results, so it may not stand for another value.

    Args:
        name: of the precision.
        key: under precision.
        value: of the key.
        built_in: the name of the built-in precision of each value.
    """
    correct = built_in.get(value, name) if isinstance(value, str) else name
    if correct == name or name not in built_in.values():
        return []
    return [f"precision.{key}={value} is not what {name} is. Type precision={correct}."]


def switch_problems(**switches: object) -> list[str]:
    """Return a sentence for each key under precision that must be true or false and is neither."""
    return [
        f"precision.{key}={value} is not known. Allowed: true, false."
        for key, value in switches.items()
        if not isinstance(value, bool)
    ]
