"""Runs of models that change more in a step than their weights."""

import json
import sys

import pytest

NET = """
import torch
from torch import nn

class Net(nn.Module):
    first = None

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)
        self.register_buffer("mean", torch.zeros(16), persistent=False)
        self.hidden, self.calls = None, []

    def forward(self, x):
        if self.training and Net.first is None:
            Net.first = (self.hidden, list(self.calls))
        h = torch.tanh(self.a(x.flatten(1)))
        self.hidden = h.detach().mean(0)
        self.calls.append(len(x))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(self.hidden, 0.3)
        return self.b(h - self.mean)
"""
ADDED = (
    "model=mlp",
    "model._target_=stateful.Net",
    "~model.hidden",
    "~model.input_shape",
    "~model.classes",
)
RUN = (*ADDED, "tracking=none", "train.batch_size=16", "debug.overfit=2", "train.eval_every=4")


def metrics(folder):
    return json.loads((folder / "result.json").read_text())["metrics"]


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "stateful.py").write_text(NET)
    monkeypatch.delitem(sys.modules, "stateful", raising=False)


def test_trials_leave_no_trace_and_a_resumed_run_continues_with_changed_buffers(
    net, main, tmp_path
):
    whole = main(*RUN, "train.max_steps=8", "hydra.run.dir=whole")
    assert whole.rc == 0, whole.stderr
    assert sys.modules["stateful"].Net.first == (None, [])
    expected = metrics(tmp_path / "whole")
    begun = main(*RUN, "train.max_steps=4", "hydra.run.dir=begun")
    # Not the hidden state, which each forward replaces without having read it.
    named = "warning: calls: no checkpoint holds what the model changes in attributes"
    assert (begun.stdout + begun.stderr).count(named) == 1
    done = main("checkpoint.resume=begun", "train.max_steps=8")
    assert done.rc == 0, done.stderr
    assert metrics(tmp_path / "begun") == expected
    evaluated = main(
        "mode=evaluate",
        "tracking=none",
        "debug.overfit=2",
        "checkpoint=begun",
        "hydra.run.dir=evaluated",
    )
    assert evaluated.rc == 0, evaluated.stderr
    assert metrics(tmp_path / "evaluated")["val/loss"] == expected["val/loss"]
