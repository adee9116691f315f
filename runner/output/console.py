"""Print tables and lines with rich, without secrets and control characters.

Apart from terminal.py, which --help and tab completion import: rich takes too long to import there.
"""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from runner.core import terminal
from runner.output.lasting_output import lasting_file

_FILE_COLUMNS = 160
"""Width of tables in a file or pipe."""


class PlainConsole(Console):
    """A rich console that shows no secret and no control character, not in a table either.

    Args:
        options: of rich's Console.
    """

    def __init__(self, **options: Any) -> None:
        # Markup would swallow the `[head]` of precision.keep_fp32=[head]. In a notebook rich would
        # show each line as a block of HTML of its own.
        plain = {"highlight": False, "markup": False, "emoji": False, "force_jupyter": False}
        super().__init__(**plain, **options)

    # rich renders every string here, cells and titles of tables included.
    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        return super().render_str(terminal.sanitize(text), **options)

    # rich would end the process, which may be another trainer's, where the reader of stdout ends.
    def on_broken_pipe(self) -> None:
        self.quiet = True


class JobConsole(PlainConsole):
    """The console of a sweep's job: a log file, and a screen that warnings and the bar go to.

    Args:
        path: of the log file.
        label: returns what stands beside the bar: the job, and how far the sweep is.
        is_trial: it is a trial of mode=advise, whose warnings are in the log file alone.

    Attributes:
        terminal: the console that is seen.
    """

    def __init__(self, path: Path, label: Callable[[], str], is_trial: bool = False) -> None:
        file = lasting_file(path)
        # FORCE_COLOR would put a terminal's control characters into the file.
        super().__init__(file=file, width=_FILE_COLUMNS, force_terminal=False)
        self._path = path
        self.terminal = plain_console()
        self.label = label
        self._seen = () if is_trial else ("warning: ", "resumed at ")

    def print(self, *objects: Any, **options: Any) -> None:
        """Print to the log file; a warning, and where a run resumes, to the screen, too, unless an
        earlier job has."""
        super().print(*objects, **options)
        text = str(*objects[:1])
        if text.startswith(self._seen) and not self._is_known(text):
            self.terminal.print(*objects, **options)

    def _is_known(self, text: str) -> bool:
        """Return whether an earlier job of the sweep has said it, with other numbers perhaps."""
        if not text.startswith("warning: "):
            return False
        logs = self._path.parent.parent.glob(f"*/{self._path.name}")
        others = (log.read_text(errors="replace") for log in logs if log != self._path)
        return any(without_numbers(text) in without_numbers(other) for other in others)

    def close(self) -> None:
        """Close the log file."""
        self.file.close()


def without_numbers(text: str) -> str:
    """Return a text in one line, each number and space in it as one space."""
    return re.sub(r"[\d.,\s]+", " ", text)


def silent_console() -> Console:
    """Return a console whose output nobody sees."""
    # rich would display it in a notebook.
    return Console(file=io.StringIO(), force_jupyter=False)


def plain_console() -> Console:
    """Return a console on stdout, as wide as the terminal; 160 columns wide in a file or pipe."""
    is_terminal = sys.stdout.isatty()
    # A bar's control characters are for a terminal alone, also where FORCE_COLOR is set, as in
    # the processes of a notebook.
    return PlainConsole(width=None if is_terminal else _FILE_COLUMNS, force_terminal=is_terminal)
