"""Where a run speaks."""

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from runner.utils.terminal import sanitize


class PlainConsole(Console):
    """Shows no secret and no character that would steer the terminal, in no table either."""

    def render_str(self, text: str, **how: Any) -> Text:  # type: ignore[override]
        return super().render_str(sanitize(text), **how)


def plain_console() -> Console:
    """As wide as the terminal, 160 columns elsewhere. No markup: rich would swallow the `[head]` of
    precision.keep_fp32=[head]."""
    width = None if sys.stdout.isatty() else 160
    return PlainConsole(highlight=False, markup=False, emoji=False, width=width)
