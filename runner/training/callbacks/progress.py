"""Show the progress of a run: a bar on a terminal or in a notebook, else a line per evaluation."""

import html
import sys
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.training.callbacks.callback import RunCallback, RunHandle
from runner.training.records import EvalRecord, StepRecord, Steps
from runner.utils.formatting import format_number
from runner.utils.terminal import in_notebook, sanitize

NOTEBOOK_SECONDS = 0.5
"""Seconds between two updates of the bar in a notebook."""


class ProgressLines(RunCallback):
    """A line per evaluation, for files and pipes, where a bar would leave control characters."""

    key = "progress"

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last: StepRecord | None = None

    def on_steps(self, records: Steps, run: RunHandle) -> None:
        self._last = records[-1]

    def on_evaluation(self, record: EvalRecord, run: RunHandle) -> None:
        self.console.print(progress_line(record, self._last))


class ProgressBar(ProgressLines):
    """A bar over `total` steps, with a line above it for each evaluation."""

    def __init__(self, console: Console, total: int, label: str) -> None:
        super().__init__(console)
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

    def on_steps(self, records: Steps, run: RunHandle) -> None:
        super().on_steps(records, run)
        last = records[-1]
        now = f"loss {format_number(last.loss)}"
        self._bar.update(self._task, completed=last.step, now=now)

    def close(self) -> None:
        self._bar.stop()


class NotebookProgress(ProgressLines):
    """A bar below the cell, with a line above it for each evaluation."""

    def __init__(self, console: Console, total: int, label: str) -> None:
        super().__init__(console)
        self._total = total
        self._label = label
        self._handle: Any = None
        self._shown_at = 0.0

    def on_steps(self, records: Steps, run: RunHandle) -> None:
        super().on_steps(records, run)
        record = records[-1]
        # A notebook's page would be slow with more updates than these.
        is_due = monotonic() - self._shown_at > NOTEBOOK_SECONDS
        if record.step < self._total and not is_due:
            return
        from IPython.display import HTML, display

        self._shown_at = monotonic()
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


def progress(console: Console, total: int, label: str) -> RunCallback:
    """Return the progress callback that fits where the output goes."""
    # A quiet run prints to a file in memory. rich takes a notebook for a terminal where the
    # environment has FORCE_COLOR, as a kernel's has.
    if in_notebook() and console.file is sys.stdout:
        return NotebookProgress(console, total, label)
    return ProgressBar(console, total, label) if console.is_terminal else ProgressLines(console)
