"""Every tracker that conf/tracking offers can be used alike, also when never opened."""

from importlib import import_module
from pathlib import Path

import pytest
import yaml

from runner.core.record.tracker import NoTracker, RunInfo, Tracker
from runner.tracking import history

CONFIGS = sorted((Path(__file__).parents[2] / "conf" / "tracking").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_builds_a_tracker_that_can_be_closed_unopened(path):
    config = yaml.safe_load(path.read_text())
    module, _, name = config.pop("_target_").rpartition(".")
    tracker = getattr(import_module(module), name)(**config)
    assert isinstance(tracker, Tracker)
    tracker.check()
    assert (tracker.run_id, tracker.experiment_id, tracker.dashboard) == (None, None, None)
    tracker.close("FAILED", "never opened")


def record(folder, records, **info):
    tracker = NoTracker()
    tracker.open(RunInfo(folder, **info))
    tracker.log_metrics(records)
    tracker.tags({"a": "b"})
    tracker.artifact(folder / "missing")
    tracker.close("FINISHED")


def test_no_tracker_takes_everything_and_leaves_the_metrics_alone(tmp_path):
    record(tmp_path, [(1, 1, {"a": 1.0}), (2, 5, {"a": float("inf")})])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    curve = history.from_folder(tmp_path)["a"]
    assert curve.tolist() == [[1, 2], [1, 5], [1.0, float("inf")]]


def test_no_tracker_keeps_no_step_twice_when_a_run_is_resumed(tmp_path):
    for begin, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        record(tmp_path, [(step, step, {"a": float(step)}) for step in steps], step=begin)
    frame = history.to_frame(history.from_folder(tmp_path))
    assert frame["a"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert frame["seconds"].tolist() == [0.0, 0.001, 0.002, 0.003]


def test_no_tracker_drops_what_another_run_left_in_the_folder(tmp_path):
    for value in (1.0, 2.0):
        record(tmp_path, [(1, 1, {"a": value})])
    assert history.from_folder(tmp_path)["a"][2].tolist() == [2.0]


def test_no_tracker_keeps_nothing_of_a_sweeps_parent_run(tmp_path):
    record(tmp_path, [], role="sweep")
    assert not list(tmp_path.iterdir())
