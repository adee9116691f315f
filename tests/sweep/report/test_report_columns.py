"""runner.sweeps.report.columns: the columns of a sweep's tables."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from runner.modes.result import RunResult
from runner.sweeps.report.columns import COLUMNS, sweep_table
from runner.utils.console import plain_console

DONE = RunResult(
    "16-mixed",
    "16-mixed mlp digits",
    "/out/1",
    metrics={"val/accuracy": 0.91, "val/loss": 0.3},
    quality="val/accuracy",
    best=0.93,
    loss_scale=32768.0,
    device="Some CPU",
)
FAILED = RunResult("32-true", "32-true seed=1", "/out/2", "failed", "ValueError: boom\nmore")


def text_of(results: list[RunResult]) -> str:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as captured:
        console.print(sweep_table(results))
    return captured.get()


@pytest.mark.parametrize("kind", ["job", "group", "verdict"])
def test_no_two_columns_of_a_table_share_a_name(kind: str) -> None:
    names = [column.name for column in COLUMNS if getattr(column, kind) is not None]
    assert len(set(names)) == len(names)


def test_the_terminal_lacks_what_the_report_has_last() -> None:
    jobs = [column for column in COLUMNS if column.job is not None]
    assert [column.name for column in jobs if not column.in_terminal] == ["best", "step ms"]
    assert [column.name for column in jobs[-2:]] == ["best", "step ms"]


def test_the_terminals_table_has_a_row_per_job() -> None:
    text = text_of([DONE, FAILED, replace(FAILED, status="unavailable")])
    assert "val/accuracy" in text
    assert all(word in text for word in ("finished", "failed", "unavailable", "32768", "0.91"))


def test_a_table_without_loss_scales_has_no_column_for_them() -> None:
    assert "final scale" in text_of([DONE, FAILED])
    assert "final scale" not in text_of([replace(DONE, loss_scale=None), FAILED])


def test_jobs_with_different_qualities_share_a_column() -> None:
    assert "quality" in text_of([DONE, replace(DONE, quality="val/loss")])


def test_brackets_of_an_override_are_not_taken_for_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = replace(DONE, label="32-true precision.keep_fp32=[head]")
    plain_console().print(sweep_table([job]))
    assert "precision.keep_fp32=[head]" in capsys.readouterr().out
