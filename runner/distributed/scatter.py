"""Give every process its shards of values that only the main process holds."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from runner.distributed.strategy import is_sharded


def named_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model by name, buffers that are not saved included."""
    yield from model.named_parameters()
    # A buffer that modules share is one object on the main process only, so each name counts.
    yield from model.named_buffers(remove_duplicate=False)


@torch.no_grad()
def scatter_values(model: nn.Module, values: dict[str, Tensor], device: torch.device) -> None:
    """Copy the main process's values into the shards and buffers of all processes. Collective.

    Args:
        model: sharded, with storage on the device; its values are overwritten.
        values: on the main process the whole tensors by name, on any device, each removed once it
            is sent; empty on the others.
        device: on which the model's shards are. One whole tensor at a time lies there.
    """
    for name, tensor in named_values(model):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if name in values:
            whole.copy_(values.pop(name))
        if is_sharded(tensor):
            shard = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(shard.to_local())
        else:
            dist.broadcast(whole, 0)
            tensor.copy_(whole)
