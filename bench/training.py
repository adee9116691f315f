"""Trainings that several benchmarks measure: the state of a model with AdamW, a GPT's batch."""

import torch
from torch import Tensor, nn

from runner.core.loop.task import Task
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.core.policy.precision import Precision
from runner.training.own_state import own_hooks

CPU = torch.device("cpu")
VOCABULARY = 256


def training_state(
    model: nn.Module, precision: Precision, task: Task, device: torch.device = CPU, **adamw: float
) -> TrainState:
    """Return the state of a converted model that torch's fused AdamW trains.

    Args:
        adamw: its options, for example lr.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True, **adamw)  # type: ignore[arg-type]
    optimizers = [ScheduledOptimizer(optimizer)]
    state = TrainState(model, precision, task, precision.scale(device), optimizers, device)
    state.hooks.add(*own_hooks(state))
    return state


def random_tokens(examples: int, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of random sequences, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (examples, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
