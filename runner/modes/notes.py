"""What MLflow's pages say of a run in words: the command, the results, what was converted; and
the Markdown in which no text of a user's is markup."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from runner.modes.result import RunResult, rows
from runner.utils import terminal
from runner.utils.formatting import number
from runner.utils.markup import code, md

if TYPE_CHECKING:
    from runner.precision.precision import ConversionReport


def resumed(step: int, changes: Mapping[str, str]) -> str:
    """Where a run was gone on with, and what was changed there: follows its note."""
    with_what = ", ".join(f"{key}: {change}" for key, change in changes.items())
    told = f"Resumed at step {step}; changed: {with_what or 'nothing'}."
    return f"\n\n{md(told)}"


def begun(command: Sequence[str]) -> str:
    """The note of a run that has not ended.

    Args:
        command: words, as the shell splits them.
    """
    return f"Runs, or was cut off.\n\n{typed(command)}"


def ended(command: Sequence[str], result: RunResult, report: "ConversionReport") -> str:
    """The note of a run that finished."""
    metrics = ", ".join(f"{name} {number(value)}" for name, value in result.metrics.items())
    lines = [(name, text) for name, text in rows(result) if name not in result.metrics]
    table = ["| | |", "|---|---|", *(f"| {md(name)} | {md(text)} |" for name, text in lines)]
    return "\n\n".join([f"**{md(metrics)}**", typed(command), "\n".join(table), *converted(report)])


def broken(command: Sequence[str], status: str, error: str) -> str:
    """The note of a run that failed or was stopped."""
    return f"**{status}**: {md(error)}\n\n{typed(command)}"


def converted(report: "ConversionReport") -> list[str]:
    """What became of the layers, a list in Markdown; nothing where none was looked at."""
    lines = [md(line) for line in report.lines()]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def typed(command: Sequence[str]) -> str:
    """A command to copy, as inline code: a block of code that does not wrap would push the rest of
    MLflow's page aside."""
    return code(terminal.typed(command))
