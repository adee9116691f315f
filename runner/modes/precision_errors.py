"""Explain errors of a model or a loss that the precision causes.

A table maps texts of PyTorch's errors to what to change or type.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb

import torch
from torch import nn

from runner.precision.emulation.float16 import choose_kernels
from runner.precision.keep_fp32 import Float32Island
from runner.precision.precision import Precision
from runner.utils.modules import matches_pattern

_HALVES = (torch.float16, torch.bfloat16)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def failing_module(error: BaseException, model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the dotted name and the innermost module in whose forward an error was raised; None
    where no module's forward was running."""
    named = {id(module): (name, module) for name, module in model.named_modules()}
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        found = named.get(id(frame.f_locals.get("self")), found)
    return found


@dataclass(frozen=True)
class PrecisionCause:
    """An error, and what ran when it was raised.

    Attributes:
        text: the error's own message.
        model: as it was built and converted.
        precision: of the run.
        name: dotted name of the innermost module whose forward raised; empty for the model itself
            and where no module's forward was running.
        module: that module; None where no module's forward was running.
        line: `nets.py, line 7`, the last line outside PyTorch and the runner; empty for none.
    """

    text: str
    model: nn.Module
    precision: Precision
    name: str
    module: nn.Module | None
    line: str

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def half(self) -> bool:
        """Whether the precision computes or stores in half precision."""
        return bool({self.precision.compute, self.precision.storage} & {*_HALVES})

    def where(self) -> str:
        """Return the module and the line that failed."""
        if self.module is None:
            return f"It fails outside the model's forward, {self.line}." if self.line else ""
        name = f"{self.name} ({_kind(self.module)})" if self.name else _kind(self.module)
        return f"It fails in {name}, {self.line}." if self.line else f"It fails in {name}."

    def keep_fp32(self) -> str:
        """Return the override that keeps the failing module, and others of its class where it is
        a class of the user's own, in float32; empty where that is the model itself or none."""
        if not self.name or isinstance(self.module, Float32Island):
            return ""
        patterns = [*map(str, self.precision.keep_fp32), self._pattern()]
        return f"precision.keep_fp32=[{','.join(patterns)}]"

    def _pattern(self) -> str:
        """Return a pattern that matches the failing module and those like it in other blocks.

        Their names differ in numbers only. Where there are none, it is the module's own name.
        """
        if type(self.module).__module__.startswith("torch."):
            return self.name  # every Linear is of that class
        segments = ["*" if part.isdigit() else part for part in self.name.split(".")]
        pattern = ".".join(segments)
        modules = dict(self.model.named_modules())
        names = [name for name in modules if name and matches_pattern(pattern, name)]
        outermost = [n for n in names if not any(n.startswith(f"{m}.") for m in names)]
        alike = all(type(modules[name]) is type(self.module) for name in outermost)
        return pattern if pattern != "*" and alike and len(outermost) > 1 else self.name

    def mixed(self) -> str:
        """Return the mixed precision whose autocast computes linalg and fft operations in float32;
        empty where there is none."""
        stores_half = self.precision.storage in _HALVES
        if self.device.type != "cpu" or not stores_half or self.precision.converts_layers:
            return ""
        return _half_precision(self.precision.storage, torch.float32)

    def other_half(self, compute: torch.dtype, instead: torch.dtype) -> str:
        """Return the precision that differs in its half format only: in `instead` where this one
        computes in `compute`; empty where it does not, or converts layers."""
        if self.precision.compute is not compute or self.precision.converts_layers:
            return ""
        stores_half = self.precision.storage in _HALVES
        return _half_precision(instead, instead if stores_half else torch.float32)


def _half_precision(compute: torch.dtype, storage: torch.dtype) -> str:
    """Return the built-in precision that computes in a half format and stores in it or float32."""
    width = "16" if compute is torch.float16 else "bf16"
    return f"{width}-true" if storage is compute else f"{width}-mixed"


def precision_advice(error: Exception, model: nn.Module, precision: Precision) -> str:
    """Return what to change or type where the precision is why a forward, a loss or a backward
    failed; empty where it is not known to be."""
    failed = failing_module(error, model)
    name, module = failed or ("", None)
    cause = PrecisionCause(str(error), model, precision, name, module, _last_line(error))
    texts = (text(cause) for pattern, text in RULES if pattern.search(cause.text))
    return next(filter(None, texts), "")


def _last_line(error: Exception) -> str:
    line = ""
    for frame, number in walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if not path.startswith((*_LIBRARIES, "<")):
            line = f"{Path(path).name}, line {number}"
    return line


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _alternatives(*choices: str) -> str:
    """Return a sentence from the choices that are not empty."""
    text = "; or ".join(filter(None, choices))
    return f"{text[:1].upper()}{text[1:]}."


def _typed(override: str, then: str = "") -> str:
    return f"type {override}{then}" if override else ""


def _forward(cause: PrecisionCause) -> str:
    """Return which forward has to change."""
    if cause.module is None:
        return "that place"
    if type(cause.module).__module__.startswith("torch."):
        return f"the forward that calls {_kind(cause.module)}"
    return f"{_kind(cause.module)}.forward"


def _say_kernel(cause: PrecisionCause) -> str:
    mixed = cause.mixed()
    return (
        f"{cause.where()} PyTorch has no such operation in half precision on "
        f"{cause.device.type}. "
        + _alternatives(
            _typed(cause.keep_fp32()),
            _typed(
                f"precision={mixed}" if mixed else "",
                ", whose autocast computes torch.linalg and torch.fft in float32",
            ),
            f"in {_forward(cause)}, give the operation x.float() and cast what it returns back "
            "with .to(x.dtype)",
        )
    ).strip()


def _say_overflow(cause: PrecisionCause) -> str:
    wide = cause.other_half(torch.float16, torch.bfloat16)
    half = cause.precision.compute
    dtype = str(half).removeprefix("torch.")
    return (
        f"{cause.where()} A constant in the model is beyond the range of {dtype}, which ends at "
        f"{torch.finfo(half).max:.5g}. "
        + _alternatives(
            f"write torch.finfo(x.dtype).min in {_forward(cause)} in place of a mask's -1e9, or "
            'float("-inf")',
            _typed(cause.keep_fp32()),
            _typed(f"precision={wide}" if wide else "", ", with the range of float32"),
        )
    ).strip()


def _say_numpy_dtype(cause: PrecisionCause) -> str:
    float16 = cause.other_half(torch.bfloat16, torch.float16)
    return (
        f"{cause.where()} NumPy has no bfloat16. "
        + _alternatives(
            f"write x.float().numpy() in {_forward(cause)}",
            _typed(cause.keep_fp32()),
            _typed(f"precision={float16}" if float16 else ""),
        )
    ).strip()


def _say_numpy_gradient(cause: PrecisionCause) -> str:
    return (
        f"{cause.where()} NumPy's operations have no gradient. "
        + _alternatives(
            "compute with PyTorch's operations where a gradient has to pass",
            f"write x.detach().float().cpu().numpy() in {_forward(cause)} where none has to",
        )
    ).strip()


def _say_lstm(cause: PrecisionCause) -> str:
    native = getattr(cause.precision, "cpu_float16", "") != "float32_accumulate"
    if cause.device.type != "cpu" or torch.float16 not in _dtypes(cause) or not native:
        return ""
    automatic = choose_kernels("auto", cause.model) == "float32_accumulate"
    kernels = "auto" if automatic else "float32_accumulate"
    return (
        f"{cause.where()} This CPU's own float16 kernels lack it. Type "
        f"precision.cpu_float16={kernels}."
    ).strip()


def _dtypes(cause: PrecisionCause) -> set[torch.dtype]:
    return {cause.precision.compute, cause.precision.storage}


def _say_dtypes(cause: PrecisionCause) -> str:
    """Explain an operation that is given tensors of two floating dtypes."""
    if re.search(r"\b(Long|Int|Byte|Bool|long|int|Char)\b", cause.text):
        return ""
    if built := _built_otherwise(cause):
        return built
    if _dtypes(cause) == {torch.float32}:
        return ""
    return (
        f"{cause.where()} Tensors of two dtypes meet there; precision={cause.precision.name} "
        f"stores {cause.precision.storage_format} and computes in "
        f"{cause.precision.compute_format}. "
        + _alternatives(
            _typed(cause.keep_fp32() if cause.half else ""),
            f"leave out .float() and dtype= in {_forward(cause)}, or cast one to the "
            "other's dtype: a.to(b.dtype)",
        )
    ).strip()


def _built_otherwise(cause: PrecisionCause) -> str:
    """Explain parameters that a conversion left in a dtype other than the one it computes in."""
    precision = cause.precision
    if precision.storage is not torch.float32:
        return ""  # all were cast
    left = {
        name: parameter.dtype
        for name, parameter in cause.model.named_parameters()
        if parameter.is_floating_point() and parameter.dtype is not torch.float32
    }
    if not left:
        return ""
    dtypes = sorted({str(dtype).removeprefix("torch.") for dtype in left.values()})
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    compute = ""
    if len(dtypes) == 1 and {*left.values()} <= {*_HALVES} - {precision.compute}:
        compute = f"precision.compute_dtype={dtypes[0]}"
    return (
        f"{cause.where()} precision={precision.name} leaves what it does not convert as the model "
        f"was built, here {' and '.join(dtypes)} ({', '.join([*left][:3])}{more}), and computes in "
        f"{str(precision.compute).removeprefix('torch.')}. "
        + _alternatives(
            "build the model in float32 (end its constructor with self.float())", _typed(compute)
        )
    ).strip()


RULES: tuple[tuple[re.Pattern[str], Callable[[PrecisionCause], str]], ...] = (
    (re.compile(r"without overflow"), _say_overflow),
    (re.compile(r"unsupported ScalarType BFloat16"), _say_numpy_dtype),
    (re.compile(r"Can't call numpy\(\) on Tensor that requires grad"), _say_numpy_gradient),
    (re.compile(r"could not create a primitive"), _say_lstm),
    (
        re.compile(
            r"not implemented for '(Complex)?(Half|BFloat16)'|Low precision dtypes not supported|"
            r"Unsupported dtype (Half|BFloat16)|powers of two when computing in half precision"
        ),
        _say_kernel,
    ),
    (
        re.compile(
            r"same dtype|should be the same|scalar type|does not match weight dtype|dtypes match|"
            r"equal to src\.dtype|but got dtype"
        ),
        _say_dtypes,
    ),
)
"""Texts of PyTorch's errors, and what to say; an empty answer means that the precision is not the
cause."""
