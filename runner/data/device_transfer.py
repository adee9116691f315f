"""How batches come to the run's device: held there from the start, or one by one beside it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import TensorDataset

from runner.config.schema import AUTO
from runner.utils.errors import ConfigError
from runner.utils.tpu import launch_operations

SHARE = 0.1  # of a device's free memory that a data set may take unasked


def hold_on_device(dataset: Any, device: torch.device, wanted: bool | str) -> Any:
    """A data set in memory, its tensors on the device; None where it stays on the host.

    Args:
        dataset: a TensorDataset, or one with `batch(indices)`, `nbytes` and `to(device)`.
        device: of the run.
        wanted: true, false, or auto, which takes a GPU's free memory up to SHARE.

    Raises:
        ConfigError: wanted, and not in memory.
    """
    in_memory = type(dataset) is TensorDataset
    size = sum(t.nbytes for t in dataset.tensors) if in_memory else getattr(dataset, "nbytes", None)
    if wanted is True and size is None:
        raise ConfigError(
            "train.data_on_device=true holds data that are in memory, a TensorDataset; this is a "
            f"{type(dataset).__name__}. Type train.data_on_device=auto."
        )
    if wanted == AUTO:
        wanted = size is not None and device.type == "cuda" and size < _room(device)
    if not wanted:
        return None
    if in_memory:
        return TensorDataset(*(t.to(device) for t in dataset.tensors))
    return dataset.to(device)


def _room(device: torch.device) -> float:
    return SHARE * torch.cuda.mem_get_info(device)[0]


def move_batches(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device. A GPU copies each beside what it computes meanwhile: from pinned
    memory, in a stream of its own, which the computing one waits for."""
    if device.type != "cuda":
        for batch in batches:
            launch_operations(device)  # what was asked of the batch before this one
            yield tree_map(lambda value: _to(value, device), batch)
        return
    stream = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(stream):
            there = tree_map(lambda value: _to(value, device, pinned=True), batch)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        for value in tree_leaves(there):
            if isinstance(value, Tensor):
                value.record_stream(computing)  # its memory is used again only after that
        yield there


def _to(value: Any, device: torch.device, pinned: bool = False) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.pin_memory() if pinned else value).to(device, non_blocking=True)
