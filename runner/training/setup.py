"""Assemble what a model is trained or evaluated with: its optimizers and the training state.

Every mode and the memory forecast build their state here, so that they cannot drift apart: a replay
that assembled its optimizer in another order than training would not be bit-exact.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from runner.config.schema import RunSpec
from runner.distributed.strategy import Single, Strategy
from runner.precision.contract import Precision
from runner.training.optimizers import build_scheduled_optimizers
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.tasks.task import Task
from runner.training.weight_average import WeightAverage
from runner.utils.tensors import narrow_parameters


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of a run that exist before its model does.

    Attributes:
        spec: the run's config; its optimizer, scheduler and train sections are read.
        precision: converts the model and makes the loss scale.
        task: loss and metrics.
        device: where the model computes.
        strategy: how the processes of the run share the model.
    """

    spec: RunSpec
    precision: Precision
    task: Task
    device: torch.device
    strategy: Strategy = field(default_factory=Single)


def build_state(
    setup: TrainingSetup, model: nn.Module, total_steps: int | None = None
) -> TrainState:
    """Build the state that the training step and the evaluation work on.

    The model is not compiled here: prepare_model does that after the first forward, which must
    still show the dtypes of each module.

    Args:
        setup: the parts of the run.
        model: converted and on its device; sharded, where the strategy shards. Another strategy
            wraps it if it is to be trained.
        total_steps: optimizer steps of the whole run, which schedules need; None builds no
            optimizers, for a model that is only evaluated.

    Raises:
        ConfigError: nothing is trainable, or an optimizer or the strategy does not fit the model or
            the precision.
    """
    spec = setup.spec
    precision = setup.precision
    wrapped = model
    optimizers: list[ScheduledOptimizer] = []
    if total_steps is not None:
        if not setup.strategy.shards:
            wrapped = setup.strategy.wrap(model, setup.device)
        direction = setup.task.direction
        optimizers = build_scheduled_optimizers(spec, model, precision, total_steps, direction)
    average = None
    if optimizers and spec.train.ema is not None:
        average = WeightAverage(model, [part.params for part in optimizers], spec.train.ema)
    # FSDP adds them in float32 by itself.
    is_wide = spec.train.accumulate_float32 and not setup.strategy.shards
    widened = narrow_parameters(p for part in optimizers for p in part.params) if is_wide else ()
    return TrainState(
        wrapped,
        precision,
        setup.task,
        precision.scale(setup.device),
        optimizers,
        setup.device,
        spec.train.clip_norm,
        setup.strategy,
        clip_value=spec.train.clip_value,
        average=average,
        widened=widened,
        seed=spec.seed,
    )
