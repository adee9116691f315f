"""Credentials in the URI of a store are shown and stored nowhere."""

import re

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
    r"([?&][\w.-]*(?:password|passwd|pwd|token|secret|(?<!share)key)\\*=)"
    r"(?:(?<=\\=)(?:\\+.|[^\\&,)\]}])+|(?<!\\=)[^&]+)",
    re.IGNORECASE,
)


def hide(text: str) -> str:
    """The text without the credentials of the URIs in it: `http://user:secret@host` becomes
    `http://host`; a database's user and password become ***, as does a secret in a query."""
    if "://" not in text:
        return text
    text = _USER.sub(r"\1***@", _WEB_USER.sub(r"\1", text))
    return _URI.sub(lambda uri: _SECRET.sub(r"\1***", uri[0]), text)
