"""Credentials in the URI of a store are shown and stored nowhere."""

import re

# A password may hold @, one of a database also a slash. Quotes end a URI in JSON and YAML. Hydra
# writes a colon as \: in the overrides of a job.
_WEB_USER = re.compile(r"(https?\\*://)[^\s/'\"]*@")
_USER = re.compile(r"(\b(?!https?\\*:)[a-z][a-z0-9+.]*\\*://)(?:[^\s/:'\"]*:[^\s'\"]*|[^\s/'\"]*)@")
_SECRET = re.compile(r"([?&](?:password|passwd|pwd|secret|token)=)[^&\s'\"]+", re.IGNORECASE)


def hide(text: str) -> str:
    """The text without the credentials of the URIs in it: `http://user:secret@host` becomes
    `http://host`, and a database's user and password become ***."""
    if "://" not in text:
        return text
    text = _USER.sub(r"\1***@", _WEB_USER.sub(r"\1", text))
    return _SECRET.sub(r"\1***", text)
