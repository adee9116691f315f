"""Runs of models that change more in a step than their weights."""

import sys

import pytest
from run_folders import copy_files, metrics_in

ADDED = (
    "model=mlp model._target_=stateful.Net ~model.hidden ~model.input_shape ~model.classes"
).split()
RUN = (*ADDED, "tracking=none", "train.batch_size=16", "debug.overfit=2", "train.eval_every=4")


@pytest.fixture
def net(tmp_path, monkeypatch):
    copy_files("stateful", tmp_path)
    monkeypatch.delitem(sys.modules, "stateful", raising=False)


def test_trials_leave_no_trace_and_a_resume_continues_with_changed_buffers(net, main, tmp_path):
    main(*RUN, "train.max_steps=8", "hydra.run.dir=whole").check_ok()
    assert sys.modules["stateful"].Net.first == (None, [])
    expected = metrics_in(tmp_path / "whole")
    begun = main(*RUN, "train.max_steps=4", "hydra.run.dir=begun")
    # Not the hidden state, which each forward replaces without having read it.
    named = "warning: calls: no checkpoint holds what the model changes in attributes"
    assert (begun.stdout + begun.stderr).count(named) == 1
    main("checkpoint.resume=begun", "train.max_steps=8").check_ok()
    assert metrics_in(tmp_path / "begun") == expected
    main(
        "mode=evaluate",
        "tracking=none",
        "debug.overfit=2",
        "checkpoint=begun",
        "hydra.run.dir=evaluated",
    ).check_ok()
    assert metrics_in(tmp_path / "evaluated")["val/loss"] == expected["val/loss"]
