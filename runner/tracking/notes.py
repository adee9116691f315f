"""Write the text of a run's page in MLflow: the command, the results, what was converted.

It is Markdown, in which no text of a user's becomes markup.
"""

from typing import TYPE_CHECKING

from runner.core import RunResult, fmt, run_result
from runner.output.markup import markdown_code, markdown_text
from runner.tracking.result_table import result_rows

if TYPE_CHECKING:
    from runner.core import ConversionReport


def page_note(page: run_result.RunPage) -> str:
    """Return the note of a run, whether it runs or has ended."""
    note = running_note(page.command)
    if page.result is not None and page.report is not None:
        note = finished_note(page.command, page.result, page.report)
    elif page.status is not None:
        note = failed_note(page.command, page.status, page.error)
    if page.resumed is None:
        return note
    changed = ", ".join(f"{key}: {change}" for key, change in page.resumed.changes.items())
    text = f"Resumed at step {page.resumed.step}; changed: {changed or 'nothing'}."
    return f"{note}\n\n{markdown_text(text)}"


def running_note(command: str) -> str:
    """Return the note of a run that has not ended.

    Args:
        command: the command line or the call of the Python API that repeats the run.
    """
    return f"Running (or interrupted).\n\n{markdown_code(command)}"


def finished_note(command: str, result: RunResult, report: "ConversionReport") -> str:
    """Return the note of a run that finished."""
    metrics = ", ".join(
        f"{name} {fmt.format_number(value)}" for name, value in result.metrics.items()
    )
    lines = [(name, text) for name, text in result_rows(result) if name not in result.metrics]
    table = [
        "| | |",
        "|---|---|",
        *(f"| {markdown_text(name)} | {markdown_text(text)} |" for name, text in lines),
    ]
    parts = [f"**{markdown_text(metrics)}**", markdown_code(command), "\n".join(table)]
    conversions = [f"- {markdown_text(line)}" for line in report.lines()]
    if conversions:
        parts.append("\n".join(conversions))
    return "\n\n".join(parts)


def failed_note(command: str, status: str, error: str) -> str:
    """Return the note of a run that failed or was stopped."""
    return f"**{status}**: {markdown_text(error)}\n\n{markdown_code(command)}"
