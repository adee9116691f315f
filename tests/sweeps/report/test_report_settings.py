"""Sweeps over precision x another key: precisions are compared within each setting."""

from dataclasses import replace

import pytest
from job_results import finished

from runner.output.markup import Table, Text
from runner.sweeps.report.conclusion import settings_blocks
from runner.sweeps.report.pages import write_report
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.verdict.compare import compare_with_baselines


def jobs(precision, setting, qualities, **more):
    """Return a job per quality, of seeds 0, 1, ..."""
    return [finished(precision, s, quality, setting, **more) for s, quality in enumerate(qualities)]


def lost(precision, setting):
    return jobs(precision, setting, [0.0], status="failed", error="boom", metrics={}, device="")


GOOD = (0.90, 0.91, 0.92)
POOR = (0.50, 0.51, 0.521)
GRID = [
    *jobs("32-true", "lr=1", GOOD),
    *jobs("bf16-mixed", "lr=1", GOOD),
    *jobs("16-mixed", "lr=1", POOR),
    *jobs("32-true", "lr=2", POOR),
    *jobs("bf16-mixed", "lr=2", GOOD),
    *lost("16-mixed", "lr=2"),
]


def blocks(results, kind):
    found = settings_blocks(compare_with_baselines(results))
    return [block for block in found if isinstance(block, kind)]


def test_the_table_marks_a_best_only_where_it_is_measured():
    (table,) = blocks(GRID, Table)
    assert list(table.head) == ["setting", "32-true", "bf16-mixed", "16-mixed"]
    cells = {row[0].text: [(cell.text, cell.note) for cell in row[1:]] for row in table.rows}
    assert cells == {
        "lr=1": [("0.910 ± 0.010", ""), ("0.910 ± 0.010", ""), ("0.510 ± 0.011", "")],
        "lr=2": [("0.510 ± 0.011", ""), ("0.910 ± 0.010", "best"), ("failed", "")],
    }
    assert "measurably better" in blocks(GRID, Text)[0].text


def test_the_answer_says_in_how_many_settings_a_precision_wins():
    text = SweepData([*map(Job, GRID)]).answer.text
    assert text.startswith(
        "Train in 32-true in each of 2 settings. lr=1: Stay with 32-true: nothing as good trained "
        "faster. lr=2: Stay with 32-true: nothing as good trained faster. Best mean val/accuracy: "
        "32-true lr=1 with 0.910 ± 0.010. Best of"
    )
    fast = [
        replace(job, examples_per_second=200.0)
        if (job.precision, job.settings) == ("bf16-mixed", ["lr=2"])
        else job
        for job in GRID
    ]
    text = SweepData([*map(Job, fast)]).answer.text
    assert text.startswith("Train in 32-true in 1 of 2 settings, in bf16-mixed in 1. lr=1: Stay")
    assert "lr=2: Train in bf16-mixed lr=2: 2.00 × as fast as 32-true, val/accuracy better." in text


def test_one_seed_marks_nothing():
    single = [*jobs("32-true", "lr=1", [0.5]), *jobs("b", "lr=1", [0.9])]
    single += [*jobs("32-true", "lr=2", [0.5]), *jobs("b", "lr=2", [0.9])]
    (table,) = blocks(single, Table)
    assert not any(cell.note for row in table.rows for cell in row)
    text = SweepData([*map(Job, single)]).answer.text
    assert text.startswith("None of 2 settings is decided yet. lr=1: Stay with 32-true: nothing")
    # What each setting lacks is asked for once.
    assert text.endswith("Type seed=0,1,2.")


def test_qualities_of_two_models_are_not_compared(tmp_path):
    models = [
        *jobs("32-true", "model=mlp", GOOD),
        *jobs("bf16-mixed", "model=mlp", POOR),
        *jobs("32-true", "model=vit", POOR, model="vit"),
        *jobs("bf16-mixed", "model=vit", POOR, model="vit"),
    ]
    text = SweepData([*map(Job, models)]).answer.text
    assert text == (
        "Train in 32-true in each of 2 settings. model=mlp: Stay with 32-true: bf16-mixed "
        "model=mlp is worse in val/accuracy. model=vit: Stay with 32-true: nothing as good trained "
        "faster. Different models or data: their qualities are not compared."
    )
    page = write_report(SweepData([Job(one) for one in models]), tmp_path)[0].read_text()
    assert "| setting | 32-true | bf16-mixed |" in page
    assert "Qualities of different models or data are not compared." in page


def test_a_key_of_one_precision_is_no_setting_of_the_others():
    with_key = [
        *jobs("32-true", "lr=1", GOOD),
        *jobs("16-mixed", "lr=1 precision.loss_scale.fixed=8", GOOD),
        *jobs("32-true", "lr=2", GOOD),
        *jobs("16-mixed", "lr=2 precision.loss_scale.fixed=8", GOOD),
    ]
    (table,) = blocks(with_key, Table)
    assert [row[0].text for row in table.rows] == ["lr=1", "lr=2"]
    assert list(table.head)[1:] == ["32-true", "16-mixed precision.loss_scale.fixed=8"]


@pytest.mark.parametrize(
    "results",
    [
        [*jobs("32-true", "lr=1", GOOD), *jobs("bf16-mixed", "lr=1", GOOD)],
        [*jobs("32-true", "lr=1", GOOD), *jobs("32-true", "lr=2", GOOD)],
        [*jobs("32-true", "lr=1", GOOD), *jobs("bf16-mixed", "lr=2", GOOD)],
    ],
    ids=["one setting", "one precision", "a search"],
)
def test_other_sweeps_have_no_table_of_settings(results):
    assert not list(settings_blocks(compare_with_baselines(results)))
