"""What people find beside the metrics of a run, in a real store."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from quiet_mlflow import client_of
from run_folders import read_json

from runner.core.base.layout import HISTORY
from runner.core.record.tracker import Tracker
from runner.core.run.run_result import RunResult
from runner.tracking import dashboard, history

ARGS = (
    "model.hidden=[64, 32]",
    *"model=mlp train.max_steps=40 precision=bnb-int8-training".split(),
    *"precision.ignore_modules=[head] tracking.system_metrics=0.05".split(),
)


@pytest.fixture(scope="module")
def record(tmp_path_factory, inside, result, empty_store):
    """Return a function that runs a command: (its folder, its MLflow run, the client, its text)."""

    def run(*arguments):
        folder = tmp_path_factory.mktemp("recorded")
        uri = empty_store(folder / "mlflow.db")
        with inside(folder) as main:
            done = main(*arguments, f"tracking.uri={uri}").check_ok()
        outcome = result(folder)
        client = client_of(uri)
        return Path(outcome["folder"]), client.get_run(outcome["run_id"]), client, done.stdout

    return run


@pytest.fixture(scope="module")
def shown(record):
    """A run: (its folder, its MLflow run, the client, its text)."""
    return record(*ARGS, "tracking.register=digits-mlp")


def test_the_note_shows_the_command_and_the_results(shown):
    folder, run, *_ = shown
    note = run.data.tags["mlflow.note.content"]
    command = next(line for line in note.splitlines() if line.startswith("`")).strip("`")
    assert shlex.split(command)[:3] == ["python", "-m", "runner"]
    assert set(ARGS) < set(shlex.split(command))
    outcome = read_json(folder / "result.json")
    assert f"{outcome['metrics']['val/accuracy']:.4g}" in note
    assert "- skipped head (Linear" in note


def test_the_data_sets_are_the_runs_inputs(shown):
    _, run, *_ = shown
    found = {item.tags[0].value: item.dataset for item in run.inputs.dataset_inputs}
    assert set(found) == {"training", "validation"}
    assert {dataset.name for dataset in found.values()} == {"digits"}
    assert json.loads(found["training"].profile)["num_rows"] == 1438
    assert found["training"].digest != found["validation"].digest


def test_each_layers_dtypes_are_a_table(shown):
    folder, run, *_ = shown
    named = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert named == [{"path": "dtypes.json", "type": "table"}]
    table = read_json(folder / "dtypes.json")
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["data"]}
    assert rows["head"]["conversion"].startswith("skipped: ")
    converted = [row for row in rows.values() if row["conversion"] == "converted"]
    assert len(converted) == 2
    assert all(row["stores"] == "float32" for row in converted)


def test_the_machines_load_is_sampled(shown):
    _, run, client, _ = shown
    assert "system/cpu_utilization_percentage" in run.data.metrics
    points = client.get_metric_history(run.info.run_id, "system/process_memory_megabytes")
    assert [point.step for point in points] == list(range(len(points)))
    assert all(point.value > 100 for point in points)


def test_the_bars_of_the_dashboard_are_the_reports_speed_and_memory(record, monkeypatch):
    monkeypatch.setattr("runner.training.callbacks.runner_callbacks.MIN_TIMED_MS", 0.0)
    folder, run, *_ = record("model=mlp", "train.max_steps=12", "train.log_every=3")
    result = RunResult.read(folder)
    assert result.examples_per_second > 0
    assert run.data.metrics["perf/mean_examples_per_second"] == result.examples_per_second
    assert run.data.metrics["perf/mean_step_ms"] == result.step_ms
    memory = result.weights_mib + result.optimizer_mib
    assert run.data.metrics["memory/compared_mib"] == result.memory_mib == memory
    tracker = Mock(Tracker)
    for status in ("failed", "stopped"):
        replace(result, status=status).log_cost(tracker)
    tracker.log_metrics.assert_not_called()


@pytest.mark.parametrize(("scale", "has_chart"), [("fixed=1024", False), ("init_scale=1e12", True)])
def test_the_dashboard_draws_a_loss_scale_that_changes(
    tmp_path, inside, empty_store, scale, has_chart
):
    uri = empty_store(tmp_path / "mlflow.db")
    words = ["-m", "hydra/launcher=basic", "model=mlp", "precision=16-mixed", "train.max_steps=3"]
    with inside(tmp_path) as main:
        main(*words, f"precision.loss_scale.{scale}", f"tracking.uri={uri}").check_ok()
    client = client_of(uri)
    (run,) = client.search_runs(["1"], "tags.role = 'run'")
    assert "loss_scale/changes" in run.data.metrics
    tags = client.get_experiment("1").tags
    key = dashboard.sweep_key(run.data.tags["sweep_id"])
    state = dashboard.unpack_state(tags[dashboard.VIEW_TAG_PREFIX + key])
    names = [section["name"] for section in state["compareRunSections"]]
    assert ("Loss scale" in names) is has_chart
    drawn = {card["metricKey"] for card in state["compareRunCharts"] if "metricKey" in card}
    assert "loss_scale/changes" in drawn, "MLflow makes a chart of a metric that no card names"


def test_the_history_is_the_metrics_exactly(shown):
    folder, run, client, _ = shown
    kept = client.download_artifacts(run.info.run_id, HISTORY, str(folder))
    curves = history.read_history(Path(kept))
    assert set(curves) == {key for key in run.data.metrics if not key.startswith("system/")}
    stored = client.get_metric_history(run.info.run_id, "train/loss")
    rows = sorted((p.step, p.timestamp, p.value) for p in stored)
    assert [tuple(column) for column in curves["train/loss"].T] == rows


def test_the_trained_model_is_the_runs_output_and_in_the_registry(record):
    _, run, client, _ = record("model=mlp", "train.max_steps=2", "tracking.register=digits-mlp")
    (output,) = run.outputs.model_outputs
    (version,) = client.search_model_versions("name = 'digits-mlp'")
    assert output.model_id in version.source
    assert version.run_id == run.info.run_id


def test_a_model_whose_layers_cannot_be_exported_is_named(shown):
    _, run, client, text = shown
    assert "The model is not in MLflow, its checkpoint has the weights" in " ".join(text.split())
    assert run.outputs.model_outputs == []
    assert client.search_model_versions("name = 'digits-mlp'") == []
