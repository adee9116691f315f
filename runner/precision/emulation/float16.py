"""float16 on CPUs without fast float16 kernels: heavy kernels with float32 accumulation.

PyTorch's float16 kernels on such CPUs are scalar or blocked loops that already accumulate in
float32 and round the result to float16; they are 3 to 60 times slower than the vectorised
float32 kernels. Inside `float32_accumulate()` the operators in KERNELS take float16 tensors,
compute with the float32 kernel and round its result to float16, as tensor cores do. Weights,
activations and gradients stay float16, so range and rounding are float16's: a result above 65504
is inf, one under 6e-8 is 0. bench/cpu_float16.py measures it.

One difference to the native kernels: their convolution backward also rounds partial sums to
float16 (the unfolded columns, the sum over the batch), so they are less exact, and can overflow
where the gradient itself does not.

bfloat16, whose kernels are fast, goes the same way where it is emulated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from runner.precision.emulation.dispatcher import (
    INTO,
    Boxed,
    Kernels,
    original_kernel,
    replace_kernels,
)
from runner.utils.errors import ConfigError

Choice = Literal["auto", "native", "float32_accumulate"]
Resolved = Literal["native", "float32_accumulate"]

LARGE_MATRIX = 4096
LARGE_CONVOLUTION = 128
"""Elements of a weight from which accumulating in float32 pays, at batches of 8 to 128 and images
of 8x8 to 28x28 (bench/results/cpu_float16.md). A convolution reuses its weight at every pixel."""


class Kernel(NamedTuple):
    """How an ATen operator is run in float32.

    Attributes:
        halves: how many leading arguments are float16 tensors (or None) when it runs in float16.
        rounded: how many leading results are float16 then; the others keep their dtype.
    """

    halves: int
    rounded: int = 99


KERNELS: dict[str, Kernel] = {
    "mm": Kernel(2),
    "bmm": Kernel(2),
    "addmm": Kernel(3),
    "baddbmm": Kernel(3),
    "addbmm": Kernel(3),
    "_addmm_activation": Kernel(3),
    "convolution": Kernel(3),
    "convolution_backward": Kernel(3),
    "col2im": Kernel(1),
    # The log-sum-exp, second result and sixth argument of the backward, is float32 throughout.
    "_scaled_dot_product_flash_attention_for_cpu": Kernel(3, rounded=1),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Kernel(5),
    # The fourth result is oneDNN's workspace, in bytes.
    "mkldnn_rnn_layer": Kernel(7, rounded=3),
    "mkldnn_rnn_layer_backward": Kernel(13),
}
"""Operators whose native float16 kernel costs far more than twice the float32 one."""


@cache
def has_native_float16() -> bool:
    """Whether the CPU has float16 arithmetic (AVX512-FP16, AMX-FP16, Arm FP16), or oneDNN says that
    its float16 kernels run; without them PyTorch falls back to its loops."""
    units = ("avx512_fp16", "amx_fp16", "fp16_arith")
    if any(torch.cpu.get_capabilities().get(unit) for unit in units):
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()


@cache
def native_is_fast() -> bool:
    """Whether PyTorch's float16 kernels are worth taking here. Units do not tell: with AVX512-FP16
    a convolution's backward still is a loop, 60 times slower than float32's (torch 2.15), so a
    convolution of a tenth of a millisecond is timed, once in a process."""
    return has_native_float16() and _convolution(torch.float16) < 4 * _convolution(torch.float32)


def _convolution(dtype: torch.dtype) -> float:
    """Least seconds of a small convolution, forward and backward, in three tries."""
    inputs, weight = (
        torch.ones(shape, dtype=dtype, requires_grad=True)
        for shape in ((4, 32, 8, 8), (32, 32, 3, 3))
    )
    taken = []
    with torch.enable_grad():
        for _ in range(4):  # the first warms up
            began = perf_counter()
            torch.conv2d(inputs, weight, padding=1).sum().backward()
            taken.append(perf_counter() - began)
    return min(taken[1:])


def is_float32_accumulation_faster(model: nn.Module) -> bool:
    """Whether float32 accumulation is faster than the native kernels for this model.

    True with a weight of LARGE_CONVOLUTION or LARGE_MATRIX elements, and with an LSTM, whose
    native kernel raises under autocast. Below that 5 to 10 µs of Python per operator, twice
    that for a convolution, outweigh the gain.
    """
    return any(_large(module) for module in model.modules())


def _large(module: nn.Module) -> bool:
    """Whether one module's own weights are worth it; an embedding's are looked up, not used."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    if isinstance(module, nn.LSTM):
        return True
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    limit = LARGE_CONVOLUTION if convolution else LARGE_MATRIX
    own = module.parameters(recurse=False)
    # A lazy layer has no shape yet; whoever uses one has more than a toy.
    return any(nn.parameter.is_lazy(p) or (p.ndim > 1 and p.numel() >= limit) for p in own)


def choose_kernels(choice: Choice, model: nn.Module) -> Resolved:
    """The kernels that float16 takes on this CPU.

    Args:
        choice: "auto" takes float32 accumulation where the native kernels are slow here and
            `pays(model)`.
        model: the model before or after conversion; only its layers and shapes are read.

    Raises:
        ConfigError: an unknown choice.
    """
    if choice == "native" or choice == "float32_accumulate":
        return choice
    if choice != "auto":
        raise ConfigError(
            f"precision.cpu_float16={choice} is not known. "
            "Allowed: auto, native, float32_accumulate."
        )
    return (
        "float32_accumulate"
        if not native_is_fast() and is_float32_accumulation_faster(model)
        else "native"
    )


@contextmanager
def float32_accumulate(half: torch.dtype = torch.float16) -> Iterator[None]:
    """Context in which the operators of KERNELS accumulate a half dtype in float32 on the CPU.

    Covers the forward, the backward and the optimizer; other dtypes and devices keep their
    kernels, at 2 µs more per operator of the table. See cpu_kernels.replaced.

    Raises:
        ConfigError: float32 products are set to compute in bfloat16, which float16 would lose
            three bits to.
    """
    _refuse_bfloat16_products()
    with replace_kernels(half, lambda: _kernels(half)):
        yield


def _refuse_bfloat16_products() -> None:
    mkldnn = torch.backends.mkldnn
    for kind in ("matmul", "conv", "rnn"):
        if getattr(mkldnn, kind).fp32_precision == "bf16":
            raise ConfigError(
                f"float32 products ({kind}) compute in bfloat16 on this CPU, coarser than "
                "float16. Type precision.float32_matmul=high (or highest), or "
                "precision.cpu_float16=native."
            )


def _kernels(half: torch.dtype) -> Kernels:
    kernels = {name: _accumulating(name, kernel, half) for name, kernel in KERNELS.items()}
    kernels |= {name: _writing(name, kernels[source], half) for name, source in INTO.items()}
    on_cpu = {(name, "CPU"): kernel for name, kernel in kernels.items()}
    # A CPU kernel changes what AutogradCPU holds, which is original here still.
    return on_cpu | {("lstm.input", key): _lstm(key, half) for key in ("CPU", "AutogradCPU")}


def _accumulating(name: str, kernel: Kernel, half: torch.dtype) -> Boxed:
    native = original_kernel(name)
    halves, rounded = kernel

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # float32 comes here too, so the way past is short.
        if args[0].dtype is not half:
            return native(keys, *args, **kwargs)
        tensors = args[:halves]
        # With mixed dtypes the native kernel raises its own error, as it would without us.
        if any(t is not None and t.dtype is not half for t in tensors):
            return native(keys, *args, **kwargs)
        wide = [None if t is None else t.float() for t in tensors]
        kwargs = {key: _widen(value, half) for key, value in kwargs.items()}
        result = native(keys, *wide, *args[halves:], **kwargs)
        if isinstance(result, torch.Tensor):
            return result.to(half)
        return tuple(t if t is None or i >= rounded else t.to(half) for i, t in enumerate(result))

    return run


def _writing(name: str, compute: Boxed, half: torch.dtype) -> Boxed:
    native = original_kernel(name)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        target = kwargs.get("out", args[0])
        if target.dtype is half and args[0].dtype is half:
            rest = {key: value for key, value in kwargs.items() if key != "out"}
            result = compute(keys, *args, **rest)
            if target.shape == result.shape:
                return target.copy_(result)
        # Wrong dtypes and resizing keep the native errors and warnings.
        return native(keys, *args, **kwargs)

    return run


def _lstm(key: str, half: torch.dtype) -> Boxed:
    """LSTM in float32, where oneDNN has one fused kernel, with half precision in and out.

    Above autograd (AutogradCPU), because it is a composite: autograd records the casts.
    """
    native = original_kernel("lstm.input", key)

    def run(keys: Any, x: torch.Tensor, hx: Any, params: Any, *args: Any) -> Any:
        same = all(t.dtype is half for t in (*hx, *params))
        if x.dtype is not half or not (same or torch.is_autocast_enabled("cpu")):
            return native(keys, x, hx, params, *args)
        wide = [[_widen(t, half) for t in tensors] for tensors in (hx, params)]
        results = torch.ops.aten.lstm.input(x.float(), *wide, *args)
        return tuple(t.to(half) for t in results)

    return run


def _widen(value: Any, half: torch.dtype) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype is half
    return value.float() if narrow else value
