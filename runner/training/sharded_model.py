"""Build a model without values, or one of which every process holds its shards only.

Of a sharded model only the main process makes the weights, in the memory of its host, so that they
are those of a run of one process. The others build the model on the meta device, shard it, and
receive their shards. No device ever holds more than the shards and one unit, and each host holds
one whole model at most.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.distributed.strategy import Strategy
from runner.precision.contract import Precision
from runner.training.model import BuiltModel
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
    if strategy.rank.is_main or not makes_once:
        built = build(_CPU, None)
    else:
        built = build_on_meta(build)
        if _holds_other_meta_tensors(built.model):
            built = build(_CPU, None)
    sends = makes_once and strategy.rank.world_size > 1
    values: dict[str, Tensor] = {}
    if sends and strategy.rank.is_main:
        values = {name: tensor.detach() for name, tensor in named_values(built.model)}
    model = strategy.wrap(built.model, device)
    if any(tensor.is_meta for _, tensor in named_values(model)):
        model.to_empty(device=device)
    model = model.to(device)
    if sends:
        scatter_values(model, values, device)
    return built._replace(model=model)
