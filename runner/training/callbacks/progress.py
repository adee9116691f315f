"""Show the progress of a run: a bar on a terminal or in a notebook, and a row per evaluation."""

import sys
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

import rich.progress
from rich.console import Console as RichConsole
from rich.table import Column

from runner.core import Console, RunCallback, RunHandle, fmt, step_records
from runner.output.console import JobConsole
from runner.output.notebook_log import NotebookLog

# Characters of a number of four digits with its exponent, as in -1.234e-05; of a count.
_WIDTH = 10
_SHORT_WIDTH = 7
# Shortest time between two updates of a bar for steps that begin.
_UPDATE_SECONDS = 0.1


class ProgressLines(RunCallback):
    """A row per evaluation, for files and pipes, where a bar would leave control characters."""

    key = "progress"

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last = None
        self._header = ""

    def on_steps(self, records: Sequence[step_records.StepRecord], run: RunHandle) -> None:
        self._last = records[-1]

    def on_evaluation(self, record: step_records.EvalRecord, run: RunHandle) -> None:
        values = evaluation_values(record, self._last)
        widths = [max(len(name), _WIDTH if "/" in name else _SHORT_WIDTH) for name in values]
        # A terminal would wrap a longer row. The last columns matter least.
        while self.console.is_terminal and sum(widths) + 2 * len(widths) - 2 > self.console.width:
            widths.pop()
        header = "  ".join(map(str.rjust, values, widths))
        if header != self._header:
            self._header = header
            self.console.print(header, soft_wrap=True)
        row = "  ".join(map(str.rjust, values.values(), widths))
        self.console.print(row, soft_wrap=True)


def evaluation_values(
    record: step_records.EvalRecord, last: step_records.StepRecord | None
) -> dict[str, str]:
    """Return the texts of a row about an evaluation, by the names of their columns.

    Args:
        record: of the evaluation.
        last: record of the last step; None where there is none.
    """
    numbers: dict[str, float | None] = {"epoch": record.epoch, "step": record.step}
    if last is not None:
        numbers["train/loss"] = last.loss
    numbers |= record.metrics
    if last is not None and last.loss_scale is not None:
        numbers |= {"loss scale": last.loss_scale, "skipped": last.skipped_steps}
    return {name: fmt.format_number(number) for name, number in numbers.items()}


class ProgressBar(ProgressLines):
    """A bar over the steps that have begun, with the loss of the last record.

    Args:
        console: takes the rows; on the same terminal they appear above the bar.
        screen: the terminal.
        total: steps of the run.
        label: returns what stands beside the bar.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        console: Console,
        screen: RichConsole,
        total: int,
        label: Callable[[], str],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        super().__init__(console)
        self._label = label
        self._clock = clock
        self._shown_at = clock()
        # A label may hold brackets, as in a list of overrides, which rich would read as markup.
        label_column = Column(no_wrap=True, overflow="ellipsis", max_width=screen.width - 38)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False, table_column=label_column),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[loss]}"),
            rich.progress.TimeRemainingColumn(),
            console=screen,
            expand=True,
            # A job of a sweep leaves a line instead.
            transient=screen is not console,
            disable=not screen.is_terminal,
            # Over the whole run: evaluations and slow steps take their part of the time left. Its
            # first step, in which kernels are compiled, is not counted.
            speed_estimate_period=inf,
            get_time=clock,
        )
        self._bar.add_task(label(), total=total, loss="")
        self._bar.start()

    def around_step(self, step: int) -> None:
        if self._clock() - self._shown_at >= _UPDATE_SECONDS:
            self.show(step - 1)

    def on_steps(self, records: Sequence[step_records.StepRecord], run: RunHandle) -> None:
        super().on_steps(records, run)
        self.show(records[-1].step)

    def show(self, done: int) -> rich.progress.Task:
        """Show how many steps are done; return rich's account of them."""
        self._shown_at = self._clock()
        (task,) = self._bar.tasks
        loss = f"loss {fmt.format_number(self._last.loss)}" if self._last else ""
        # Records come later than the steps that have begun since.
        done = max(done, int(task.completed))
        self._bar.update(task.id, completed=done, description=self._label(), loss=loss)
        return task

    def close(self) -> None:
        self._bar.stop()


class NotebookProgress(ProgressBar):
    """A bar above the log of a notebook's cell."""

    def __init__(self, log: NotebookLog, *given: Any) -> None:
        super().__init__(*given)
        self._log = log

    def show(self, done: int) -> rich.progress.Task:
        task = super().show(done)
        steps = f"{task.description}: step {task.completed:.0f} of {task.total}"
        left = f"{fmt.format_duration(task.time_remaining)} left" if task.time_remaining else ""
        text = ", ".join(filter(None, (steps, task.fields["loss"], left)))
        self._log.show_bar(text, task.percentage)
        return task


def progress(console: Console, total: int, label: str) -> ProgressLines:
    """Return the progress callback that fits where the output goes."""
    if not isinstance(console, RichConsole):
        return ProgressLines(console)
    is_job = isinstance(console, JobConsole)
    screen = console.terminal if is_job else console
    name = console.label if is_job else lambda: label
    # A quiet run prints to a file in memory.
    if screen.file is sys.stdout and isinstance(sys.stdout, NotebookLog):
        return NotebookProgress(sys.stdout, console, screen, total, name)
    if screen.is_terminal:
        return ProgressBar(console, screen, total, name)
    return ProgressLines(console)
