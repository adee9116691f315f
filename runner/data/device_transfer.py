"""Bring batches to the run's device: hold a whole data set there, or copy batch by batch.

Data that fit are held on the device, so that an epoch copies indices only. Other batches are copied
on a stream of their own while the previous batch is computed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import TensorDataset

from runner.config.schema import AUTO
from runner.utils.errors import ConfigError

MAX_MEMORY_SHARE = 0.1  # of a GPU's free memory that train.data_on_device=auto takes


def hold_on_device(dataset: Any, device: torch.device, wanted: bool | str) -> Any:
    """Return a copy of an in-memory data set on the device, or None where it stays on the host.

    Args:
        dataset: a TensorDataset, or one with `batch(indices)`, `nbytes` and `to(device)`.
        device: of the run.
        wanted: train.data_on_device: true, false, or auto, which holds data on a GPU where they
            take less than MAX_MEMORY_SHARE of its free memory.

    Raises:
        ConfigError: wanted is true, and the data are not in memory.
    """
    size = _bytes_in_memory(dataset)
    if wanted is True and size is None:
        raise ConfigError(
            "train.data_on_device=true needs data that are in memory, a TensorDataset; this is a "
            f"{type(dataset).__name__}. Type train.data_on_device=auto."
        )
    if wanted == AUTO:
        # On a CPU there is nothing to gain, and other accelerators do not report free memory.
        wanted = size is not None and device.type == "cuda" and size < _memory_limit(device)
    if not wanted:
        return None
    if type(dataset) is TensorDataset:
        return TensorDataset(*(tensor.to(device) for tensor in dataset.tensors))
    return dataset.to(device)


def _bytes_in_memory(dataset: Any) -> int | None:
    """Return the bytes of a data set's tensors; None where it is not in memory.

    A subclass of TensorDataset may override __getitem__, so only the class itself is sliced.
    """
    if type(dataset) is TensorDataset:
        return sum(tensor.nbytes for tensor in dataset.tensors)
    return getattr(dataset, "nbytes", None)


def _memory_limit(device: torch.device) -> float:
    """Return how many bytes of a GPU a data set may take with train.data_on_device=auto."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return MAX_MEMORY_SHARE * free_bytes


def move_batches(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches, nested or not, with their tensors on the device."""
    if device.type == "cuda":
        yield from _copy_to_gpu(batches, device)
        return
    for batch in batches:
        yield tree_map(lambda value: _to_device(value, device), batch)


def _copy_to_gpu(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield batches that are copied from pinned memory while the GPU computes the previous one."""
    copy_stream = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(copy_stream):
            copied = tree_map(lambda value: _to_device(value, device, pin=True), batch)
        compute_stream = torch.cuda.current_stream(device)
        compute_stream.wait_stream(copy_stream)
        for value in tree_leaves(copied):
            if isinstance(value, Tensor):
                # The allocator must not reuse the memory before the computation has read it.
                value.record_stream(compute_stream)
        yield copied


def _to_device(value: Any, device: torch.device, pin: bool = False) -> Any:
    """Return a tensor on the device, copied without waiting; any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    source = value.pin_memory() if pin else value
    return source.to(device, non_blocking=True)
