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

from runner.precision.contract import Precision
from runner.precision.emulation.float16 import choose_kernels
from runner.precision.keep_fp32 import Float32Island
from runner.utils.modules import matches_pattern
from runner.utils.tensors import dtype_name

_HALVES = (torch.float16, torch.bfloat16)
_MAX_NAMED_PARAMETERS = 3
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def failing_module(error: BaseException, model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the innermost module in whose forward an error was raised, with its dotted name.

    Returns:
        The name and the module; None where no module's forward was running.
    """
    # A traceback goes inwards, so the last frame whose `self` is a module is the innermost one.
    named = {id(module): (name, module) for name, module in model.named_modules()}
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        found = named.get(id(frame.f_locals.get("self")), found)
    return found


@dataclass(frozen=True)
class PrecisionCause:
    """An error, and the module and line that raised it.

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
    def is_half(self) -> bool:
        """Return whether the precision computes or stores in half precision."""
        return bool({self.precision.compute, self.precision.storage} & {*_HALVES})

    def location(self) -> str:
        """Return a sentence with the module and the line that failed; empty for neither."""
        if self.module is None:
            return f"It fails outside the model's forward, {self.line}." if self.line else ""
        name = f"{self.name} ({_kind(self.module)})" if self.name else _kind(self.module)
        return f"It fails in {name}, {self.line}." if self.line else f"It fails in {name}."

    def keep_fp32_override(self) -> str:
        """Return the override that keeps the failing module in float32.

        Where the module is of a class of the user's own, others like it are kept, too. The answer
        is empty where the failing module is the model itself, or none, or in float32 already.
        """
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
        # Repeated blocks are numbered: layers.0.attention and layers.1.attention are alike.
        segments = ["*" if part.isdigit() else part for part in self.name.split(".")]
        pattern = ".".join(segments)
        modules = dict(self.model.named_modules())
        names = [name for name in modules if name and matches_pattern(pattern, name)]
        # A pattern keeps whole subtrees, so only the outermost modules that it matches count.
        outermost = [n for n in names if not any(n.startswith(f"{m}.") for m in names)]
        alike = all(type(modules[name]) is type(self.module) for name in outermost)
        if pattern != "*" and alike and len(outermost) > 1:
            return pattern
        return self.name

    def mixed_alternative(self) -> str:
        """Return the mixed precision that computes linalg and fft operations in float32.

        Only autocast on a CPU does so. The answer is empty for a precision that stores in float32
        or converts layers.
        """
        stores_half = self.precision.storage in _HALVES
        if self.device.type != "cpu" or not stores_half or self.precision.converts_layers:
            return ""
        return _half_precision(self.precision.storage, torch.float32)

    def alternative_half(self, compute: torch.dtype, instead: torch.dtype) -> str:
        """Return the precision that differs from this one in its half format only.

        Args:
            compute: the half format of this precision; for another one the answer is empty, as for
                a precision that converts layers.
            instead: the half format of the answer.
        """
        if self.precision.compute is not compute or self.precision.converts_layers:
            return ""
        stores_half = self.precision.storage in _HALVES
        return _half_precision(instead, instead if stores_half else torch.float32)


def _half_precision(compute: torch.dtype, storage: torch.dtype) -> str:
    """Return the built-in precision that computes in a half format and stores in it or float32."""
    width = "16" if compute is torch.float16 else "bf16"
    return f"{width}-true" if storage is compute else f"{width}-mixed"


def precision_advice(error: Exception, model: nn.Module, precision: Precision) -> str:
    """Return what to change or type where the precision made a forward, loss or backward fail.

    Args:
        error: what was raised.
        model: as it was built and converted.
        precision: of the run.

    Returns:
        Sentences for the message; empty where the precision is not known to be the cause.
    """
    name, module = failing_module(error, model) or ("", None)
    cause = PrecisionCause(str(error), model, precision, name, module, _last_line(error))
    # A rule may find that the precision is not the cause after all; then the next one is asked.
    for pattern, say in RULES:
        advice = say(cause) if pattern.search(cause.text) else ""
        if advice:
            return advice
    return ""


def _last_line(error: Exception) -> str:
    """Return the innermost line outside PyTorch and the runner: that is the user's own code."""
    line = ""
    for frame, number in walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        # "<" begins the name of code without a file, such as <string>.
        if not path.startswith((*_LIBRARIES, "<")):
            line = f"{Path(path).name}, line {number}"
    return line


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _alternatives(*choices: str) -> str:
    """Return a sentence from the choices that are not empty."""
    text = "; or ".join(filter(None, choices))
    return f"{text[:1].upper()}{text[1:]}."


def _type_override(override: str, then: str = "") -> str:
    """Return the advice to type an override; empty without one."""
    return f"type {override}{then}" if override else ""


def _forward(cause: PrecisionCause) -> str:
    """Return which forward has to change."""
    if cause.module is None:
        return "that place"
    if type(cause.module).__module__.startswith("torch."):
        return f"the forward that calls {_kind(cause.module)}"
    return f"{_kind(cause.module)}.forward"


def _say_kernel(cause: PrecisionCause) -> str:
    mixed = cause.mixed_alternative()
    return (
        f"{cause.location()} PyTorch has no such operation in half precision on "
        f"{cause.device.type}. "
        + _alternatives(
            _type_override(cause.keep_fp32_override()),
            _type_override(
                f"precision={mixed}" if mixed else "",
                ", whose autocast computes torch.linalg and torch.fft in float32",
            ),
            f"in {_forward(cause)}, give the operation x.float() and cast what it returns back "
            "with .to(x.dtype)",
        )
    ).strip()


def _say_overflow(cause: PrecisionCause) -> str:
    wide = cause.alternative_half(torch.float16, torch.bfloat16)
    half = cause.precision.compute
    dtype = dtype_name(half)
    return (
        f"{cause.location()} A constant in the model is beyond the range of {dtype}, which ends at "
        f"{torch.finfo(half).max:.5g}. "
        + _alternatives(
            f"write torch.finfo(x.dtype).min in {_forward(cause)} in place of a mask's -1e9, or "
            'float("-inf")',
            _type_override(cause.keep_fp32_override()),
            _type_override(f"precision={wide}" if wide else "", ", with the range of float32"),
        )
    ).strip()


def _say_numpy_dtype(cause: PrecisionCause) -> str:
    float16 = cause.alternative_half(torch.bfloat16, torch.float16)
    return (
        f"{cause.location()} NumPy has no bfloat16. "
        + _alternatives(
            f"write x.float().numpy() in {_forward(cause)}",
            _type_override(cause.keep_fp32_override()),
            _type_override(f"precision={float16}" if float16 else ""),
        )
    ).strip()


def _say_numpy_gradient(cause: PrecisionCause) -> str:
    return (
        f"{cause.location()} NumPy's operations have no gradient. "
        + _alternatives(
            "compute with PyTorch's operations where a gradient has to pass",
            f"write x.detach().float().cpu().numpy() in {_forward(cause)} where none has to",
        )
    ).strip()


def _say_lstm(cause: PrecisionCause) -> str:
    accumulates = cause.precision.kernels() == "float32_accumulate"
    if cause.device.type != "cpu" or torch.float16 not in _dtypes(cause) or accumulates:
        return ""
    # `auto` is named where it avoids the native kernels for this model.
    automatic = choose_kernels("auto", cause.model) == "float32_accumulate"
    kernels = "auto" if automatic else "float32_accumulate"
    return (
        f"{cause.location()} This CPU's own float16 kernels lack it. Type "
        f"precision.cpu_float16={kernels}."
    ).strip()


def _dtypes(cause: PrecisionCause) -> set[torch.dtype]:
    return {cause.precision.compute, cause.precision.storage}


def _say_dtypes(cause: PrecisionCause) -> str:
    """Explain an operation that is given tensors of two floating dtypes."""
    if re.search(r"\b(Long|Int|Byte|Bool|long|int|Char)\b", cause.text):
        return ""  # integers are no matter of the precision
    advice = _say_unconverted(cause)
    if advice:
        return advice
    if _dtypes(cause) == {torch.float32}:
        return ""
    return (
        f"{cause.location()} Tensors of two dtypes meet there; precision={cause.precision.name} "
        f"stores {cause.precision.storage_format} and computes in "
        f"{cause.precision.compute_format}. "
        + _alternatives(
            _type_override(cause.keep_fp32_override() if cause.is_half else ""),
            f"leave out .float() and dtype= in {_forward(cause)}, or cast one to the "
            "other's dtype: a.to(b.dtype)",
        )
    ).strip()


def _say_unconverted(cause: PrecisionCause) -> str:
    """Explain parameters that a conversion left in a dtype other than the one it computes in."""
    precision = cause.precision
    if precision.storage is not torch.float32:
        return ""  # all were cast
    unconverted = {
        name: parameter.dtype
        for name, parameter in cause.model.named_parameters()
        if parameter.is_floating_point() and parameter.dtype is not torch.float32
    }
    if not unconverted:
        return ""
    dtypes = sorted({dtype_name(dtype) for dtype in unconverted.values()})
    named = ", ".join([*unconverted][:_MAX_NAMED_PARAMETERS])
    if len(unconverted) > _MAX_NAMED_PARAMETERS:
        named += f" and {len(unconverted) - _MAX_NAMED_PARAMETERS} more"
    compute = ""
    if len(dtypes) == 1 and {*unconverted.values()} <= {*_HALVES} - {precision.compute}:
        compute = f"precision.compute_dtype={dtypes[0]}"
    return (
        f"{cause.location()} precision={precision.name} leaves what it does not convert as the "
        f"model was built, here {' and '.join(dtypes)} ({named}), and "
        f"computes in {str(precision.compute).removeprefix('torch.')}. "
        + _alternatives(
            "build the model in float32 (end its constructor with self.float())",
            _type_override(compute),
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
