"""What MLflow's pages say of a run in words: the command, the results, what was converted."""

import re
import shlex
from collections.abc import Sequence

from runner.precision.base import ConversionReport
from runner.result import RunResult, number, rows


def begun(command: Sequence[str]) -> str:
    """The note of a run that has not ended.

    Args:
        command: words, as the shell splits them.
    """
    return f"Runs, or was cut off.\n\n{typed(command)}"


def ended(command: Sequence[str], result: RunResult, report: ConversionReport) -> str:
    """The note of a run that finished."""
    metrics = ", ".join(f"{name} {number(value)}" for name, value in result.metrics.items())
    lines = [(name, text) for name, text in rows(result) if name not in result.metrics]
    table = ["| | |", "|---|---|", *(f"| {cell(name)} | {cell(text)} |" for name, text in lines)]
    return "\n\n".join([f"**{metrics}**", typed(command), "\n".join(table), *converted(report)])


def broken(command: Sequence[str], status: str, error: str) -> str:
    """The note of a run that failed or was stopped."""
    return f"**{status}**: {cell(error)}\n\n{typed(command)}"


def converted(report: ConversionReport) -> list[str]:
    """What became of the layers, a list in Markdown; nothing where none was looked at."""
    lines = [cell(line.strip()) for line in report.lines()]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def typed(command: Sequence[str]) -> str:
    """A command to copy, as inline code: a block of code that does not wrap would push the rest of
    MLflow's page aside. No text in it can end it."""
    text = " ".join(shlex.join(command).split("\n"))
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def cell(text: str) -> str:
    """Text in a line of Markdown, where neither HTML nor a table's bars have a meaning."""
    for sign, safe in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(sign, safe)
    return text
