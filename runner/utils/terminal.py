"""Make text safe for a terminal: no credentials, no control characters; quote commands to copy."""

import logging
import re
import shlex
import sys
from collections.abc import Iterable

from runner.utils.secrets import redact, redact_override

# All control characters but tab and newline, those that turn the direction of writing around, and
# halves of characters, which no stream takes.
_STEERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Control characters, and spaces that HTML would collapse.
_ODD = re.compile(rf"{_STEERS.pattern}|(?<= ) |^ | $|[\t\n]")


def sanitize(text: str) -> str:
    """Return a text without credentials, with control characters escaped, as in `\\x1b`."""
    return _STEERS.sub(lambda found: ascii(found[0])[1:-1], redact(text))


def quote_command(words: Iterable[str]) -> str:
    """Return a command to copy, which a shell reads as these words and nothing else. Control
    characters, and spaces that HTML would drop, are escaped as in $'\\u001b' (bash, zsh)."""
    return " ".join(_quoted(redact_override(word)) for word in words)


def _quoted(word: str) -> str:
    if not _ODD.search(word):
        return shlex.quote(word)
    inside = re.sub(r"[\\']", r"\\\g<0>", word)
    return "$'" + _ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", inside) + "'"


def is_text(text: str) -> bool:
    """Return whether a text is valid Unicode; an argument with bytes that are not UTF-8 is not."""
    return not re.search("[\ud800-\udfff]", text)


def one_line(text: str) -> str:
    """Return a text on one line, safe for a terminal."""
    return sanitize(" ".join(text.split()))


def print_error(text: str) -> None:
    """Print a text to stderr, with `error: ` before each line."""
    for line in sanitize(text).splitlines() or [""]:
        print(f"error: {line}", file=sys.stderr, flush=True)


class PlainFormatter(logging.Formatter):
    """A logging formatter whose lines are safe for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize(super().format(record))
