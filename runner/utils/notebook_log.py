"""Show what a command prints in a notebook's cell: how far it is, and the log, folded."""

import html
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from time import monotonic
from typing import Any

from runner.utils.terminal import in_notebook, sanitize

# Seconds between two updates of a cell; a notebook's page would be slow with more of them.
_UPDATE_SECONDS = 0.5


class NotebookLog(io.StringIO):
    """A stream whose text a notebook's cell shows, folded under a line, with a bar above it."""

    def __init__(self) -> None:
        super().__init__()
        self._title = ""
        self._bar = ""
        self._shown_at = 0.0
        self._handle: Any = None

    def write(self, text: str) -> int:
        """Append a text."""
        count = super().write(text)
        self.show()
        return count

    def fold_under(self, title: str) -> None:
        """Set the line that the text is folded under, in place of its last one."""
        self._title = title

    def show_bar(self, percent: float, text: str) -> None:
        """Show a bar in place of the one before."""
        bar = f'<progress value="{percent:.0f}" max="100"></progress>'
        self._bar = f"{bar} {html.escape(sanitize(text))}"
        self.show()

    def show(self, is_last: bool = False) -> None:
        """Show the text and the bar, if the last time is long ago; at last without the bar."""
        text = self.getvalue().strip()
        if not text or (monotonic() - self._shown_at < _UPDATE_SECONDS and not is_last):
            return
        from IPython.display import HTML, display

        self._shown_at = monotonic()
        title = html.escape(sanitize(self._title) or text.splitlines()[-1])
        log = f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>"
        page = HTML(log if is_last else self._bar + log)
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


@contextmanager
def folded_log() -> Iterator[NotebookLog]:
    """Return a context in which a notebook's cell shows stdout as a folded log."""
    log = NotebookLog()
    if not in_notebook():
        yield log
        return
    try:
        with redirect_stdout(log):
            yield log
    finally:
        log.show(is_last=True)
