"""Have torch's autocast cast what its lists lack: on a CPU as on CUDA, operator by operator, and
grouped products on every device.

torch has one list of casts for each kind of device. The CPU's leaves norms, softmax, pow, exp, log
and sums in half precision, which CUDA's computes in float32; operators of CUDA's list that the
CPU's lacks get its cast here, and those of the CPU's alone lose theirs. Which operators CUDA's list
has is asked of torch's dispatcher, which knows it on machines without a GPU, too.

Source of the kinds of cast: ATen/autocast_mode.h and autocast_mode.cpp of PyTorch.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from runner.precision.emulation.cpu_kernels import BoxedKernel, Kernels, replace_kernels

_LOWER_PRECISION = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d convolution
conv_transpose2d.input conv_transpose3d.input prelu addmm addmv addr matmul einsum mm mv linear
linalg_vecdot addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell lstm_cell
_thnn_fused_gru_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
scaled_dot_product_attention _cudnn_rnn cudnn_convolution cudnn_convolution_transpose _grouped_mm
"""
_WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
LOWER_PRECISION = {*_LOWER_PRECISION.split()}
"""Operators whose arguments CUDA's list casts to half precision, and grouped_casts."""
WIDEST = {*_WIDEST.split()}
"""Operators whose arguments it casts to the widest dtype among them."""
# The others of the list are in float32: their arguments, or, where they have an argument dtype, the
# result, which the kernel then sums up in.
# What cuDNN's recurrent layers, which CUDA's list casts, are on a CPU.
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# The CPU has no kernel of it in half precision.
_ROUNDED = "avg_pool3d"
# Each weight, which must live as long, and its cast, by the identity of the weight.
_half_weights: dict[int, tuple[Tensor, Tensor]] = {}
_GROUPED_PRODUCTS = {"aten": "_grouped_mm", "transformers": "grouped_mm_fallback"}
"""Operators that multiply each expert's rows by its weight, by namespace: torch's, and that of
transformers where torch's has no kernel and under torch.compile."""
_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA", "AutocastMPS", "AutocastXLA")


def listed_operators(device_type: str) -> set[str]:
    """Return the ATen operators, as sum.dim_IntList, that torch's list for CPU or CUDA has."""
    key = f"Autocast{device_type}"
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


@contextmanager
def cuda_casts() -> Iterator[None]:
    """Have autocast on the CPU cast as on CUDA while the context is open.

    It is process-wide: see cpu_kernels.replace_kernels. torch refuses binary_cross_entropy under
    CUDA's autocast, and so it does here.
    """
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        _half_weights.clear()

    _forget_compiled()
    # A cached graph holds casts, and its key lacks the kernels that made them.
    caches_no_graphs = functorch_config.patch(enable_autograd_cache=False)
    try:
        with replace_kernels("cuda_casts", _make_kernels), caches_no_graphs:
            # torch.autocast calls it at the end of the outermost context.
            torch.clear_autocast_cache = clear_both
            yield
    finally:
        torch.clear_autocast_cache = clear
        _forget_compiled()


def _forget_compiled() -> None:
    """Forget what was compiled with other casts in this process, for which torch has no guard."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _make_kernels() -> Kernels:
    on_cpu = listed_operators("CPU")
    on_cuda = listed_operators("CUDA")
    none: BoxedKernel = torch.library.fallthrough_kernel
    kernels = dict.fromkeys(on_cpu - on_cuda, none)
    kernels[_ROUNDED] = _kernel(_ROUNDED, _rounded_to_input)
    for name in on_cuda:
        if name in WIDEST:
            kernels[name] = _kernel(name, _in_widest_dtype)
        elif name not in LOWER_PRECISION:
            kernels[name] = _kernel(name, _in_float32)
    # The CPU's own kernels of the others cast as CUDA's do, from the same source.
    recurrent = {f"{kind}.{layout}" for kind in _RECURRENT for layout in ("input", "data")}
    for name in (on_cuda & LOWER_PRECISION) - on_cpu | recurrent:
        kernels[name] = _kernel(name, _in_half)
    return {(name, "AutocastCPU"): kernel for name, kernel in kernels.items()}


def _kernel(
    name: str, rule: Callable[..., Any], namespace: str = "aten", key: str = "AutocastCPU"
) -> BoxedKernel:
    """Return an operator's kernel for a dispatch key of autocast, which calls
    rule(operator, args, kwargs)."""
    packet, _, overload = name.partition(".")
    autocast_key = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))

    def run(_: Any, *args: Any, **kwargs: Any) -> Any:
        # An operator is defined once its library is imported.
        overloads = getattr(getattr(torch.ops, namespace), packet)
        # What the operator is composed of is not cast again.
        with torch._C._ExcludeDispatchKeyGuard(autocast_key):
            return rule(getattr(overloads, overload or "default"), args, kwargs)

    return run


def _is_cast(value: Any, device_type: str = "cpu") -> bool:
    """Return whether autocast looks at a value: a floating tensor on the device, but no float64."""
    if not isinstance(value, Tensor) or value.device.type != device_type:
        return False
    return value.is_floating_point() and value.dtype is not torch.float64


def _call_in(dtype: torch.dtype, operator: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator with its tensors cast, those in lists too."""
    args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
    return operator(*args, **kwargs)


def _in_float32(operator: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator in float32, or with dtype=float32 where it takes a dtype."""
    name: str = operator.name().removeprefix("aten::")
    if name == "binary_cross_entropy":
        raise RuntimeError(
            "torch refuses binary_cross_entropy (BCELoss) under CUDA's autocast, for it overflows "
            "in half precision. Use binary_cross_entropy_with_logits, or compute it in float32 "
            "within torch.autocast(enabled=False)."
        )
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dtype" not in names or not _is_cast(args[0]):
        return _call_in(torch.float32, operator, args, kwargs)
    if given.get("dtype") is None:
        given["dtype"] = torch.float32
    return operator(given.pop(names[0]), **given)


def _in_widest_dtype(operator: Any, args: Any, kwargs: Any) -> Any:
    half = torch.get_autocast_dtype("cpu")
    dtypes = {value.dtype for value in tree_leaves((args, kwargs)) if _is_cast(value)}
    widest = torch.float32 if dtypes - {half} else half
    return _call_in(widest, operator, args, kwargs)


def _rounded_to_input(operator: Any, args: Any, kwargs: Any) -> Any:
    result = _call_in(torch.float32, operator, args, kwargs)
    return result.to(args[0].dtype) if _is_cast(args[0]) else result


def _in_half(operator: Any, args: Any, kwargs: Any) -> Any:
    return _call_in(torch.get_autocast_dtype("cpu"), operator, args, kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value in a dtype where autocast casts it. As in torch, a weight is cast to half
    precision once for all its uses in a forward, so that their gradients add up in it."""
    if not _is_cast(value) or value.dtype is dtype:
        return value
    is_weight = value.is_leaf and value.requires_grad and value.dtype is torch.float32
    caches = torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
    if not (is_weight and caches) or value._is_view():
        return value.to(dtype)
    if id(value) not in _half_weights:
        _half_weights[id(value)] = value, value.to(dtype)
    return _half_weights[id(value)][1]


@contextmanager
def grouped_casts() -> Iterator[None]:
    """Have autocast cast grouped products while the context is open: torch's lists lack them, so
    that it would leave the experts of a mixture in float32.

    It is process-wide: see cpu_kernels.replace_kernels.
    """
    settings = torch.compiler.config
    tag = settings.cache_key_tag
    try:
        # Compiled code that is stored on disk without these casts must not be loaded. Not by
        # settings.patch, which only the thread that entered it can leave.
        settings.cache_key_tag = f"{tag}grouped_casts"
        with ExitStack() as stack:
            for namespace, name in _GROUPED_PRODUCTS.items():
                kernels = {
                    (name, key): _kernel(name, _grouped, namespace, key) for key in _AUTOCAST_KEYS
                }
                stack.enter_context(replace_kernels(name, kernels.copy, namespace))
            yield
    finally:
        settings.cache_key_tag = tag


def _grouped(operator: Any, args: Any, kwargs: Any) -> Any:
    """Call a grouped product with its operands cast, on the device that they are on."""
    device_type = args[0].device.type
    # A call with out_dtype has chosen its dtypes, as one of mm has.
    if not any(isinstance(value, torch.dtype) for value in args):
        half = torch.get_autocast_dtype(device_type)
        args = tuple(v.to(half) if _is_cast(v, device_type) else v for v in args)
    args, width = _aligned(*args)
    return operator(*args)[..., :width]


def _aligned(rows: Tensor, weight: Tensor, *rest: Any) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of a grouped product in half precision, padded with zeros to the sizes
    that its kernels take, and the width of its output.

    Args:
        rows: [..., contracted].
        weight: [experts, contracted, width].
        rest: the other arguments.
    """
    width = weight.shape[-1]
    contracted_missing, width_missing = -rows.shape[-1] % 8, -width % 8
    if rows.itemsize == 2 and weight.ndim == 3 and (contracted_missing or width_missing):
        rows = F.pad(rows, (0, contracted_missing))
        weight = F.pad(weight, (0, width_missing, 0, contracted_missing))
    return (rows, weight, *rest), width
