"""Name and measure dtypes, and count the elements and bytes that tensors hold in memory, packed and
wrapped ones included."""

import math
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

CPU_DEVICE = torch.device("cpu")

TORCH_VERSION: Any = TorchVersion(torch.__version__)
"""Compares with a tuple, as `TORCH_VERSION < (2, 14)`."""

# Attributes in which bitsandbytes keeps the tensors of a quantized weight other than its codes.
_SCALES = ("absmax", "code", "offset", "state2")


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix, as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to nearest: half the spacing at 1; 0 for
    integers."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return torch.finfo(dtype).eps / 2


def real_view(tensor: Tensor) -> Tensor:
    """Return a complex tensor's real and imaginary parts, [..., 2]; any other tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def memory_of(value: object) -> int:
    """Return the address of a plain tensor's storage, which views of it share; 0 for others."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:  # type: ignore[attr-defined]
        return 0
    # torch.func wraps what it differentiates; the tensor inside has the storage.
    if functorch.is_functorch_wrapped_tensor(value):
        return memory_of(functorch.get_unwrapped(value))
    return value.untyped_storage().data_ptr()  # type: ignore[attr-defined]


def tensor_bytes(*tensors: Tensor) -> int:
    """Return the bytes of the tensors' storages, each storage counted once.

    A wrapper (torchao's OptimState4bit, DTensor) counts as the tensors inside it, a 4-bit or 8-bit
    weight of bitsandbytes as its codes and its scales. Tensors on the meta device count what they
    would hold.
    """
    storages: dict[object, int] = {}
    for tensor in tensors:
        for part in inner_tensors(tensor):
            if part.layout is not torch.strided:  # sparse: no storage of its own
                storages[id(part)] = part.numel() * part.element_size()
                continue
            storage = part.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; a shared one counts once."""
    return tensor_bytes(*model.parameters(), *model.buffers())


def float32_bytes(model: nn.Module) -> int:
    """Return the bytes of a plain model's parameters and buffers with floating ones in float32."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    total = 0
    for tensor in tensors.values():
        element_size = 4 if tensor.is_floating_point() else tensor.element_size()
        total += count_elements(tensor) * element_size
    return total


def count_elements(parameter: Tensor) -> int:
    """Return the number of elements of a parameter; a 4-bit one packs two in a byte."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return math.prod(state.shape)
    # Bytes cannot train: a parameter of bytes holds the codes of runner.precision.layers.
    if isinstance(parameter, nn.Parameter) and parameter.dtype is torch.uint8:
        return 2 * parameter.numel()
    return 0 if is_lazy(parameter) else parameter.numel()


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of; none for a lazy one without a shape."""
    if is_lazy(tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # a DTensor names its mesh, too
                yield from inner_tensors(inner)
        return
    yield tensor
    state = getattr(tensor, "quant_state", None)  # Params4bit, once quantized
    while state is not None:  # doubly quantized: the scales have scales
        yield from _tensors_among(state, _SCALES)
        state = getattr(state, "state2", None)
    yield from _tensors_among(tensor, ("CB", "SCB"))  # Int8Params, once quantized


def _tensors_among(holder: object, names: Iterable[str]) -> Iterator[Tensor]:
    """Yield those of an object's attributes that it has and that are tensors."""
    parts = (getattr(holder, name, None) for name in names)
    return (part for part in parts if isinstance(part, Tensor))


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on MPS and TPUs, which have no units for float64."""
    return torch.float32 if device.type in ("mps", "tpu") else torch.float64


MIB = 2**20
GIB = 2**30


def cast_gradients(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> None:
    """Cast the gradients of parameters, and have later backwards add to them, in this dtype.

    Args:
        params: changed in place.
        dtype: None for that of each parameter.
    """
    for p in params:
        # torch refuses a gradient of another dtype than grad_dtype.
        grad, p.grad = p.grad, None
        p.grad_dtype = dtype or p.dtype
        if grad is not None:
            p.grad = grad.to(p.grad_dtype)


def narrow_parameters(params: Iterable[Tensor]) -> set[Tensor]:
    """Return the trainable parameters that are floats of 16 bits."""
    return {p for p in params if p.requires_grad and is_narrow(p)}


def is_narrow(tensor: Tensor) -> bool:
    """Return whether a tensor is of floats of 16 bits."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def is_sharded(value: object) -> TypeGuard["DTensor"]:
    """Return whether a value is a DTensor, of which each process holds a shard."""
    # Importing DTensor for isinstance would cost every run more than a second.
    return isinstance(value, Tensor) and hasattr(value, "to_local")


class HostFlag:
    """A scalar flag that is copied from the device to the host in the background.

    Reading it waits for the copy alone, not for what was queued on the device after it. On the CPU
    its memory is read in place.
    """

    __slots__ = ("_event", "_value")

    def __init__(self, flag: Tensor) -> None:
        self._event = None
        if flag.device.type == "cuda":
            self._value = torch.empty((), dtype=flag.dtype, pin_memory=True)
            self._value.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            # The same tensor where the flag is in host memory already.
            self._value = flag.cpu()

    @property
    def is_set(self) -> bool:
        """Return whether the flag is not zero; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._value.numpy()[()] != 0.0)


def as_number(value: Any) -> float | None:
    """Return a number, or a tensor of one number, as a float; None for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, Real) else None
