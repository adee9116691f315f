"""Hash an example of a data set, or a batch, by its content."""

from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_dense_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor whose elements lie in one array: no sparse or nested
    one."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def value_digest(value: Any) -> bytes:
    """Return the digest of a value; that of nothing where it cannot be hashed."""
    content = blake2b()
    with suppress(Exception):  # of whatever type the value's own class raises
        hash_value(content, value)
        return content.digest()
    return bytes(content.digest_size)


def hash_value(content: Any, value: Any) -> None:
    """Add a sample to a hash: tensors and arrays by dtype, shape and bytes, nests by their parts.

    An object without bytes is added by the name of its type.

    Args:
        content: a hash object of hashlib.
        value: the sample, or a part of it.
    """
    if str(getattr(value, "dtype", "")) == "object":
        value = value.tolist()  # numpy's bytes of objects are their addresses
    if is_dense_tensor(value):
        value = value.detach().cpu().contiguous()
        content.update(f"{value.dtype} {list(value.shape)} ".encode())
        content.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            content.update(f"{key}: ".encode())
            hash_value(content, value[key])
    elif isinstance(value, list | tuple):
        content.update(f"{len(value)} ".encode())
        for part in value:
            hash_value(content, part)
    elif isinstance(value, str | bytes | int | float | complex | None):
        content.update(f"{value!r} ".encode())
    elif not isinstance(value, Tensor) and hasattr(value, "tobytes"):  # of numpy, of Pillow
        facts = [str(getattr(value, key, "")) for key in ("dtype", "shape", "mode", "size")]
        content.update(" ".join([type(value).__name__, *facts]).encode())
        content.update(value.tobytes())
    else:
        # repr() would hold an address, which differs in each process.
        content.update(type(value).__name__.encode())
