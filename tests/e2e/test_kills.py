"""Processes killed with SIGKILL: what they had saved and recorded is whole, and continues.

tests/soak/test_many_kills.py does the same with more kills.
"""

import pytest
from killed_runs import compare_with_undisturbed
from killed_saves import killed_saves

# Of MLflow's client, which reads a database in this process.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_a_kill_during_a_save_costs_no_checkpoint(tmp_path, clean):
    found = killed_saves(tmp_path, clean, kills=12, mebibytes=8)
    assert found["in_a_write"] > 0
    assert found["lost"] == 0


def test_a_run_killed_at_random_steps_ends_as_one_that_was_not(tmp_path, clean, empty_store):
    for name in ("whole", "killed"):
        empty_store(tmp_path / name / "outputs" / "mlflow.db")
    found = compare_with_undisturbed(tmp_path, clean, kills=2, steps=80)
    assert (found.runs, found.lost, found.doubled, found.changed) == (1, 0, 0, 0)
