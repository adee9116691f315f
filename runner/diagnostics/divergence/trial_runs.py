"""Run an execution's forward and backward so that its model is left as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from runner.data.batch_layout import Batch
from runner.diagnostics.divergence.reference import set_generator_states
from runner.diagnostics.divergence.roundoffs import Execution
from runner.precision.contract import Precision
from runner.training.state import saved_state
from runner.training.step import backpropagate, loss_of


@contextmanager
def trial_run(execution: Execution, generators: list[Tensor]) -> Iterator[None]:
    """Return the context of one forward and backward, which leaves the model as it was."""
    restore = saved_state(execution.state)
    try:
        with _computing(execution, generators):
            yield
    finally:
        restore()


@contextmanager
def _computing(execution: Execution, generators: list[Tensor]) -> Iterator[None]:
    """Return the context of one forward and backward in training mode, from no gradients."""
    model = execution.state.plain_model
    for parameter in model.parameters():
        parameter.grad = None
    set_generator_states(generators, execution.device)
    model.train()
    with execution.precision.session(model, execution.device):
        yield


def settle_own_scales(execution: Execution, batch: Batch, generators: list[Tensor]) -> None:
    """Let a precision that scales by past steps, and has seen none, see the batch once: its first
    scales of 1 would lose what later ones keep."""
    precision, model = execution.precision, execution.state.plain_model
    has_state = type(precision).state_dict is not Precision.state_dict
    if has_state and not precision.state_dict(model):
        with _computing(execution, generators):
            backpropagate(execution.state, loss_of(execution.state, *batch) * execution.scale)


def with_settled_scale(execution: Execution, batch: Batch, generators: list[Tensor]) -> Execution:
    """Return the execution at a loss scale at which no gradient overflows, as a run's loss scale
    is after its first steps; at its own, where none is found."""
    model = execution.state.plain_model
    settled = execution
    while settled.scale > 1.0:
        with trial_run(settled, generators):
            backpropagate(settled.state, loss_of(settled.state, *batch) * settled.scale)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if all(gradient.isfinite().all() for gradient in gradients):
                return settled
        settled = replace(settled, scale=settled.scale / 2)
    return execution
