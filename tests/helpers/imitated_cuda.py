"""Tensors that say that they are on a GPU and compute on the CPU.

A `CudaTensor` takes the code's paths for a device of type cuda: placement, transfers, fused
optimizers, contexts, layers that choose by device. It refuses operands on two devices, as a GPU
does, and computes with the CPU's kernels: it shows devices and dtypes, not a GPU's numbers, speed
or streams. Autocast follows the CPU's lists. torch's FakeTensorMode does not suffice: it has no
values, which packed weights, loss scales and checks of finiteness need, and no backward without a
driver.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from unittest import mock

import torch
import torch._dynamo  # before torch is patched
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
MIXED = {"copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_"}
"""Operations that take operands on two devices."""
TENSOR, TO, MAKE_SUBCLASS = torch.tensor, Tensor.to, Tensor._make_subclass
AUTOCAST = torch.autocast
AUTOCAST_ENABLED, AUTOCAST_DTYPE = torch.is_autocast_enabled, torch.get_autocast_dtype


class CudaTensor(Tensor):
    """A tensor of device cuda:0 whose values are on the CPU, where torch's C++ side sees it."""

    @staticmethod
    def __new__(cls, values):
        made = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CPU,
            requires_grad=values.requires_grad,
        )
        made.held = values
        return made

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def data(self):
        return CudaTensor(self.held.detach())

    @data.setter
    def data(self, other):
        Tensor.data.__set__(self, other)
        self.held = other.held

    def cpu(self):
        return self.to(CPU)

    def to(self, *args, copy=False, **keywords):
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype)
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **keywords)
        if device is not None and device.type == "cpu":
            return self.detach().held.clone().to(dtype or self.dtype)
        is_same = dtype in (None, self.dtype) and not copy
        return self if is_same else super().to(dtype or self.dtype, copy=copy)

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), CudaTensor(self.held.clone()))

    def __reduce_ex__(self, protocol):
        return self.held.detach().__reduce_ex__(protocol)

    def tolist(self):
        return self.held.tolist()

    def data_ptr(self):
        return self.held.data_ptr()

    def record_stream(self, stream):
        pass

    def __repr__(self):
        return f"CudaTensor({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """Run an operation on the values; its results are where a GPU would have them."""
    operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    on_cuda = [isinstance(each, CudaTensor) for each in operands]
    if any(on_cuda) and func.overloadpacket.__name__ not in MIXED:
        others = [each for each in operands if not isinstance(each, CudaTensor) and each.dim()]
        if others:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
    asked = kwargs.get("device")
    inner = tree_map(
        lambda each: each.held if isinstance(each, CudaTensor) else each, (args, kwargs)
    )
    inner[1].pop("pin_memory", None)
    if asked is not None:
        inner[1]["device"] = CPU
    out = func(*inner[0], **inner[1])
    # Where no operand says so, a device of C++ is the one that was asked for.
    if func.overloadpacket.__name__ == "copy_":
        is_cuda = on_cuda[0]
    else:
        is_cuda = any(on_cuda) or (asked is not None and torch.device(asked).type == "cuda")
    if not is_cuda:
        return out
    out = tree_map(lambda each: CudaTensor(each) if isinstance(each, Tensor) else each, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if any(on_cuda) else out


class _Factories(TorchDispatchMode):
    """Sees the operations without an operand on the GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class Stream:
    """A stream or an event whose work is done when it is asked for."""

    def __init__(self, device=None, **keywords):
        pass

    def record(self, stream=None):
        pass

    wait_stream = wait_event = record

    def synchronize(self):
        pass

    def query(self):
        return True

    def is_capturing(self):
        return False


class Generator(torch.Generator):
    """A generator of the CPU, on whatever device it was asked for."""

    def __new__(cls, device=None):
        return super().__new__(cls)


def _to(self, *args, **keywords):
    """Take the device of another tensor from Python; C++ sees that of its values."""
    if args and isinstance(args[0], CudaTensor):
        args = (CUDA, args[0].dtype, *args[1:])
    return TO(self, *args, **keywords)


def _one_hot(numbers, count):
    """Compare the numbers with a range on their device; C++ makes it on that of their values."""
    return (numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)).long()


def _tensor(values, device=None, **keywords):
    made = TENSOR(values, **keywords)
    return made if device is None else made.to(device)


def _make_subclass(cls, data, requires_grad=False, **kwargs):
    """bitsandbytes makes its parameters of a tensor's own memory, which a wrapper does not have."""
    if not isinstance(data, CudaTensor):
        return MAKE_SUBCLASS(cls, data, requires_grad, **kwargs)
    return CudaTensor.__new__(cuda_kind(cls), data.held)


@cache
def cuda_kind(cls):
    """A library's own kind of parameter, on the GPU."""
    own = {"detach": _detach, "__deepcopy__": _copy, "__reduce_ex__": CudaTensor.__reduce_ex__}
    return type(cls.__name__, (cls, CudaTensor), own)


def _copy(parameter, memo):
    return memo.setdefault(id(parameter), _detach(parameter, parameter.held.clone()))


def _detach(parameter, held=None):
    """What Module.to makes a parameter of is of the same kind."""
    made = CudaTensor.__new__(type(parameter), (parameter.held if held is None else held).detach())
    vars(made).update({**vars(parameter), "held": made.held})
    return made


def _on_cpu(function):
    """The function of torch's that takes a device's type first, asked for the CPU."""
    return lambda device_type="cuda", *args, **keywords: function("cpu", *args, **keywords)


def imitation(capability):
    """What torch answers where it has a GPU, by module."""
    properties = SimpleNamespace(name="imitated", total_memory=2**36, multi_processor_count=132)
    properties.major, properties.minor = capability
    return {
        torch.cuda: {
            "Event": Stream,
            "Stream": Stream,
            "_lazy_init": lambda: None,
            "current_device": lambda: 0,
            "current_stream": Stream,
            "device_count": lambda: 1,
            "get_device_capability": lambda *_: capability,
            "get_device_name": lambda *_: "imitated",
            "get_device_properties": lambda *_: properties,
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "is_available": lambda: True,
            "is_bf16_supported": lambda *_, **__: True,
            "is_initialized": lambda: True,
            "mem_get_info": lambda *_: (properties.total_memory, properties.total_memory),
            "memory_allocated": lambda *_: 0,
            "memory_reserved": lambda *_: 0,
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "stream": lambda *_: nullcontext(),
            "synchronize": lambda *_: None,
        },
        torch.accelerator: {"current_stream": Stream},
        torch.nn.functional: {"one_hot": _one_hot},
        Tensor: {
            "_make_subclass": staticmethod(_make_subclass),
            "cuda": lambda self, *_, **__: self.to(CUDA),
            "pin_memory": lambda self, *_: self,
            "to": _to,
        },
        torch: {
            "Generator": Generator,
            "tensor": _tensor,
            "autocast": _on_cpu(AUTOCAST),
            "is_autocast_enabled": _on_cpu(AUTOCAST_ENABLED),
            "get_autocast_dtype": _on_cpu(AUTOCAST_DTYPE),
        },
    }


@contextmanager
def imitated_cuda(capability=(9, 0)):
    """A context with one GPU of a compute capability, Hopper's by default."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        for module, names in imitation(capability).items():
            stack.enter_context(mock.patch.multiple(module, **names))
        stack.enter_context(_Factories())
        # Module.to would untie shared weights.
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swap)
        yield
