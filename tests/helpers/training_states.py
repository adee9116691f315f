"""States of a run's training, from its config: begun, trained, saved, resumed."""

import copy
from pathlib import Path

import torch
from states import CPU, check_same_checkpoints

from runner.core.config.targets import build_group
from runner.core.loop.step import train_step
from runner.core.record.checkpoint_file import LoadedCheckpoint
from runner.core.run.run_context import TrainingSetup
from runner.training import state_dict
from runner.training.model import ModelBuilder
from runner.training.setup import build_state
from runner.training.state_dict import checkpoint_state_dict
from runner.training.tasks.classification import Classification

MLP = ("model=mlp", "model.hidden=[72,4]", "tracking=none")
QUALITIES = (0.4, 0.5, 0.4, 0.6, 0.5, 0.5)
"""Of the evaluations of training steps 6, 1, 2, 3, ...; schedules may follow them."""


def begin(spec, start=None, steps=20):
    """Return the state of a run before its first step, as a run builds it."""
    torch.manual_seed(0)
    precision = build_group("precision", spec.precision)
    model = (
        ModelBuilder(spec, precision, start=start, restore_exactly=start is not None)
        .build(CPU)
        .model
    )
    return build_state(TrainingSetup(spec, precision, Classification(), CPU), model, steps)


def train(state, steps=1, qualities=QUALITIES):
    """Take steps, each followed by an evaluation, and return the state."""
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(8, 1, 8, 8, generator=generator)
        with state.precision.session(state.model, CPU):
            train_step(state, [(inputs, torch.arange(8) % 10)])
        state.record_evaluation({"val/accuracy": qualities[state.step % len(qualities)]})
    return state


def save(state, spec):
    """Return a checkpoint of a state."""
    course = state_dict.state_dict(state, ())
    content = copy.deepcopy(checkpoint_state_dict(state, spec, resume_state=course))
    return LoadedCheckpoint(Path("x.pt"), content)


def resume_halfway(spec, split=2, steps=2):
    """Return the states of a run and of one that was resumed at a step, which end bit by bit as
    the same."""
    straight = train(begin(spec), split)
    saved = save(straight, spec)
    continued = begin(spec, saved)
    assert state_dict.restore(continued, saved, spec, ()) == []
    ends = [save(train(state, steps), spec) for state in (straight, continued)]
    check_same_checkpoints(*(end.content for end in ends))
    return straight, continued
