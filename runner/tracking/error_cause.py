"""Shorten a store's error for the user. Its text is often a long chain of connection errors."""

import re

_MAX_CHARACTERS = 400


def short_cause(message: str) -> str:
    """Return the operating system's error in a message, else its first line, without the SQL."""
    found = re.search(r"\[Errno -?\d+\] [\w ]+", message)
    if found:
        return found.group()
    # SQLAlchemy puts the statement and its values on the lines after the first.
    return message.partition("\n")[0][:_MAX_CHARACTERS]
