"""Set a model to the mode in which its task evaluates it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from runner.training.tasks.task import Task
from runner.utils.reproducibility import rng_state, seed_all, set_rng_state

_RANDOM_DEPTH = ("StochasticDepth", "DropPath")
"""Classes of torchvision and timm that leave out branches at random in training mode."""
_SEED = 0


@contextmanager
def evaluation_mode(model: nn.Module, task: Task, device: torch.device) -> Iterator[None]:
    """Set a model to evaluation mode; the caller sets it back to training mode.

    For a task that evaluates losses, the modules are in training mode, in which detection models
    return losses. Those in which the mode decides about more are in evaluation mode: batch and
    instance normalisations, which neither use nor change the batch's statistics, and dropout. What
    is drawn at random (a detection model samples the proposals of its loss) is drawn from one seed
    in each evaluation, and all generators are restored.

    Args:
        model: changed in place.
        task: of the run.
        device: whose generator is restored.
    """
    model.eval()
    if not task.evaluates_losses:
        yield
        return
    model.train()
    for module in model.modules():
        is_random = isinstance(module, _DropoutNd) or type(module).__name__ in _RANDOM_DEPTH
        if is_random or isinstance(module, _NormBase):
            module.eval()
    drawn = rng_state(device)
    seed_all(_SEED)
    try:
        yield
    finally:
        set_rng_state(drawn, device)
