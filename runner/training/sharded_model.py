"""Build a model of which every process holds its shards only.

Only the main process makes the weights, in the memory of its host, so that they are those of a run
of one process. The others build the model on the meta device, shard it, and receive their shards.
No device ever holds more than the shards and one unit, and each host holds one whole model at most.
"""

import torch
from torch import Tensor

from runner.distributed.strategy import Strategy
from runner.precision.contract import Precision
from runner.training.meta_model import ModelBuilder, build_on_meta, holds_other_meta_tensors
from runner.training.model import BuiltModel

_CPU = torch.device("cpu")


def build_for_strategy(
    build: ModelBuilder, precision: Precision, strategy: Strategy, device: torch.device
) -> BuiltModel:
    """Build a model on its device, sharded where the strategy shards; see build_sharded_model."""
    if strategy.shards:
        return build_sharded_model(build, precision, strategy, device)
    return build(device, None)


def build_sharded_model(
    build: ModelBuilder, precision: Precision, strategy: Strategy, device: torch.device
) -> BuiltModel:
    """Build a model, shard it, and give every process the main process's values. Collective.

    Args:
        build: builds and converts the whole model.
        precision: of the run.
        strategy: shards the model.
        device: of this process, where its shards are.

    Raises:
        ConfigError: the model cannot be built, or does not fit the weights that it starts from.
    """
    from runner.distributed.fsdp import named_values, scatter_values

    # What packs weights looks at their values.
    makes_once = strategy.cpu_ram_efficient_loading and not precision.freezes
    built = _build_whole(build, strategy.place.is_main or not makes_once)
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


def _build_whole(build: ModelBuilder, has_values: bool) -> BuiltModel:
    """Return the whole model: on the host with its values, or without values."""
    if has_values:
        return build(_CPU, None)
    built = build_on_meta(build)
    if holds_other_meta_tensors(built.model):
        return build(_CPU, None)
    return built
