"""What a terminal is given: no credentials, and no character that would steer it."""

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
# And space that a page would not show as it is.
_ODD = re.compile(rf"{_STEERS.pattern}|(?<= ) |^ | $|[\t\n]")


def sanitize(text: str) -> str:
    """The text as it may be shown: what would steer a terminal is written out, as `\\x1b`."""
    return _STEERS.sub(lambda found: ascii(found[0])[1:-1], redact(text))


def quote_command(words: Iterable[str]) -> str:
    """A command to copy: pasted into a shell it is these words and nothing else. What would steer
    the terminal, and space that a page would lose, is written out, as $'\\u001b' (bash, zsh)."""
    return " ".join(_quoted(redact_override(word)) for word in words)


def _quoted(word: str) -> str:
    if not _ODD.search(word):
        return shlex.quote(word)
    inside = re.sub(r"[\\']", r"\\\g<0>", word)
    return "$'" + _ODD.sub(lambda found: f"\\u{ord(found[0]):04x}", inside) + "'"


def is_text(text: str) -> bool:
    """Whether it can be written to a file: a byte of a command that is not UTF-8 cannot."""
    return not re.search("[\ud800-\udfff]", text)


def one_line(text: str) -> str:
    """A name: the same, on one line."""
    return sanitize(" ".join(text.split()))


def print_error(text: str) -> None:
    """An error, each line marked as one."""
    for line in sanitize(text).splitlines() or [""]:
        print(f"error: {line}", file=sys.stderr, flush=True)


class PlainFormatter(logging.Formatter):
    """Of warnings."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize(super().format(record))
