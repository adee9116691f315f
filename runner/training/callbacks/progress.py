"""Show the progress of a run: a bar on a terminal, a line per evaluation elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.training.callbacks.callback import Callback
from runner.training.records import EvalRecord, StepRecord, Steps
from runner.utils.formatting import format_number


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
    return ProgressBar(console, total, label) if console.is_terminal else ProgressLines(console)
