"""Print tables and lines with rich, without secrets and control characters.

Apart from terminal.py, which --help and tab completion import: rich takes too long to import there.
"""

import io
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from runner.utils.terminal import sanitize


class PlainConsole(Console):
    """A rich console that shows no secret and no control character, not in a table either."""

    # rich renders every string here, cells and titles of tables included.
    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        return super().render_str(sanitize(text), **options)

    # rich would end the process, which may be another trainer's, where the reader of stdout ends.
    def on_broken_pipe(self) -> None:
        self.quiet = True


def silent_console() -> Console:
    """Return a console whose output nobody sees."""
    # rich would display it in a notebook.
    return Console(file=io.StringIO(), force_jupyter=False)


def plain_console() -> Console:
    """Return a console on stdout, as wide as the terminal; 160 columns wide in a file or pipe."""
    # Without markup, which would swallow the `[head]` of precision.keep_fp32=[head].
    width = None if sys.stdout.isatty() else 160
    # As text: rich would show each line in a notebook as a block of HTML of its own.
    return PlainConsole(
        highlight=False, markup=False, emoji=False, width=width, force_jupyter=False
    )
