"""Every tracker that conf/tracking offers can be used alike, also when never opened."""

from importlib import import_module
from pathlib import Path

import pytest
import yaml

from runner.tracking.tracker import NoTracker, RunInfo, Tracker

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


def test_no_tracker_takes_everything_and_leaves_nothing(tmp_path):
    tracker = NoTracker()
    tracker.open(RunInfo(tmp_path))
    tracker.log_metrics([(1, 1, {"a": 1.0})])
    tracker.tags({"a": "b"})
    tracker.artifact(tmp_path / "missing")
    tracker.close("FINISHED")
    assert not list(tmp_path.iterdir())
