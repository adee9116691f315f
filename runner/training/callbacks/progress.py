"""Show the progress of a run: a bar on a terminal or in a notebook, else a line per evaluation."""

import html
import sys
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.training.callbacks.callback import Callback
from runner.training.records import EvalRecord, StepRecord, Steps
from runner.utils.formatting import format_number
from runner.utils.terminal import in_notebook, sanitize

NOTEBOOK_SECONDS = 0.5
"""Seconds between two updates of the bar in a notebook."""


class ProgressBar(Callback):
    """A bar over `total` steps, with a line above it for each evaluation."""

    key = "progress"

    def __init__(self, console: Console, total: int, label: str) -> None:
        self.console = console
        self._bar = Progress(
            # A label may hold brackets, as in a list of overrides, which rich would read as markup.
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(label, total=total, now="")
        self._bar.start()
        self._last: StepRecord | None = None

    def steps(self, block: Steps) -> None:
        self._last = block[-1]
        self._bar.update(
            self._task, completed=self._last.step, now=f"loss {format_number(self._last.loss)}"
        )

    def evaluation(self, record: EvalRecord) -> None:
        self._bar.console.print(progress_line(record, self._last))

    def close(self) -> None:
        self._bar.stop()


class ProgressLines(Callback):
    """A line per evaluation, for files and pipes, where a bar would leave control characters."""

    key = "progress"

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last: StepRecord | None = None

    def steps(self, block: Steps) -> None:
        self._last = block[-1]

    def evaluation(self, record: EvalRecord) -> None:
        self.console.print(progress_line(record, self._last))


class NotebookProgress(ProgressLines):
    """A bar below the cell, with a line above it for each evaluation."""

    def __init__(self, console: Console, total: int, label: str) -> None:
        super().__init__(console)
        self._total = total
        self._label = label
        self._handle: Any = None
        self._shown_at = 0.0

    def steps(self, block: Steps) -> None:
        super().steps(block)
        is_last = block[-1].step >= self._total
        # A notebook's page would be slow with more updates than these.
        if is_last or monotonic() - self._shown_at > NOTEBOOK_SECONDS:
            self._shown_at = monotonic()
            self._show(block[-1])

    def _show(self, record: StepRecord) -> None:
        from IPython.display import HTML, display

        text = f"{self._label}: step {record.step} of {self._total}, loss "
        text = html.escape(sanitize(text + format_number(record.loss)))
        page = HTML(f'<progress value="{record.step}" max="{self._total}"></progress> {text}')
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


def progress_line(record: EvalRecord, last: StepRecord | None) -> str:
    """Return one line of text about an evaluation, with the last step's loss where there is one."""
    parts = [f"epoch {record.epoch}", f"step {record.step}"]
    if last is not None:
        parts.append(f"train/loss {format_number(last.loss)}")
    parts += [f"{key} {format_number(value)}" for key, value in record.metrics.items()]
    if last is not None and last.loss_scale is not None:
        parts.append(f"loss scale {last.loss_scale:g}")
        parts.append(f"skipped {last.skipped_steps}")
    return "  ".join(parts)


def progress(console: Console, total: int, label: str) -> Callback:
    """Return the progress callback that fits where the output goes."""
    # A quiet run prints to a file in memory. rich takes a notebook for a terminal where the
    # environment has FORCE_COLOR, as a kernel's has.
    if in_notebook() and console.file is sys.stdout:
        return NotebookProgress(console, total, label)
    return ProgressBar(console, total, label) if console.is_terminal else ProgressLines(console)
