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
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from runner.errors import ConfigError

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

INTO = {
    "mm.out": "mm",
    "bmm.out": "bmm",
    "addmm.out": "addmm",
    "baddbmm.out": "baddbmm",
    "addbmm.out": "addbmm",
    "addmm_": "addmm",
    "baddbmm_": "baddbmm",
    "addbmm_": "addbmm",
}
"""Variants that write into a given tensor, and the operator that they write. Compiled graphs
call them."""

_Boxed = Callable[..., Any]
_lock = threading.Lock()
_depth = 0
_library: torch.library.Library | None = None


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


def pays(model: nn.Module) -> bool:
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


def resolve(choice: Choice, model: nn.Module) -> Resolved:
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
    return "float32_accumulate" if not native_is_fast() and pays(model) else "native"


@contextmanager
def float32_accumulate() -> Iterator[None]:
    """Context in which the operators of KERNELS accumulate float16 in float32 on the CPU.

    Covers the forward, the backward and the optimizer. Process-wide while it is open: every
    thread and every forked worker has it, which the autograd engine needs; other dtypes and
    devices keep their kernels, at 2 µs more per operator of the table. It nests; the last exit,
    also after an exception, restores the dispatcher. Compile inside it and stay inside it.

    Open the first and close the last while no other thread computes: PyTorch's dispatcher takes
    a kernel away without waiting for a thread that is in it, which ends in an error or a crash.

    Raises:
        ConfigError: float32 products are set to compute in bfloat16, which float16 would lose
            three bits to.
    """
    _refuse_bfloat16_products()
    _enter()
    try:
        yield
    finally:
        _exit()


def _refuse_bfloat16_products() -> None:
    mkldnn = torch.backends.mkldnn
    for kind in ("matmul", "conv", "rnn"):
        if getattr(mkldnn, kind).fp32_precision == "bf16":
            raise ConfigError(
                f"float32 products ({kind}) compute in bfloat16 on this CPU, coarser than "
                "float16. Type precision.float32_matmul=high (or highest), or "
                "precision.cpu_float16=native."
            )


def _enter() -> None:
    global _depth, _library
    with _lock:
        if _depth == 0:
            _library = _install()
        _depth += 1


def _exit() -> None:
    global _depth, _library
    with _lock:
        _depth -= 1
        if _depth == 0 and _library is not None:
            # Its last reference going would do it too, but a kept traceback may hold one.
            _library._destroy()
            _library = None


def _install() -> torch.library.Library:
    """The library that holds the kernels: active until it is destroyed."""
    kernels = {name: _accumulating(name, kernel) for name, kernel in KERNELS.items()}
    kernels |= {name: _writing(name, kernels[source]) for name, source in INTO.items()}
    # All before the first registration: a CPU kernel changes what AutogradCPU holds.
    lstms = {key: _lstm(key) for key in ("CPU", "AutogradCPU")}
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():  # before torch 2.12 it tells of each override
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, kernel in kernels.items():
                library.impl(name, kernel, "CPU", with_keyset=True)
            for key, lstm in lstms.items():
                library.impl("lstm.input", lstm, key, with_keyset=True)
    except BaseException:
        library._destroy()
        raise
    return library


def _original(name: str, key: str = "CPU") -> _Boxed:
    """The kernel registered now, called as f(dispatch keys, *args, **kwargs)."""
    return torch.library.get_kernel(f"aten::{name}", key).call_boxed


def _accumulating(name: str, kernel: Kernel) -> _Boxed:
    native, half = _original(name), torch.float16
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
        kwargs = {key: _widen(value) for key, value in kwargs.items()}
        result = native(keys, *wide, *args[halves:], **kwargs)
        if isinstance(result, torch.Tensor):
            return result.half()
        return tuple(t if t is None or i >= rounded else t.half() for i, t in enumerate(result))

    return run


def _writing(name: str, compute: _Boxed) -> _Boxed:
    native, half = _original(name), torch.float16

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


def _lstm(key: str) -> _Boxed:
    """LSTM in float32, where oneDNN has one fused kernel, with float16 in and out.

    Above autograd (AutogradCPU), because it is a composite: autograd records the casts.
    """
    native = _original("lstm.input", key)

    def run(keys: Any, x: torch.Tensor, hx: Any, params: Any, *args: Any) -> Any:
        same = all(t.dtype is torch.float16 for t in (*hx, *params))
        if x.dtype is not torch.float16 or not (same or torch.is_autocast_enabled("cpu")):
            return native(keys, x, hx, params, *args)
        wide = [[_widen(t) for t in tensors] for tensors in (hx, params)]
        results = torch.ops.aten.lstm.input(x.float(), *wide, *args)
        return tuple(t.half() for t in results)

    return run


def _widen(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype is torch.float16
    return value.float() if half else value
