"""Replace kernels of PyTorch's CPU operators: float16 that accumulates in float32, and TF32.

The replacements are registered with PyTorch's dispatcher (torch.library), below autograd, so they
hold for the forward and the backward of any model, in every thread.

**float16.** PyTorch's float16 kernels on CPUs without fast ones are scalar or blocked loops that
already accumulate in float32 and round the result to float16; they are 3 to 60 times slower than
the vectorised float32 kernels. Inside `float32_accumulate()` the operators in KERNELS take float16
tensors, compute with the float32 kernel and round its result to float16, as tensor cores do.
Weights, activations and gradients stay float16, so range and rounding are float16's: a result above
65504 is inf, one under 6e-8 is 0. bench/results/cpu_float16.md has the speed.

One difference to the native kernels: their convolution backward also rounds partial sums to
float16 (the unfolded columns, the sum over the batch), so they are less exact, and can overflow
where the gradient itself does not.

bfloat16, whose kernels are fast, is computed in the same way where it is emulated.

**TF32.** The operands of float32 products are rounded to ten bits of mantissa. Products and sums
stay in float32, as on NVIDIA's tensor cores since Ampere (A100 Tensor Core GPU Architecture, 2020).
The order of summation is the CPU's, so results differ from a GPU's in the last bits of float32.
"""

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner.core import ConfigError
from runner.precision.emulation.formats import round_to_tf32

BoxedKernel = Callable[..., Any]
"""A kernel, called as f(dispatch keys, *args, **kwargs)."""
Kernels = Mapping[tuple[str, str], BoxedKernel]
"""Kernels by (operator, dispatch key)."""

_ADDED = ("addmm", "baddbmm", "addbmm")
WRITING_VARIANTS = {f"{name}.out": name for name in ("mm", "bmm", *_ADDED)}
WRITING_VARIANTS |= {f"{name}_": name for name in _ADDED}
"""Operators that write into a given tensor, and the operator whose result they write. Compiled
graphs call them."""

_lock = threading.Lock()
# How many contexts are open, and what holds the kernels, by the set of kernels in place.
_active: dict[Hashable, tuple[int, torch.library.Library]] = {}


@contextmanager
def replace_kernels(
    key: Hashable, make_kernels: Callable[[], Kernels], namespace: str = "aten"
) -> Iterator[None]:
    """Register other kernels while the context is open.

    They are process-wide: every thread and every forked worker has them, which the autograd engine
    needs. Contexts with the same key nest; the last exit, also after an exception, restores the
    dispatcher. Compile a model inside the context and use it inside only.

    Open the first and close the last while no other thread computes: PyTorch's dispatcher removes
    a kernel without waiting for a thread that runs it, which ends in an error or a crash.

    Args:
        key: identifies the kernels among the open contexts.
        make_kernels: returns the kernels; called once, while PyTorch's own are in place.
        namespace: of the operators, which may be defined later.
    """
    with _lock:
        if key not in _active:
            _active[key] = 0, _install(make_kernels(), namespace)
        depth, library = _active[key]
        _active[key] = depth + 1, library
    try:
        yield
    finally:
        with _lock:
            depth, library = _active.pop(key)
            if depth > 1:
                _active[key] = depth - 1, library
            else:
                # Deleting the last reference would do too, but a stored traceback may hold one.
                library._destroy()


def original_kernel(name: str, key: str = "CPU") -> BoxedKernel:
    """Return the kernel that the dispatcher has now for an ATen operator and a dispatch key."""
    return torch.library.get_kernel(f"aten::{name}", key).call_boxed


def _install(kernels: Kernels, namespace: str) -> torch.library.Library:
    """Register kernels and return the library that holds them: active until it is destroyed."""
    library = torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            # torch before 2.12 warns of each override.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for (name, key), kernel in kernels.items():
                library.impl(name, kernel, key, with_keyset=True)
    except BaseException:
        library._destroy()
        raise
    return library


KernelChoice = Literal["auto", "native", "float32_accumulate"]

# Elements of a weight from which accumulating in float32 is faster, at batches of 8 to 128 and
# images of 8x8 to 28x28 (bench/results/cpu_float16_search.md). A convolution reuses its weight at
# every pixel.
LARGE_MATRIX = 4096
LARGE_CONVOLUTION = 128
# How many times longer than float32's a native float16 convolution may take; a loop takes 60 times.
MAX_NATIVE_SLOWDOWN = 4


KERNELS = {
    "mm": 2,
    "bmm": 2,
    "addmm": 3,
    "baddbmm": 3,
    "addbmm": 3,
    "_addmm_activation": 3,
    "convolution": 3,
    "convolution_backward": 3,
    "col2im": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
    "mkldnn_rnn_layer": 7,
    "mkldnn_rnn_layer_backward": 13,
}
"""Operators whose native float16 kernel costs far more than twice the float32 one, and how many of
their leading arguments are float16 tensors (or None) when they run in float16."""
# How many leading results are float16 then, where not all are: the log-sum-exp, second result and
# sixth argument of the backward, is float32 throughout, and the fourth result of an RNN is oneDNN's
# workspace, in bytes.
HALF_RESULTS = {"_scaled_dot_product_flash_attention_for_cpu": 1, "mkldnn_rnn_layer": 3}


@cache
def has_native_float16() -> bool:
    """Return whether the CPU has float16 arithmetic, or oneDNN reports that its kernels run.

    The arithmetic is AVX512-FP16, AMX-FP16 or Arm FP16. Without either PyTorch uses its loops.
    """
    units = ("avx512_fp16", "amx_fp16", "fp16_arith")
    if any(torch.cpu.get_capabilities().get(unit) for unit in units):
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()


@cache
def native_is_fast() -> bool:
    """Return whether PyTorch's float16 kernels are fast enough on this CPU.

    A convolution of a tenth of a millisecond is timed for it, once in a process.
    """
    if not has_native_float16():
        return False
    # The CPU's units do not decide it: with AVX512-FP16 a convolution's backward still is a loop,
    # 60 times slower than float32's (torch 2.15).
    threads = torch.get_num_threads()
    # On one thread: where other programs are busy, threads wait for each other by time slices, many
    # times as long as either kernel takes, and the two would seem equal.
    torch.set_num_threads(1)
    try:
        float16_seconds = _convolution_seconds(torch.float16)
        return float16_seconds < MAX_NATIVE_SLOWDOWN * _convolution_seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


def _convolution_seconds(dtype: torch.dtype) -> float:
    """Return the least seconds of a small convolution, forward and backward, in three tries."""
    inputs = torch.ones((4, 32, 8, 8), dtype=dtype, requires_grad=True)
    weight = torch.ones((32, 32, 3, 3), dtype=dtype, requires_grad=True)
    seconds = []
    with torch.enable_grad():
        # The first of four warms up.
        for _ in range(4):
            start = perf_counter()
            torch.conv2d(inputs, weight, padding=1).sum().backward()
            seconds.append(perf_counter() - start)
    return min(seconds[1:])


def is_float32_accumulation_faster(model: nn.Module) -> bool:
    """Return whether float32 accumulation is faster than slow native kernels for this model.

    It is with a weight of LARGE_CONVOLUTION or LARGE_MATRIX elements, and with an LSTM.
    """
    # Below that 5 to 10 µs of Python per operator, twice that for a convolution, outweigh the gain.
    return any(map(_has_large_weight, model.modules()))


def _has_large_weight(module: nn.Module) -> bool:
    """Return whether float32 accumulation is faster for one module's own weights."""
    # An embedding's weight is looked up, not multiplied.
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    # Its native kernel raises under autocast.
    if isinstance(module, nn.LSTM):
        return True
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    limit = LARGE_CONVOLUTION if is_convolution else LARGE_MATRIX
    # A lazy layer has no shape yet, and is assumed to be large. A bias is added, not multiplied.
    return any(
        nn.parameter.is_lazy(parameter) or (parameter.ndim > 1 and parameter.numel() >= limit)
        for parameter in module.parameters(recurse=False)
    )


def choose_kernels(choice: KernelChoice, model: nn.Module) -> str:
    """Return which kernels float16 uses on this CPU.

    Args:
        choice: precision.cpu_float16; "auto" is float32 accumulation where the native kernels are
            slow here and `is_float32_accumulation_faster(model)`.
        model: the model before or after conversion; only its layers and shapes are read.
    """
    if choice != "auto":
        return choice
    if native_is_fast() or not is_float32_accumulation_faster(model):
        return "native"
    return "float32_accumulate"


@contextmanager
def float32_accumulate(half: torch.dtype = torch.float16) -> Iterator[None]:
    """Accumulate a half dtype in float32 on the CPU while the context is open.

    It holds for the operators in KERNELS, in the forward, the backward and the optimizer; other
    dtypes and devices keep their kernels, at 2 µs more per operator of the table. It is
    process-wide: see dispatcher.replace_kernels.

    Args:
        half: float16 or bfloat16.

    Raises:
        ConfigError: float32 products are set to compute in bfloat16, which would cost float16 three
            bits.
    """
    mkldnn = torch.backends.mkldnn
    for kind in ("matmul", "conv", "rnn"):
        if getattr(mkldnn, kind).fp32_precision == "bf16":
            raise ConfigError(
                f"float32 products ({kind}) compute in bfloat16 on this CPU, coarser than "
                "float16. Type precision.float32_matmul=high (or highest), or "
                "precision.cpu_float16=native."
            )
    with replace_kernels(half, lambda: _make_kernels(half)):
        yield


def _make_kernels(half: torch.dtype) -> Kernels:
    """Return the kernels that replace PyTorch's; its own must be in place."""
    kernels = {name: _accumulating_kernel(name, half) for name in KERNELS}
    for name, source in WRITING_VARIANTS.items():
        kernels[name] = _writing_kernel(name, kernels[source], half)
    replacements = {(name, "CPU"): kernel for name, kernel in kernels.items()}
    # A CPU kernel changes what AutogradCPU holds, so both are taken before either is replaced.
    for key in ("CPU", "AutogradCPU"):
        replacements["lstm.input", key] = _lstm_kernel(key, half)
    return replacements


def _accumulating_kernel(name: str, half: torch.dtype) -> BoxedKernel:
    """Return an operator's kernel that computes a half dtype in float32 and rounds the result."""
    native = original_kernel(name)
    half_arguments = KERNELS[name]
    half_results = HALF_RESULTS.get(name, 99)  # more than any operator returns

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # First, because float32 calls pass through here too and must not pay for the rest.
        if args[0].dtype is not half:
            return native(keys, *args, **kwargs)
        tensors = args[:half_arguments]
        # With mixed dtypes the native kernel raises its own error, as it would without us.
        if any(t is not None and t.dtype is not half for t in tensors):
            return native(keys, *args, **kwargs)
        wide = [_widen(t, half) for t in tensors]
        kwargs = {key: _widen(value, half) for key, value in kwargs.items()}
        result = native(keys, *wide, *args[half_arguments:], **kwargs)
        if isinstance(result, Tensor):
            return result.to(half)
        half_part = [None if t is None else t.to(half) for t in result[:half_results]]
        return (*half_part, *result[half_results:])

    return run


def _writing_kernel(name: str, compute: BoxedKernel, half: torch.dtype) -> BoxedKernel:
    """Return the kernel of an operator that writes the result of another into a given tensor."""
    native = original_kernel(name)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        without_out = {**kwargs}
        target = without_out.pop("out", args[0])
        if target.dtype is half and args[0].dtype is half:
            result = compute(keys, *args, **without_out)
            if target.shape == result.shape:
                return target.copy_(result)
        # Wrong dtypes and resizing keep the native errors and warnings.
        return native(keys, *args, **kwargs)

    return run


def _lstm_kernel(key: str, half: torch.dtype) -> BoxedKernel:
    """Return an LSTM in float32, where oneDNN has one fused kernel, with half precision in and out.

    Above autograd (AutogradCPU), because it is a composite: autograd records the casts.
    """
    native = original_kernel("lstm.input", key)

    def run(keys: Any, x: Tensor, hx: Any, params: Any, *args: Any) -> Any:
        all_half = all(t.dtype is half for t in (*hx, *params))
        # Under autocast the states and weights may still be in float32.
        takes_half = all_half or torch.is_autocast_enabled("cpu")
        if x.dtype is not half or not takes_half:
            return native(keys, x, hx, params, *args)
        wide = [[_widen(t, half) for t in tensors] for tensors in (hx, params)]
        results = torch.ops.aten.lstm.input(x.float(), *wide, *args)
        return tuple(t.to(half) for t in results)

    return run


def _widen(value: Any, half: torch.dtype) -> Any:
    """Return a half tensor as float32; any other value unchanged."""
    is_half = isinstance(value, Tensor) and value.dtype is half
    return value.float() if is_half else value


PRODUCT_OPERANDS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "_addmm_activation": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
}
"""Operators that tensor cores compute, and the positions of the operands among their arguments."""


@contextmanager
def tf32_products(model: nn.Module) -> Iterator[None]:
    """Round the operands of the operators in PRODUCT_OPERANDS while the context is open.

    It is process-wide: see dispatcher.replace_kernels. Attention and LSTMs are computed from those
    operators, not by kernels of their own, which could not be rounded inside.

    Args:
        model: that is computed inside; looked through for LSTMs.
    """
    onednn = torch.backends.mkldnn
    # Its context manager flags() warns of a deprecated setting.
    previous = onednn.enabled
    if any(isinstance(module, nn.LSTM) for module in model.modules()):
        # It has a fused kernel for LSTMs.
        onednn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH), replace_kernels("tf32", _tf32_kernels):
            yield
    finally:
        onednn.enabled = previous


def _tf32_kernels() -> Kernels:
    return {
        (name, "CPU"): _with_rounded_operands(
            original_kernel(name), PRODUCT_OPERANDS[WRITING_VARIANTS.get(name, name)]
        )
        for name in (*PRODUCT_OPERANDS, *WRITING_VARIANTS)
    }


def _with_rounded_operands(native: BoxedKernel, positions: tuple[int, ...]) -> BoxedKernel:
    """Return a kernel that rounds the arguments at these positions before the native kernel."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        rounded = list(args)
        for position in positions:
            rounded[position] = _round_operand(args[position])
        return native(keys, *rounded, **kwargs)

    return run


def _round_operand(x: Tensor) -> Tensor:
    """Return a tensor rounded to TF32: float32, the parts of complex64; other dtypes unchanged."""
    if x.dtype is torch.float32:
        return round_to_tf32(x)
    if x.dtype is torch.complex64:
        parts = torch.view_as_real(x.resolve_conj().resolve_neg())
        return torch.view_as_complex(round_to_tf32(parts))
    return x
