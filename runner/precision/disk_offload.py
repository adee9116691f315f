"""Build a model that is larger than memory, with the weights of its linear layers in files.

For `init.low_memory=true` with packed (4-bit and 8-bit) weights: the conversion then reads one
weight at a time and packs it. Packing a weight as soon as it is made would be wrong: constructors
initialise their layers again at the end (GPT-2's does) and tie them, and it is not known yet which
ones will not be converted.
"""

import os
import tempfile
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from runner.precision.layers.conv1d import linear_classes
from runner.utils.errors import ConfigError


class DiskOffload:
    """A context around a model's construction that keeps the weights of linear layers in files.

    Every float weight of a new nn.Linear or Conv1D on the CPU is mapped from a file of its own,
    already unlinked, whose pages the system may write out; the parameter object and its values are
    the ordinary ones. The files are in $TMPDIR, else in /var/tmp, which is on a disk where /tmp may
    be memory.
    """

    def __init__(self) -> None:
        # By id, and weak: a packed weight's file must go with its parameter.
        self._offloaded: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
        self._stack: list[Any] = []

    def __enter__(self) -> None:
        # Contexts may nest, and each exit undoes the latest entry. The weights are made on the CPU,
        # because only its memory can be mapped from a file.
        cpu = torch.device("cpu")
        cpu.__enter__()
        self._stack.append((cpu, register_module_parameter_registration_hook(self._offload)))

    def __exit__(self, *error: Any) -> None:
        cpu, handle = self._stack.pop()
        handle.remove()
        cpu.__exit__(*error)

    def _offload(self, module: nn.Module, name: str, parameter: Any) -> None:
        if name != "weight" or type(module) not in linear_classes():
            return
        if not isinstance(parameter, nn.Parameter) or not parameter.is_floating_point():
            return
        if parameter.device.type != "cpu" or parameter.numel() == 0:
            return
        # It is tied to a layer that was built before.
        if id(parameter) in self._offloaded:
            return
        self._offloaded[id(parameter)] = parameter
        parameter.data = _mapped_tensor(parameter.shape, parameter.dtype).copy_(parameter.data)

    def load_unconverted(self, model: nn.Module) -> None:
        """Copy the weights that were not converted from their files into memory, and forget the
        others."""
        for parameter in model.parameters():
            if id(parameter) in self._offloaded:
                parameter.data = parameter.data.clone()
        self._offloaded.clear()


def _mapped_tensor(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor whose memory is an unlinked file.

    Raises:
        ConfigError: the disk is full.
    """
    folder = os.environ.get("TMPDIR") or ("/var/tmp" if Path("/var/tmp").is_dir() else None)
    # The mapping holds the file's pages after its name is removed at the end of the block.
    with tempfile.NamedTemporaryFile(dir=folder, prefix="weight-") as file:
        size = shape.numel()
        # Without room reserved, a full disk would be a bus error at the first write.
        try:
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
        except OSError as error:
            where = Path(file.name).parent
            raise ConfigError(
                f"init.low_memory=true keeps float32 weights in files, and {where} has no room for"
                f" {size * dtype.itemsize / 2**20:.0f} MiB more "
                f"({error.strerror}). Set TMPDIR to a folder on a larger disk."
            ) from error
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
