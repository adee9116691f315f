"""Assemble what a run computes with: the model's weights, the optimizers and the training state.

Training, evaluation, replay, rewinding to a step and the memory forecast all build their state
here, so that they cannot drift apart: a replay that assembled its optimizer in another order than
training would not be bit-exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config.schema import RunSpec
from runner.distributed.strategy import Single, Strategy
from runner.precision.contract import Precision
from runner.training.initial_weights import read_initial_weights
from runner.training.model import BuiltModel, build_model
from runner.training.optimizers import build_scheduled_optimizers
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.tasks.task import Task
from runner.training.weight_average import WeightAverage
from runner.utils.errors import RunnerError

META_DEVICE = torch.device("meta")
_CPU = torch.device("cpu")

ModelBuilder = Callable[[torch.device, torch.device | None], BuiltModel]
"""Builds a model, given the device where it ends up and the one on which its parameters are made;
None for the CPU."""


def build_on_meta(build: ModelBuilder) -> BuiltModel:
    """Build and convert a model on the meta device; on the CPU if its code reads values.

    Args:
        build: see ModelBuilder.

    Raises:
        ConfigError: the model cannot be built, or does not fit the weights that it starts from.
    """
    try:
        return build(META_DEVICE, META_DEVICE)
    except RunnerError:
        raise
    except (NotImplementedError, RuntimeError):
        return build(_CPU, None)


def _holds_other_meta_tensors(model: nn.Module) -> bool:
    """Return whether a module has a meta tensor that is neither a parameter nor a buffer.

    Nothing gives such a tensor its values later.
    """
    registered = ("_parameters", "_buffers", "_modules")
    for module in model.modules():
        attributes = {key: value for key, value in vars(module).items() if key not in registered}
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(attributes)):
            return True
    return False


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


def build_for_strategy(
    build: ModelBuilder, precision: Precision, strategy: Strategy, device: torch.device
) -> BuiltModel:
    """Build a model on its device; where the strategy shards, all processes must call it together.

    Of a sharded model only the main process makes the weights, in the memory of its host, so that
    they are those of a run of one process. The others build the model on the meta device, shard it,
    and receive their shards. No device ever holds more than the shards and one unit, and each host
    holds one whole model at most.

    Args:
        build: builds and converts the whole model.
        precision: of the run.
        strategy: may shard the model.
        device: of this process, where the model or its shards are.

    Raises:
        ConfigError: the model cannot be built, or does not fit the weights that it starts from.
    """
    if not strategy.shards:
        return build(device, None)
    from runner.distributed.scatter import named_values, scatter_values

    # What packs weights looks at their values.
    makes_once = strategy.cpu_ram_efficient_loading and not precision.freezes
    if strategy.place.is_main or not makes_once:
        built = build(_CPU, None)
    else:
        built = build_on_meta(build)
        if _holds_other_meta_tensors(built.model):
            built = build(_CPU, None)
    sends = makes_once and strategy.place.world_size > 1
    values: dict[str, Tensor] = {}
    if sends and strategy.place.is_main:
        values = {name: tensor.detach() for name, tensor in named_values(built.model)}
    model = strategy.wrap(built.model, device)
    if any(tensor.is_meta for _, tensor in named_values(model)):
        model.to_empty(device=device)
    model = model.to(device)
    if sends:
        scatter_values(model, values, device)
    return built._replace(model=model)
