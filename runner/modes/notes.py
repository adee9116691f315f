"""What MLflow's pages say of a run in words: the command, the results, what was converted; and
the Markdown in which no text of a user's is markup."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from runner.modes.result import RunResult
from runner.modes.tables import result_rows
from runner.utils import terminal
from runner.utils.formatting import format_number
from runner.utils.markup import markdown_code, markdown_text

if TYPE_CHECKING:
    from runner.precision.precision import ConversionReport


def resumed_note(step: int, changes: Mapping[str, str]) -> str:
    """Where a run was gone on with, and what was changed there: follows its note."""
    with_what = ", ".join(f"{key}: {change}" for key, change in changes.items())
    told = f"Resumed at step {step}; changed: {with_what or 'nothing'}."
    return f"\n\n{markdown_text(told)}"


def running_note(command: Sequence[str]) -> str:
    """The note of a run that has not ended.

    Args:
        command: words, as the shell splits them.
    """
    return f"Runs, or was cut off.\n\n{command_note(command)}"


def finished_note(command: Sequence[str], result: RunResult, report: "ConversionReport") -> str:
    """The note of a run that finished."""
    metrics = ", ".join(f"{name} {format_number(value)}" for name, value in result.metrics.items())
    lines = [(name, text) for name, text in result_rows(result) if name not in result.metrics]
    table = [
        "| | |",
        "|---|---|",
        *(f"| {markdown_text(name)} | {markdown_text(text)} |" for name, text in lines),
    ]
    return "\n\n".join(
        [
            f"**{markdown_text(metrics)}**",
            command_note(command),
            "\n".join(table),
            *conversion_note(report),
        ]
    )


def failed_note(command: Sequence[str], status: str, error: str) -> str:
    """The note of a run that failed or was stopped."""
    return f"**{status}**: {markdown_text(error)}\n\n{command_note(command)}"


def conversion_note(report: "ConversionReport") -> list[str]:
    """What became of the layers, a list in Markdown; nothing where none was looked at."""
    lines = [markdown_text(line) for line in report.lines()]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def command_note(command: Sequence[str]) -> str:
    """A command to copy, as inline code: a block of code that does not wrap would push the rest of
    MLflow's page aside."""
    return markdown_code(terminal.quote_command(command))
