"""Make names and values legal for the installed MLflow."""

import posixpath
import re
from collections.abc import Mapping
from functools import lru_cache

from mlflow.utils import validation


def truncate(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, with an ellipsis if it was longer."""
    if len(text) <= limit:
        return text
    return text[: limit - 1] + "…"


@lru_cache(maxsize=10_000)
def legal_name(name: str) -> str:
    """Return the name with an underscore for each character that this MLflow refuses."""
    if not _is_legal(name):
        # Each character between two legal ones: some are refused at the ends of a name only.
        name = "".join(char if _is_legal(f"a{char}a") else "_" for char in name)
    # a//b, ./a, /a: MLflow refuses names that are no unique path, because they may become files.
    if validation.path_not_unique(name):
        name = re.sub(r"^(\.*/)+", "", posixpath.normpath(name)).strip(".") or "_"
    return name[: validation.MAX_ENTITY_KEY_LENGTH]


def _is_legal(name: str) -> bool:
    return bool(validation.validate_param_and_metric_name(name))


def distinct_names(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values under legal names; names that become equal get a number."""
    # MLflow refuses a second value for a parameter that is set.
    named: dict[str, str] = {}
    for key, text in values.items():
        legal = base = legal_name(key)
        number = 2
        while legal in named:
            # MLflow's limit is 250 characters; the rest is for the number.
            legal = f"{base[:240]}_{number}"
            number += 1
        named[legal] = text
    return named
