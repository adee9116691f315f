"""Shorten a store's error for the user. Its text is often a long chain of connection errors."""

import re


def short_cause(message: str) -> str:
    """Return the operating system's error in a message, else its first line, without the SQL."""
    found = re.search(r"\[Errno -?\d+\] [\w ]+", message)
    return found.group() if found else message.partition("\n")[0][:400]
