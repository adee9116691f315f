"""Show in a notebook's cell how far a command is, its log, folded, and the user's own errors."""

import contextlib
import html
import io
import sysconfig
from collections.abc import Iterator
from functools import partial
from time import monotonic
from typing import Any

from runner.core import RunnerError, terminal

# Seconds between two updates of a cell; a notebook's page would be slow with more of them.
_UPDATE_SECONDS = 0.5
_HIDDEN_FILES = (__file__.removesuffix("output/notebook_log.py"), contextlib.__file__)
"""How the files begin whose frames a notebook does not show: the runner's."""
_LIBRARIES = (*_HIDDEN_FILES, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))


class NotebookLog(io.StringIO):
    """A stream whose text a notebook's cell shows, folded under a line, with a bar above it."""

    def __init__(self) -> None:
        super().__init__()
        self._title = ""
        self._bar = ""
        self._next_at = 0.0
        self._handle: Any = None

    def write(self, text: str) -> int:
        """Append a text."""
        count = super().write(text)
        self.show()
        return count

    def fold_under(self, title: str) -> None:
        """Set the line that the text is folded under, in place of its last one."""
        self._title = title

    def show_bar(self, text: str, percent: float | None = None) -> None:
        """Show a line in place of the one before, beside a bar where a percentage is given."""
        bar = "" if percent is None else f'<progress value="{percent:.0f}" max="100"></progress> '
        self._bar = bar + html.escape(terminal.sanitize(text))
        self.show()

    def show(self, is_last: bool = False) -> None:
        """Show the text and the bar, if the last time is long ago; at last without the bar."""
        text = self.getvalue().strip()
        if not (text or self._bar) or (monotonic() < self._next_at and not is_last):
            return
        from IPython.display import HTML, display

        self._next_at = monotonic() + _UPDATE_SECONDS
        title = html.escape(terminal.sanitize(self._title) or text.rpartition("\n")[2] or "log")
        log = f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>"
        page = HTML(log if is_last else self._bar + log)
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


def _traceback_of_user(error: Exception) -> list[str]:
    """Return what IPython shows for an error: its traceback without the frames of the runner.

    An error of the runner is its message, after the frames of the user's code that it explains.
    """
    from IPython import get_ipython

    tracebacks: Any = get_ipython().InteractiveTB  # pyright: ignore[reportOptionalMemberAccess]
    if not isinstance(error, RunnerError):
        frames = _without_files(error.__traceback__, _HIDDEN_FILES)
        return tracebacks.structured_traceback(type(error), error, frames)
    cause = error.__cause__
    frames = _without_files(cause.__traceback__, _LIBRARIES) if cause else None
    shown = []
    if frames:
        shown = tracebacks.structured_traceback(type(cause), cause, frames, tb_offset=0)
    return [*shown, *RunnerError._render_traceback_(error)]


def _without_files(frames: Any, hidden: tuple[str, ...]) -> Any:
    """Return the frames of a traceback without those of files; None where no other is left."""
    kept = []
    while frames:
        if not frames.tb_frame.f_code.co_filename.startswith(hidden):
            kept.append(frames)
        frames = frames.tb_next
    for frame, following in zip(kept, [*kept[1:], None], strict=False):
        frame.tb_next = following
    return kept[0] if kept else None


@contextlib.contextmanager
def folded_log() -> Iterator[NotebookLog]:
    """Return a context in which a notebook's cell shows stdout as a folded log.

    An error is shown without the frames of the runner; one of the runner has its own way.
    """
    log = NotebookLog()
    if not terminal.in_notebook():
        yield log
        return
    try:
        with contextlib.redirect_stdout(log):
            yield log
    except Exception as error:
        shown = partial(_traceback_of_user, error)
        vars(error)["_render_traceback_"] = shown
        raise
    finally:
        log.show(is_last=True)
