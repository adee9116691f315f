"""Building a model that does not fit in memory before it is packed: the weights of its linear
layers lie in files until the conversion takes them, one at a time.

Packing a weight as soon as it is made would be wrong: constructors initialise their layers again
at the end (GPT-2's does), tie them, and nobody knows yet which ones are left unconverted.
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
    """Context around a model's construction. Every float weight of a new nn.Linear or Conv1D on the
    CPU is mapped from a file of its own, already unlinked, whose pages the system may write out;
    the parameter object and its values are the ordinary ones.

    The files lie in $TMPDIR, else in /var/tmp, which is on a disk where /tmp may be memory.
    """

    def __init__(self) -> None:
        self._spilled: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
        self._stack: list[Any] = []

    def __enter__(self) -> None:
        here = torch.device("cpu")
        here.__enter__()
        self._stack.append((here, register_module_parameter_registration_hook(self._spill)))

    def __exit__(self, *error: Any) -> None:
        here, handle = self._stack.pop()
        handle.remove()
        here.__exit__(*error)

    def _spill(self, module: nn.Module, name: str, parameter: Any) -> None:
        fits = isinstance(parameter, nn.Parameter) and parameter.is_floating_point()
        if not fits or type(module) not in linear_classes() or name != "weight":
            return
        if (
            parameter.device.type != "cpu"
            or id(parameter) in self._spilled
            or parameter.numel() == 0
        ):
            return
        self._spilled[id(parameter)] = parameter
        parameter.data = _mapped(parameter.shape, parameter.dtype).copy_(parameter.data)

    def take_back(self, model: nn.Module) -> None:
        """Bring weights that no conversion took into memory, and forget the others."""
        for parameter in model.parameters():
            if id(parameter) in self._spilled:
                parameter.data = parameter.data.clone()
        self._spilled.clear()


def _mapped(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    folder = os.environ.get("TMPDIR") or ("/var/tmp" if Path("/var/tmp").is_dir() else None)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="weight-") as file:
        size = shape.numel()
        try:  # else a full disk would be a bus error at the first write
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
        except OSError as error:
            where = Path(file.name).parent
            raise ConfigError(
                f"init.low_memory=true keeps float32 weights in files, and {where} has no room for"
                f" {size * dtype.itemsize / 2**20:.0f} MiB more "
                f"({error.strerror}). Set TMPDIR to a folder on a larger disk."
            ) from error
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
