"""Explain why a model, a loss or a backward fails: its precision is the cause, or no gradient.

A table holds rules, each a condition and a message. The first rule counts whose condition holds and
whose message is not empty. batch_rules.py has those for a first batch that does not fit.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from runner.core import Precision, Task, fmt, module_tree, tensor_facts
from runner.precision.casting import KeptInFloat32, keep_in_float32
from runner.precision.conversion import is_converted
from runner.precision.emulation.cpu_kernels import choose_kernels
from runner.training.tasks.detection import Detection

_HALVES = {torch.float16: "16", torch.bfloat16: "bf16"}
"""Half-precision dtypes, and how the names of their precisions begin."""
LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
"""How the files of torch and of the runner begin, which are nobody's own code."""


@dataclass(frozen=True)
class Failure:
    """An error, and what was computed when it was raised.

    Attributes:
        error: what was raised.
        model: as it was built and converted.
        precision: of the run.
        task: of the run; this and what follows is there for a failure on a known batch only.
        names: the options of `model`, `data` and `task`.
        inputs: of the batch, as the data set yields them.
        target: of the batch.
        outputs: the model's output; empty where its forward raised.
        call: computes the batch again; None where that cannot be.
    """

    error: Exception
    model: nn.Module
    precision: Precision
    task: Task | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    inputs: Any = None
    target: Any = None
    outputs: Sequence[Any] = ()
    call: Callable[[], object] | None = None

    @property
    def text(self) -> str:
        """Return the message of the error itself."""
        return str(self.error)

    def says(self, pattern: str) -> bool:
        """Return whether the error's message matches a pattern."""
        return bool(re.search(pattern, self.text))

    @property
    def in_forward(self) -> bool:
        """Return whether the model's forward raised, not the loss."""
        return not self.outputs

    @property
    def expected_output(self) -> str:
        """Return in words what output a built-in task takes; empty for a task of the user's own."""
        # What a base class takes does not count: a subclass may take another part of the output.
        return vars(type(self.task)).get("takes", "")

    @property
    def is_detection(self) -> bool:
        """Return whether the task is the built-in detection of boxes."""
        return isinstance(self.task, Detection)

    @property
    def takes(self) -> str:
        """Return the arguments of the model's forward in words."""
        names = ", ".join(signature(self.model.forward).parameters)
        return f"{type(self.model).__name__}.forward takes ({names})"

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @cached_property
    def name_and_module(self) -> tuple[str, nn.Module | None]:
        """Return the dotted name of the innermost module whose forward raised, and the module.

        The name is empty for the model itself, the module None where no module's forward was
        running.
        """
        # A traceback goes inwards, so the last frame whose `self` is a module is the innermost one.
        named = {id(module): (name, module) for name, module in self.model.named_modules()}
        innermost: tuple[str, nn.Module | None] = ("", None)
        for frame, _ in walk_tb(self.error.__traceback__):
            innermost = named.get(id(frame.f_locals.get("self")), innermost)
        if innermost[1] is None and self.own_function:
            # In a backward no module runs: it is the one whose forward names the function.
            for name, module in named.values():
                code = getattr(type(module).forward, "__code__", None)
                if code is not None and self.own_function in code.co_names:
                    return name, module
        return innermost

    @cached_property
    def own_function(self) -> str:
        """Return the name of the user's torch.autograd.Function whose backward raised; or empty."""
        for frame, _ in walk_tb(self.error.__traceback__):
            code = frame.f_code
            is_own = code.co_varnames and not code.co_filename.startswith(LIBRARIES)
            if code.co_name == "backward" and is_own:
                return type(frame.f_locals.get(code.co_varnames[0])).__name__[: -len("Backward")]
        return ""

    @property
    def module(self) -> nn.Module | None:
        """Return the innermost module whose forward raised; None for none."""
        return self.name_and_module[1]

    @property
    def module_in_words(self) -> str:
        """Return the innermost module whose forward raised, as `head (Linear)`; empty for none."""
        name, module = self.name_and_module
        return "" if module is None else f"{name or 'the model itself'} ({type(module).__name__})"

    def location(self) -> str:
        """Return a sentence with the module and the line that failed; empty for neither."""
        # The innermost line outside PyTorch and the runner is the user's own code.
        line = ""
        for frame, number in walk_tb(self.error.__traceback__):
            path = frame.f_code.co_filename
            # "<" begins the name of code without a file, such as <string>.
            if not path.startswith((*LIBRARIES, "<")):
                line = f", {Path(path).name}, line {number}"
        if not self.module_in_words:
            return f"It fails outside the model's forward{line}." if line else ""
        return f"It fails in {self.module_in_words}{line}."

    @property
    def forward(self) -> str:
        """Return in words which forward has to change."""
        if self.module is None:
            return "that place"
        kind = type(self.module).__name__
        is_library = type(self.module).__module__.startswith("torch.")
        return f"the forward that calls {kind}" if is_library else f"{kind}.forward"

    def keep_fp32(self) -> str:
        """Return the advice to keep the failing modules in float32; empty where there is none."""
        names = self._failing_modules()
        # Repeated blocks are numbered: layers.0.attention and layers.1.attention are alike.
        patterns = {re.sub(r"(?<![^.])\d+(?![^.])", "*", name): None for name in names}
        modules = [name for name, _ in self.model.named_modules() if name]
        matched = {
            name for name in modules for p in patterns if module_tree.matches_pattern(p, name)
        }
        if len(patterns) == len(names) or module_tree.outermost_names(
            matched
        ) != module_tree.outermost_names(names):
            patterns = dict.fromkeys(names)
        typed = ",".join([*map(str, self.precision.keep_fp32), *patterns])
        return f"type precision.keep_fp32=[{typed}]" if names else ""

    def _failing_modules(self) -> list[str]:
        """Return the dotted names of the modules that fail: the first one, and where the batch can
        be computed again, each that fails when those before it are in float32, as the model's then
        are. Elsewhere those of its class go with it, if that is the user's own."""
        name, module = self.name_and_module
        names: list[str] = []
        if self.call is None and not type(module).__module__.startswith(("torch.", "runner.")):
            names = [n for n, m in self.model.named_modules() if type(m) is type(module)]
        while name and not isinstance(module, KeptInFloat32):
            names.append(name)
            if self.call is None:
                break
            keep_in_float32(self.model, [name], self.precision.storage)
            try:
                self.call()
                break
            except Exception as error:  # of whatever type the forward raised at first
                name, module = replace(self, error=error).name_and_module
        return [*dict.fromkeys(filter(None, names))]

    def mixed_alternative(self) -> str:
        """Return the advice to type the mixed precision that computes linalg and fft in float32.

        Only autocast on a CPU does so. The answer is empty for a precision that stores in float32.
        """
        half = _HALVES.get(self.precision.storage)
        if half is None or self.device.type != "cpu":
            return ""
        return f"type precision={half}-mixed, whose autocast computes linalg and fft in float32"

    def edit(self, change: str) -> str:
        """Return the advice to change the failing forward; empty where a library has it."""
        source = getattr(sys.modules.get(type(self.module).__module__), "__file__", None) or ""
        is_library = "site-packages" in source and not source.startswith(LIBRARIES)
        return "" if is_library else f"in {self.forward}, {change}"

    def alternative_half(self, compute: torch.dtype, instead: torch.dtype, reason: str = "") -> str:
        """Return the advice to type the precision that differs in its half format only.

        Args:
            compute: the half format of this precision; for another one the answer is empty, as for
                a precision that converts layers.
            instead: the half format of the answer.
            reason: why it helps.
        """
        if self.precision.compute is not compute or self.precision.converts_layers:
            return ""
        kind = "true" if self.precision.storage in _HALVES else "mixed"
        return f"type precision={_HALVES[instead]}-{kind}{reason}"


Rule = tuple[str | Callable[[Failure], bool], Callable[[Failure], str]]
"""A pattern of the error's text or a condition, and the message."""


def first_message(rules: Sequence[Rule], failure: Failure) -> str:
    """Return the message of the first rule that applies; empty for none."""
    for condition, message in rules:
        applies = failure.says(condition) if isinstance(condition, str) else condition(failure)
        text = message(failure) if applies else ""
        if text:
            return text
    return ""


def precision_advice(failure: Failure) -> str:
    """Return what to change or type where the precision made a forward, loss or backward fail.

    Returns:
        Sentences for the message; empty where the precision is not known to be the cause.
    """
    location = failure.location()  # first, because a search for advice changes the model
    advice = first_message(PRECISION_RULES, failure)
    return f"{location} {advice}".strip() if advice else ""


def _alternatives(*choices: str) -> str:
    """Return a sentence from the choices that are not empty."""
    text = "; or ".join(filter(None, choices))
    return f"{text[:1].upper()}{text[1:]}."


def _missing_kernels(failure: Failure) -> str:
    """Return which kernels have what this CPU's own float16 kernels lack; empty without a cause."""
    precision = failure.precision
    computes_float16 = torch.float16 in (precision.compute, precision.storage)
    accumulates = precision.kernels(failure.model, failure.device) == "float32_accumulate"
    if failure.device.type != "cpu" or not computes_float16 or accumulates:
        return ""
    # `auto` is named where it avoids the native kernels for this model.
    automatic = choose_kernels("auto", failure.model) == "float32_accumulate"
    kernels = "auto" if automatic else "float32_accumulate"
    return f"This CPU's own float16 kernels lack it. Type precision.cpu_float16={kernels}."


def _functorch_module(failure: Failure) -> str | None:
    """Return the dotted name of the module that torch.func calls, of a function the module that
    fails in it; None where the failure is outside of torch.func."""
    names = {id(module): name for name, module in failure.model.named_modules()}
    frames = [frame for frame, _ in walk_tb(failure.error.__traceback__)]
    frames = [frame for frame in frames if "_functorch" in frame.f_code.co_filename]
    called = [names.get(id(frame.f_locals.get("module"))) for frame in frames]
    return next(filter(None, called), failure.name_and_module[0]) if frames else None


def _two_dtypes(failure: Failure) -> str:
    """Return what to change where an operation is given tensors of two floating dtypes."""
    precision = failure.precision
    dtypes = {precision.compute, precision.storage}
    if failure.says(r"(?i)\b(long|u?int\d*|byte|bool|char|short)\b"):
        return ""  # integers are no matter of the precision
    unconverted = _unconverted_parameters(failure)
    if unconverted:
        return unconverted
    change = (
        f"leave out .float(), .double() and dtype= in {failure.forward}, or cast: a.to(b.dtype)"
    )
    if failure.own_function:
        change = (
            f"write @torch.amp.custom_fwd(device_type={failure.device.type!r}) and @torch.amp."
            f"custom_bwd(device_type={failure.device.type!r}) above the forward and the backward "
            f"of {failure.own_function}, or cast: a.to(b.dtype)"
        )
    elif _functorch_module(failure) is not None:
        change = (
            f"write `with torch.autocast({failure.device.type!r}, enabled=False):` around the call "
            "of torch.func; or type precision=bf16-true or precision=32-true"
        )
    kept = failure.keep_fp32() if dtypes & {*_HALVES} else ""
    is_double = torch.float64 not in dtypes and failure.says("(?i)double")
    wider = "type precision=64-true" if is_double else ""
    return (
        f"Tensors of two dtypes meet there; precision={precision.name} stores "
        f"{precision.storage_format} and computes in {precision.compute_format}. "
        + _alternatives(kept, wider, change)
    )


def _unconverted_parameters(failure: Failure) -> str:
    """Return what to change where a conversion left parameters in a dtype other than float32."""
    precision = failure.precision
    if precision.storage is not torch.float32:
        return ""  # all were cast
    unconverted = {
        name: parameter.dtype
        for name, parameter in failure.model.named_parameters()
        if parameter.is_floating_point() and parameter.dtype is not torch.float32
    }
    if not unconverted:
        return ""
    dtypes = sorted({tensor_facts.dtype_name(dtype) for dtype in unconverted.values()})
    named = fmt.first_names([*unconverted], 3)
    compute = ""
    if len(dtypes) == 1 and {*unconverted.values()} <= {*_HALVES} - {precision.compute}:
        compute = f"type precision.compute_dtype={dtypes[0]}"
    return (
        f"precision={precision.name} leaves what it does not convert as the model was built, here "
        f"{' and '.join(dtypes)} ({named}), and computes in "
        f"{tensor_facts.dtype_name(precision.compute)}. "
        + _alternatives(
            "build the model in float32 (end its constructor with self.float())", compute
        )
    )


PRECISION_RULES: tuple[Rule, ...] = (
    (
        "without overflow",
        lambda f: (
            "A constant in the model is beyond the range of "
            f"{tensor_facts.dtype_name(f.precision.compute)}, "
            f"which ends at {torch.finfo(f.precision.compute).max:.5g}. "
            + _alternatives(
                f"write torch.finfo(x.dtype).min in {f.forward} in place of a mask's -1e9",
                f.keep_fp32(),
                f.alternative_half(torch.float16, torch.bfloat16, ", with the range of float32"),
            )
        ),
    ),
    (
        "unsupported ScalarType BFloat16",
        lambda f: (
            "NumPy has no bfloat16. "
            + _alternatives(
                f"write x.float().numpy() in {f.forward}",
                f.keep_fp32(),
                f.alternative_half(torch.bfloat16, torch.float16),
            )
        ),
    ),
    (
        r"Can't call numpy\(\) on Tensor that requires grad",
        lambda f: (
            "NumPy's operations have no gradient. "
            + _alternatives(
                "compute with PyTorch's operations where a gradient has to pass",
                f"write x.detach().float().cpu().numpy() in {f.forward} where none has to",
            )
        ),
    ),
    ("could not create a primitive", _missing_kernels),
    (
        "Inference tensors",
        lambda f: (
            "What torch.inference_mode() computes has no gradient. Leave it out of the model and "
            "the loss, or write torch.no_grad() where nothing has to train."
        ),
    ),
    (
        lambda f: (
            f.precision.converts_layers
            and f.module is not None
            and is_converted(f.module)
            and _functorch_module(f) is not None
        ),
        lambda f: (
            f"torch.func cannot pass a layer that precision={f.precision.name} converts, or give "
            f"it other weights. Type precision.ignore_modules=[{_functorch_module(f)}] beside "
            "those that you typed, which leaves it as it is, or precision=bf16-true or 32-true."
        ),
    ),
    (
        "cached during selective activation checkpoint has been mutated",
        lambda f: (
            "The model's own selective checkpointing saves what the emulation changes in place. "
            "Let its policy save products alone (torch.ops.aten.mm.default and addmm), or type "
            "a precision that emulates nothing, for example precision=bf16-mixed."
        ),
    ),
    (
        lambda f: "argument: 'x'" in f.text and hasattr(f.module, "get_base_layer"),
        lambda f: (
            f"An adapter's layer takes its input by position. Write self.{f.name_and_module[0]}(x) "
            "in place of a keyword, or leave the layer out of adapter.modules."
        ),
    ),
    (
        (
            r"not implemented for '(Complex)?(Half|BFloat16)'|Low precision dtypes not supported|"
            r"Unsupported dtype (Half|BFloat16)|powers of two when computing in half precision"
        ),
        lambda f: (
            f"PyTorch has no such operation in half precision on {f.device.type}. "
            + _alternatives(
                f.keep_fp32(),
                f.mixed_alternative(),
                f.edit(
                    "give the operation x.float() and cast what it returns back with .to(x.dtype)"
                ),
            )
        ),
    ),
    (
        (
            r"same dtype|should be the same|scalar type|does not match weight dtype|dtypes match|"
            r"equal to src\.dtype|but got dtype|could not create a primitive"
        ),
        _two_dtypes,
    ),
)
"""Texts of PyTorch's errors that the precision may cause, and what to say; an empty message means
that it is not the cause."""
