"""The tables of a sweep beside its report: report.csv and report.json."""

import contextlib
import csv
import io
import math
import re
from dataclasses import replace

import pytest
from job_results import finished, lost
from run_folders import read_json

from runner.core.run.run_result import RunResult
from runner.sweeps.report.pages import write_report, write_rows
from runner.sweeps.report.sweep_data import Job, SweepData
from runner.sweeps.verdict.compare import compare_with_baselines
from runner.tracking.result_table import table_columns, table_rows

DONE = RunResult(
    precision="16-mixed",
    label="16-mixed optimizer.lr=0.1 seed=1",
    folder="outputs/sweeps/x/3",
    overrides=("precision=16-mixed", "+optimizer.lr=1e-1", "seed=1", "tracking.uri=sqlite:///x"),
    group="16-mixed optimizer.lr=0.1",
    seed=1,
    quality="val/loss",
    direction="min",
    metrics={"val/loss": 1 / 3, "val/iou": math.inf},
    left_out=["precision.a", "precision.b"],
)
FAILED = RunResult(
    precision="64-true",
    label="64-true",
    folder="/x/4",
    status="failed",
    error='a, "b"\nc_d',
    overrides=["model=a,b"],
)

BOTH = SweepData([Job(DONE), Job(FAILED)])


def test_a_row_has_the_fixed_columns_then_metrics_then_settings():
    first, second = table_rows(BOTH.results)
    own = ["metric.val/loss", "metric.val/iou", "set.optimizer.lr", "set.model"]
    assert list(first) == list(second) == [*table_columns([]), *own]
    assert (first["job"], first["seed"], first["precision"]) == (3, 1, "16-mixed")
    assert (first["quality_value"], first["set.optimizer.lr"]) == (1 / 3, 0.1)
    assert first["left_out"] == "precision.a precision.b"
    assert (second["quality_value"], second["set.optimizer.lr"]) == (None, None)
    assert second["set.model"] == "a,b"


def test_csv_and_json_hold_every_digit_and_any_text(tmp_path):
    csv_path, json_path = write_rows(BOTH.results, tmp_path)
    with csv_path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert float(read[0]["metric.val/loss"]) == 1 / 3
    assert (read[0]["metric.val/iou"], read[1]["quality_value"]) == ("inf", "")
    assert read[1]["error"] == FAILED.error
    content = read_json(json_path)
    assert content["rows"][0]["metric.val/loss"] == 1 / 3
    assert content["rows"][0]["metric.val/iou"] == "inf"
    assert content["rows"][1]["quality_value"] is None
    assert set(content["columns"]) == set(table_columns(BOTH.results))


@pytest.mark.parametrize("direction", ["max", "min"])
def test_the_answer_is_what_the_comparison_says(direction, tmp_path):
    pairs = [("32-true", seed, 0.9 + seed / 100) for seed in range(3)]
    pairs += [("bf16-mixed precision.x=1", seed, 0.8 + seed**2 / 100) for seed in range(3)]
    jobs = [
        finished(name.split()[0], s, q, group=name, direction=direction) for name, s, q in pairs
    ]
    data = SweepData([Job(job) for job in [*jobs, lost("tf32", "unavailable")]])
    _, other, _ = compare_with_baselines(data.results)
    metrics, tags, steps = data.answer.record
    write_report(data, tmp_path)
    assert read_json(tmp_path / "report.json")["answer"] == metrics | tags
    name = "bf16-mixed precision.x:1"
    assert metrics == {
        "answer/recommended_speed_ratio": 1.0,
        "answer/speed_ratio/32-true": 1.0,
        "answer/memory_ratio/32-true": 1.0,
        f"answer/gap/{name}": other.difference.value,
        f"answer/gap_half_width/{name}": other.difference.ci_half_width,
        f"answer/speed_ratio/{name}": other.speed_ratio.value,
        f"answer/memory_ratio/{name}": other.memory_ratio,
    }
    word = "worse" if direction == "max" else "better"
    assert tags == {
        "answer": data.answer.sentence,
        "recommended": "32-true",
        "verdict/32-true": "baseline",
        f"verdict/{name}": word,
        "verdict/tf32": "unavailable here",
    }
    assert steps == 60


def test_a_sweep_without_jobs_has_the_names_of_the_columns(tmp_path):
    csv_path, json_path = write_rows([], tmp_path)
    assert csv_path.read_text() == ",".join(table_columns([])) + "\n"
    assert read_json(json_path)["rows"] == []


def test_a_secret_in_a_jobs_texts_is_in_no_table(tmp_path):
    leaked = replace(FAILED, error="cannot reach https://me:hunter22@host")
    for path in write_rows([leaked], tmp_path):
        assert "hunter22" not in path.read_text()


def test_the_example_of_the_docs_reads_a_sweeps_tables(quick, root):
    page = (root / "docs" / "sweeps.md").read_text()
    (code,) = re.findall(r"```python\n(import csv\n.*?)```", page, re.DOTALL)
    assert quick("-m", "precision=32-true,bf16-mixed", "hydra/launcher=basic").rc == 0
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    lines = printed.getvalue().splitlines()
    assert lines[0].startswith("32-true 0 ")
    assert "time of an optimizer step, milliseconds" in lines
