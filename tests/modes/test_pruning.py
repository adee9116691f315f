"""runner.modes.pruning: a job asks at its evaluations whether it is worse than the others."""

import json
import math

import pytest

from runner.config.invocation import Invocation
from runner.modes.pruning import Pruning
from runner.training.records import EvalRecord

pytest.importorskip("optuna", reason="needs optuna: pip install 'precision-runner[optuna]'")
GOOD = {10: 0.8, 20: 0.9, 30: 0.95}


def other(sweep, number, values, status="finished", precision="16-mixed", lr=None):
    folder = sweep / str(number)
    folder.mkdir()
    content = {
        "precision": precision,
        "settings": [f"optimizer.lr={lr or number}"],
        "quality": "val/accuracy",
        "values": [[step, value] for step, value in values.items()],
    }
    (folder / "evaluations.json").write_text(json.dumps(content))
    (folder / "result.json").write_text(json.dumps({"status": status}))


def pruned_at(sweep, values, direction="max"):
    """Return the step at which a job with these evaluations is pruned, None if it never is."""
    folder = sweep / "9"
    folder.mkdir()
    swept = ("precision=16-mixed", "optimizer.lr=9", "seed=1")
    origin = Invocation({"precision": "16-mixed"}, (), swept)
    pruning = Pruning(folder, origin, "val/accuracy", direction, 30)
    for step, value in values.items():
        pruning.evaluation(EvalRecord(step, 0, 1, {"val/accuracy": value}))
        if pruning.should_stop:
            return step
    return None


@pytest.mark.parametrize(
    ("values", "direction", "step"),
    [
        ({10: 0.1, 20: 0.1, 30: 0.1}, "max", 20),
        ({10: 0.1, 20: 0.91, 30: 0.1}, "max", None),
        ({10: 0.1, 20: 0.1, 30: 0.1}, "min", None),
        ({10: 2.0, 20: 2.0, 30: 2.0}, "min", 20),
        ({11: 0.1, 21: 0.1}, "max", None),
        ({10: math.nan, 20: math.nan}, "max", None),
    ],
)
def test_a_job_worse_than_the_median_is_pruned(tmp_path, values, direction, step):
    for number in range(3):
        other(tmp_path, number, GOOD)
    assert pruned_at(tmp_path, values, direction) == step


@pytest.mark.parametrize(
    "change",
    [{"status": "pruned"}, {"status": "failed"}, {"precision": "32-true"}, {"lr": "9"}],
    ids=["pruned jobs", "failed jobs", "another precision", "seeds of its own group"],
)
def test_jobs_that_say_nothing_prune_nothing(tmp_path, change):
    other(tmp_path, 0, GOOD)
    other(tmp_path, 1, GOOD)
    other(tmp_path, 2, GOOD, **change)
    assert pruned_at(tmp_path, {10: 0.1, 20: 0.1}) is None


def test_damaged_files_prune_nothing(tmp_path):
    for number, text in enumerate(["{", "[]", '{"values": [[1]]}', '{"precision": "16-mixed"}']):
        other(tmp_path, number, GOOD)
        (tmp_path / str(number) / "evaluations.json").write_text(text)
    assert pruned_at(tmp_path, {10: 0.1, 20: 0.1}) is None


def test_evaluations_before_a_resume_count(tmp_path):
    origin = Invocation({"precision": "16-mixed"})
    first = Pruning(tmp_path, origin, "val/accuracy", "max", 30)
    first.evaluation(EvalRecord(10, 0, 1, {"val/accuracy": 0.5}))
    second = Pruning(tmp_path, origin, "val/accuracy", "max", 30)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.evaluation(EvalRecord(20, 0, 1, {"val/accuracy": 0.6}))
    content = json.loads((tmp_path / "evaluations.json").read_text())
    assert content["values"] == [[10, 0.5], [20, 0.6]]
