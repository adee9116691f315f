"""runner.sweeps.report.columns: the columns of the terminal's table."""

from dataclasses import replace

import pytest
from job_results import finished, lost

from runner.core.run.run_result import RunResult
from runner.output.console import plain_console
from runner.output.markup import terminal_table
from runner.sweeps.report.columns import groups_table, jobs_table
from runner.sweeps.verdict.compare import compare_with_baselines

SCALED = finished("16-mixed", 0, 0.91, best=0.93, loss_scale=32768.0)
PLAIN = replace(SCALED, loss_scale=None)
FAILED = lost("32-true", error="ValueError: boom\nmore")


def text_of(*results: RunResult) -> str:
    rows = [[cell.text for cell in row] for row in jobs_table(results).rows]
    return str([*jobs_table(results).head, *rows])


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ([SCALED, FAILED, lost("tf32", "unavailable")], ["finished", "failed", "unavailable"]),
        ([SCALED, FAILED], ["val/accuracy", "0.91", "final scale", "32768"]),
        ([SCALED, replace(SCALED, quality="val/loss")], ["quality"]),
        ([replace(SCALED, converted="2/3", converted_weights="82/100")], ["82 % of weights"]),
        ([replace(SCALED, converted="2/3")], ["2/3"]),
        # Not taken for rich's markup.
        ([replace(PLAIN, label="a precision.keep_fp32=[head]")], ["a precision.keep_fp32=[head]"]),
    ],
    ids=["a row per job", "loss scales", "different qualities", "weights", "old", "brackets"],
)
def test_the_table_of_jobs_shows(results: list[RunResult], shown: list[str]) -> None:
    text = text_of(*results)
    assert [word for word in shown if word not in text] == []


def test_the_table_fits_a_narrow_terminal_without_cutting_a_number() -> None:
    shares = {"FP8": "84.2%", "bfloat16": "15.3%", "float32": "0.5%"}
    text = ", ".join(f"{share} {name}" for name, share in shares.items())
    work = {"matrix_work": text, "matrix_formats": [*shares], "converted": "2/3"}
    results = [finished("float8-rowwise", seed, 0.912, **work) for seed in range(2)]
    for width, has_all in ((200, True), (80, False)):
        console = plain_console()
        console.width = width
        with console.capture() as captured:
            console.print(
                terminal_table(groups_table(compare_with_baselines(results), None), width)
            )
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        for word in ("float8-rowwise", "val/accuracy", "0.912", "examples/s", "100"):
            assert word in text
        assert ("matrix work" in text) == has_all
        assert ("all columns are in the report" in text) != has_all


def test_a_table_without_loss_scales_has_no_column_for_them() -> None:
    assert "final scale" not in text_of(PLAIN, FAILED)


def test_a_column_that_says_the_same_in_each_row_is_left_out() -> None:
    whole = [finished(name, converted="2/2") for name in ("32-true", "b")]
    table = groups_table(compare_with_baselines(whole), None)
    assert not {"status", "device", "converted", "skipped", "final scale"} & {*table.head}
    assert {"val/accuracy", "against 32-true"} < {*table.head}
    parted = [*whole, lost("c"), replace(SCALED, skipped_steps=3)]
    more = groups_table(compare_with_baselines(parted), None)
    assert {"status", "converted", "skipped"} < {*more.head}
    unskipped = [*whole, replace(SCALED, skipped_steps=0)]
    assert "skipped" not in groups_table(compare_with_baselines(unskipped), None).head


def test_rows_are_sorted_by_setting_with_the_baseline_first() -> None:
    names = [(p, lr) for p in ("b", "32-true") for lr in ("lr=2", "lr=1")]
    results = [finished(precision, settings=lr) for precision, lr in names]
    compared = compare_with_baselines(results)
    table = groups_table(compared, compared[1])
    shown = [(row[0].text, row[0].note) for row in table.rows]
    assert [text for text, _ in shown] == ["32-true lr=2", "b lr=2", "32-true lr=1", "b lr=1"]
    assert shown[table.marked] == (compared[1].group.name, "recommended")
    assert sum(bool(note) for _, note in shown) == 1
