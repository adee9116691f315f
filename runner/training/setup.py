"""Assemble what a run computes with: the model's weights, the optimizers and the training state.

Training, evaluation, replay, rewinding to a step and the memory forecast all build their state
here, so that they cannot drift apart: a replay that assembled its optimizer in another order than
training would not be bit-exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config.schema import RunSpec
from runner.distributed.strategy import Single, Strategy
from runner.precision.contract import Precision
from runner.training.initial_weights import read_initial_weights
from runner.training.model import BuiltModel, build_model
from runner.training.optimizers import build_scheduled_optimizers
from runner.training.sharded_model import build_for_strategy
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.tasks.task import Task
from runner.training.weight_average import WeightAverage


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


def model_builder(
    spec: RunSpec,
    precision: Precision,
    device: torch.device,
    resumed: LoadedCheckpoint | None = None,
    strategy: Strategy | None = None,
) -> Callable[[], BuiltModel]:
    """Return a function that builds the model that training starts from.

    Args:
        spec: its model, adapter and init sections are read.
        precision: converts the model.
        device: where the model ends up.
        resumed: a checkpoint whose weights, packing and adapter are restored exactly as they were;
            None starts from init.weights, or from seeded weights.
        strategy: shards the model, where it is one that shards; None for one process.

    Raises:
        ConfigError: init.weights names no checkpoint.
    """
    # A function, because a conversion is proven by a forward, after which the model may have to be
    # built a second time. The checkpoint is read once, here.
    start = resumed or read_initial_weights(spec)
    build = partial(build_model, spec, precision, start=start, restore_exactly=resumed is not None)
    return partial(build_for_strategy, build, precision, strategy or Single(), device)


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
        optimizers = build_scheduled_optimizers(
            spec, model, precision, total_steps, setup.task.direction
        )
    average = None
    if optimizers and spec.train.ema is not None:
        average = WeightAverage(model, [part.params for part in optimizers], spec.train.ema)
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
    )
