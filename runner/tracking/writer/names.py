"""Names and values as this MLflow takes them."""

import posixpath
import re
from collections.abc import Mapping
from functools import lru_cache

from mlflow.utils import validation


def truncate(text: str, limit: int) -> str:
    """At most `limit` characters, with a mark where something was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


@lru_cache(maxsize=10_000)
def legal_name(name: str) -> str:
    """The name with each character that this MLflow refuses replaced by an underscore."""
    if not _legal(name):
        name = "".join(char if _legal(f"a{char}a") else "_" for char in name)
    if validation.path_not_unique(name):  # a//b, ./a, /a: names may become files
        name = re.sub(r"^(\.*/)+", "", posixpath.normpath(name)).strip(".") or "_"
    return name[: validation.MAX_ENTITY_KEY_LENGTH]


def _legal(name: str) -> bool:
    return bool(validation.validate_param_and_metric_name(name))


def distinct_names(values: Mapping[str, str]) -> dict[str, str]:
    """Legal names, kept apart where two become equal: a parameter cannot be set twice."""
    named: dict[str, str] = {}
    for key, text in values.items():
        legal = base = legal_name(key)
        number = 2
        while legal in named:
            legal, number = f"{base[:240]}_{number}", number + 1
        named[legal] = text
    return named
