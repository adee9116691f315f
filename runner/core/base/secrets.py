"""Redact credentials: those in URIs, and the values of keys and variables named like secrets.

Structures (configs, overrides) are masked key by key; patterns serve free text, which has no keys.
"""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

# Quotes end a URI in JSON, YAML and a shell, but a ' where more of the URI follows is part of it;
# within quotes, a shell writes it as '"'"'. Hydra writes \: and \= in the overrides of a job.
_END = r"""'*(?:\\*"|[\s,\])}]|$)"""
_QUOTE = rf"""'(?:\\*"'\\*"')?(?!{_END})"""
_URI = re.compile(rf"""://(?:(?!\\*")[^\s'"]|{_QUOTE})+""")
# A password may hold @, one of a database also a slash.
_WEB_USER = re.compile(rf"""(https?\\*://)(?:[^\s/'"]|{_QUOTE})*@""", re.IGNORECASE)
_USER = re.compile(
    r"(\b(?!https?\\*:)[a-z][a-z0-9+.]*\\*://)"
    rf"""(?:(?:[^\s/:'"]|{_QUOTE})*:(?:[^\s'"]|{_QUOTE})*|(?:[^\s/'"]|{_QUOTE})*)@""",
    re.IGNORECASE,
)
# MLflow's own viewStateShareKey is none. Behind \= there are no quotes: the value ends as Hydra's.
_SECRET = re.compile(
    r"([?&](?:[\w.-]*(?:password|passwd|pwd|token|secret|signature|credential|(?<!share)key(?:id)?)"
    r"|sig)\\*=)"
    r"(?:(?<=\\=)(?:\\+.|[^\\&,)\]}])+|(?<!\\=)[^&]+)",
    re.IGNORECASE,
)


# A key of a config: api_key, hf_token, db.password; not num_tokens, pad_token, key.
_KEY = (
    r"(?:[\w./@-]*[._@/-])?(?:password|passwd|passphrase|secret|credentials?|(?:api|access|secret"
    r"|private)_?key|(?<!pad_)(?<!eos_)(?<!end_)(?<!bos_)(?<!unk_)(?<!cls_)(?<!sep_)(?<!mask_)token)"
)
_NAMED = re.compile(_KEY, re.IGNORECASE)
_TYPED = re.compile(
    rf"""((?<![?&\w./@-]){_KEY}=)(?!\*\*\*|<value>)('[^']*'|"[^"]*"|[^\s'",)\]}}]+)""",
    re.IGNORECASE,
)
_INNER = re.compile(rf"([{{,]\s*['\"]?{_KEY}['\"]?\s*:\s*)('[^']*'|[^,}}]+)", re.IGNORECASE)
_OVERRIDE = re.compile(r"[+~]{0,2}([\w./@-]+)=")
_VARIABLE = re.compile(
    r".*(_TOKEN|_PASSWORD|_PASSWD|_SECRET\w*|_KEY|_KEY_ID|_CREDENTIALS?)|SECRET\w*|TOKEN|PASSWORD"
)
_MIN_SECRET_CHARS = 8
"""Characters from which on an environment variable's value is masked in any text."""


def redact(text: str) -> str:
    """Return a text without credentials.

    `http://user:secret@host` becomes `http://host`. *** takes the place of a database's user and
    password, of a secret in a query, of the value of `<key>=` if the key is named like a secret,
    and of the values of environment variables that are named like secrets.
    """
    for value in _environment_secrets():
        text = text.replace(value, "***")
    text = _TYPED.sub(r"\1***", text)
    if "://" not in text:
        return text
    text = _USER.sub(r"\1***@", _WEB_USER.sub(r"\1", text))
    return _URI.sub(lambda uri: _SECRET.sub(r"\1***", uri[0]), text)


def redact_override(text: str) -> str:
    """Return an override without the value of a secret key; redact any other text."""
    key = _OVERRIDE.match(text)
    if key is None:
        return redact(text)
    if _NAMED.fullmatch(key[1]):
        return f"{key[0]}***"
    return redact(_INNER.sub(r"\1***", text))


def redact_values(value: Any, key: str = "") -> Any:
    """Return plain containers without credentials; texts in a list may be overrides.

    Args:
        value: a container, text, number or None.
        key: that holds it.
    """
    if isinstance(value, Mapping):
        return {name: redact_values(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item, key) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return "***" if _NAMED.fullmatch(key) else redact_override(value)


def _environment_secrets() -> list[str]:
    """Return the secrets of the environment, the longest first, also in their URI-encoded form.

    Short words, numbers and paths do not count: they would be masked where they mean other things.
    """
    # Names are compared first: environ decodes each value that is read.
    named = {name: os.environ[name] for name in os.environ if _names_secret(name)}
    values = set()
    for name, value in named.items():
        is_word = value.isalpha() and name.endswith("_KEY")
        is_short = len(value) < _MIN_SECRET_CHARS
        if is_word or is_short or value.isdecimal():
            continue
        is_path = value[0] in "/~." and Path(value).exists()
        if not is_path:
            values.add(value)
    # A URI has a secret percent-encoded. The longest goes first: it may contain another secret.
    encoded = {quote(value, safe="") for value in values}
    return sorted(values | encoded, key=len, reverse=True)


@cache
def _names_secret(variable: str) -> bool:
    """Return whether an environment variable's name is that of a secret; asked for each text."""
    return _VARIABLE.fullmatch(variable) is not None
