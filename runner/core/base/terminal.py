"""Make text safe for a terminal: no credentials, no control characters; quote commands to copy;
silence what libraries print."""

import logging
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from runner.core.base.secrets import redact, redact_override

# All control characters except tab and newline, those that reverse the direction of writing, and
# surrogates, which no stream can encode.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Control characters, and spaces that HTML would collapse.
_NEEDS_ESCAPE = re.compile(rf"{_CONTROL.pattern}|(?<= ) |^ | $|[\t\n]")


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    # A process that has not imported IPython runs no cells.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def sanitize(text: str) -> str:
    """Return a text without credentials, with control characters escaped, as in `\\x1b`."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], redact(text))


def quote_command(words: Iterable[str]) -> str:
    """Return a command to copy, which a shell reads as these words and nothing else.

    Control characters, and spaces that HTML would drop, are escaped as in $'\\u001b' (bash, zsh).
    """
    return " ".join(_quoted(redact_override(word)) for word in words)


def _quoted(word: str) -> str:
    if not _NEEDS_ESCAPE.search(word):
        return shlex.quote(word)
    quotable = re.sub(r"[\\']", r"\\\g<0>", word)
    escaped = _NEEDS_ESCAPE.sub(lambda match: f"\\u{ord(match[0]):04x}", quotable)
    return f"$'{escaped}'"


def one_line(text: str) -> str:
    """Return a text on one line, safe for a terminal."""
    return sanitize(" ".join(text.split()))


def print_error(text: str, mark: str = "error: ") -> None:
    """Print a text to stderr, with a mark before each line."""
    for line in sanitize(text).splitlines() or [""]:
        print(f"{mark}{line}", file=sys.stderr, flush=True)


@contextmanager
def suppress_warnings(level: int = logging.WARNING) -> Iterator[None]:
    """Suppress Python warnings, and log records up to a level, within a context."""
    previous_level = logging.root.manager.disable
    # A caller may have disabled more already.
    logging.disable(max(previous_level, level))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
