"""Sweeps over precision x another key: precisions are compared within each setting."""

import pytest
from job_results import finished

from runner.output.markup import Items, Table, Text
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
    assert list(table.head) == ["precision", "lr=1", "lr=2"]
    cells = {row[0].text: [(cell.text, cell.note) for cell in row[1:]] for row in table.rows}
    assert cells == {
        "32-true": [("0.910 ± 0.010", ""), ("0.510 ± 0.011", "")],
        "bf16-mixed": [("0.910 ± 0.010", ""), ("0.910 ± 0.010", "best")],
        "16-mixed": [("0.510 ± 0.011", ""), ("failed", "")],
    }
    assert "measurably better" in blocks(GRID, Text)[0].text


def test_a_summary_says_for_how_many_settings_a_verdict_holds():
    (items,) = blocks(GRID, Items)
    assert dict(items.items) == {
        "bf16-mixed": "within tolerance in 1 of 2 settings, better in 1 of 2 settings "
        "(lr=2), about as fast in 2 of 2 settings",
        "16-mixed": "worse in 1 of 2 settings (lr=1), not compared in 1 of 2 settings (lr=2), "
        "about as fast in 1 of 2 settings",
    }
    sentence = SweepData([*map(Job, GRID)]).answer.sentence
    assert sentence.startswith("Best val/accuracy: 32-true lr=1 with 0.910 ± 0.010; best of")
    assert "Against 32-true in each setting: bf16-mixed: within tolerance in 1 of" in sentence


def test_one_seed_marks_nothing():
    single = [*jobs("32-true", "lr=1", [0.5]), *jobs("b", "lr=1", [0.9])]
    single += [*jobs("32-true", "lr=2", [0.5]), *jobs("b", "lr=2", [0.9])]
    (table,) = blocks(single, Table)
    assert not any(cell.note for row in table.rows for cell in row)
    (items,) = blocks(single, Items)
    assert items.items == [("b", "not judged in 2 of 2 settings, about as fast in 2 of 2 settings")]


def test_qualities_of_two_models_are_not_compared(tmp_path):
    models = [
        *jobs("32-true", "model=mlp", GOOD),
        *jobs("bf16-mixed", "model=mlp", POOR),
        *jobs("32-true", "model=vit", POOR, model="vit"),
        *jobs("bf16-mixed", "model=vit", POOR, model="vit"),
    ]
    sentence = SweepData([*map(Job, models)]).answer.sentence
    assert sentence == (
        "Against 32-true in each setting: bf16-mixed: worse in 1 of 2 settings (model=mlp), within "
        "tolerance in 1 of 2 settings, about as fast in 2 of 2 settings."
    )
    page = write_report(SweepData([Job(one) for one in models]), tmp_path)[0].read_text()
    assert "| precision | model=mlp | model=vit |" in page
    assert "Qualities of different models or data are not compared." in page


def test_a_key_of_one_precision_is_no_setting_of_the_others():
    with_key = [
        *jobs("32-true", "lr=1", GOOD),
        *jobs("16-mixed", "lr=1 precision.loss_scale.fixed=8", GOOD),
        *jobs("32-true", "lr=2", GOOD),
        *jobs("16-mixed", "lr=2 precision.loss_scale.fixed=8", GOOD),
    ]
    (table,) = blocks(with_key, Table)
    assert [row[0].text for row in table.rows] == [
        "32-true",
        "16-mixed precision.loss_scale.fixed=8",
    ]
    assert list(table.head) == ["precision", "lr=1", "lr=2"]


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
