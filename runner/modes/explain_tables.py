"""Print the modules of mode=explain: one on a screen of its own, several in one table."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from runner.diagnostics.module_trace import TracedModule, TracedPass
from runner.diagnostics.numerics.measure import MAX_SAMPLE_ELEMENTS
from runner.diagnostics.numerics.numerics_page import VERDICTS, format_share
from runner.diagnostics.numerics.results import QuantizationLoss, Sensitivity, TensorStats
from runner.diagnostics.stored_tensors import StoredTensor, stored_tensors
from runner.modes.explain_conversion import ConversionExplainer, skipped_lines
from runner.precision.contract import Precision
from runner.training.model import BuiltModel
from runner.utils.formatting import format_number

MAX_STORED_ROWS = 6
"""Parameters and buffers of one module that are printed; of more, their number and bytes."""
MAX_MODULE_ROWS = 24
"""Modules that the table of several shows."""
MAX_TENSORS = 3
"""Inputs or outputs of a module that are printed."""
MAX_KERNELS = 2
"""Kernels of one dtype that are named."""
FORMAT_LABELS = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "E4M3 scaled",
    "float8_e5m2": "E5M2 scaled",
    "float8_e4m3fn_unscaled": "E4M3",
    "float8_e5m2_unscaled": "E5M2",
}
"""Rows of the table of one module, by the names of the measurements."""
COMPARED_FORMATS = ("float16", "bfloat16", "float8_e4m3fn")
"""Columns of the table of several modules."""
LEAST_SHARE = 0.001
"""Share of values that become zero from which it is printed."""
LEAST_ERROR = 1e-5
"""Relative rounding error below which only the bound is printed."""
_SEVERITY: tuple[Sensitivity, ...] = ("range", "precision")


@dataclass(frozen=True)
class ExplainedStep:
    """The step in which modules were traced.

    Attributes:
        label: of the run.
        device: name of the device.
        examples: in the batch.
        weights: where the weights come from, in words.
        loss: of the batch.
        loss_scale: by which gradients are multiplied; None without one.
        precision: of the run.
        precision_keys: of the precision's config.
        built: the model, and the report of its conversion.
    """

    label: str
    device: str
    examples: int
    weights: str
    loss: float
    loss_scale: float | None
    precision: Precision
    precision_keys: Collection[str]
    built: BuiltModel

    @property
    def conversion(self) -> ConversionExplainer:
        """Return what says how the precision treats modules, and what to type to change that."""
        built = self.built
        return ConversionExplainer(self.precision, self.precision_keys, built.model, built.report)

    def describe(self) -> str:
        """Return the batch, the weights, the loss and the loss scale as a line."""
        scale = "no loss scale"
        if self.loss_scale is not None:
            scale = f"gradients times the loss scale {self.loss_scale:g}"
        loss = format_number(self.loss)
        return f"first batch of {self.examples}, weights of {self.weights}: loss {loss}, {scale}"


def print_module(console: Console, step: ExplainedStep, traced: TracedModule) -> None:
    """Print one module on a screen."""
    name = traced.name or "(model)"
    module = traced.module
    console.print(f"{name} ({type(module).__name__}): {step.label}, {step.device}")
    console.print(step.describe())
    for line in step.conversion.describe(traced.name):
        console.print(line)
    console.print(_stored_table([*stored_tensors(module)]))
    for key, value in step.precision.gauges(step.built.model).items():
        if key.endswith(f"/{name}"):
            console.print(f"{key}: {format_number(value.item())}")
    if not traced.was_called:
        console.print(f"Its forward was not called in this step: {_not_called_reason(traced)}")
    else:
        console.print(_flow_table(traced))
    stats = traced.measure()
    if stats:
        console.print(_loss_table(stats))
        console.print(_loss_caption(step.precision))
    _print_remedies(console, step, traced.name or "*", [traced.name])


def print_modules(
    console: Console, step: ExplainedStep, pattern: str, modules: Sequence[TracedModule]
) -> None:
    """Print a line for each of several modules."""
    console.print(f"{len(modules)} modules match {pattern}: {step.label}, {step.device}")
    console.print(step.describe())
    table = _table()
    formats = [FORMAT_LABELS[name] for name in COMPARED_FORMATS]
    # On a narrow screen long names are folded, in place of dtypes that would be cut.
    table.add_column("module", overflow="fold")
    for head in ("converted", "weights\nin", "computes\nin", *formats):
        table.add_column(head.replace(" ", "\n"), min_width=8)
    for traced in modules[:MAX_MODULE_ROWS]:
        table.add_row(*_module_cells(step, traced))
    console.print(table)
    if len(modules) > MAX_MODULE_ROWS:
        rest = len(modules) - MAX_MODULE_ROWS
        console.print(f"and {rest} more: type a pattern that matches fewer")
    console.print(
        "Formats: largest relative rounding error of weights, inputs, outputs and output "
        "gradients; range, precision: what the format lacks"
    )
    rows = [row for traced in modules for row in step.conversion.rows(traced.name)]
    for line in skipped_lines(rows):
        console.print(line)
    _print_remedies(console, step, pattern, [traced.name for traced in modules])
    console.print(f"one module in full: explain {modules[0].name}")


def _table(title: str | None = None) -> Table:
    # Without edges: a module must fit on a screen.
    return Table(title=title, title_justify="left", show_edge=False, pad_edge=False)


def _print_remedies(
    console: Console, step: ExplainedStep, pattern: str, names: Sequence[str]
) -> None:
    lines = [*step.conversion.remedies(pattern, names)]
    if not lines:
        lines = ["compute it in fewer bits: another precision, as precision=bf16-mixed"]
    for line in lines:
        console.print(f"To {line}", soft_wrap=True)


def _not_called_reason(traced: TracedModule) -> str:
    children = [name for name, _ in traced.module.named_children()]
    if not children:
        return "the model does not call it."
    return f"the model may call the modules inside it. Type explain {traced.name}.{children[0]}"


def _stored_table(tensors: Sequence[StoredTensor]) -> Table:
    total = sum(tensor.size for tensor in tensors)
    table = _table(f"stores {_bytes(total)}")
    for head in ("tensor", "dtype", "shape", "bytes", ""):
        table.add_column(head, justify="right" if head == "bytes" else "left")
    for tensor in tensors[:MAX_STORED_ROWS]:
        size = f"{tensor.size:,}"
        table.add_row(tensor.name, tensor.dtype, str(tensor.shape), size, tensor.note)
    rest = tensors[MAX_STORED_ROWS:]
    if rest:
        dtypes = ", ".join(sorted({tensor.dtype for tensor in rest}))
        size = f"{sum(tensor.size for tensor in rest):,}"
        table.add_row(f"and {len(rest)} more", dtypes, "", size, "")
    return table


def _bytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _flow_table(traced: TracedModule) -> Table:
    table = _table("one forward and backward")
    for head in ("", "takes", "computes in", "gives"):
        table.add_column(head, overflow="fold")
    forward = traced.forward
    table.add_row("forward", _listed(forward.takes), _kernel_text(forward), _listed(forward.gives))
    backward = traced.backward
    if not backward.takes:
        table.add_row("backward", "none: no gradient reaches it", "", "")
        return table
    weights = [f"weights: {dtype}" for dtype in traced.weight_gradients()]
    table.add_row(
        "backward",
        _listed(backward.takes),
        _kernel_text(backward),
        _listed([*backward.gives, *weights]),
    )
    return table


def _listed(texts: Iterable[str]) -> str:
    """Return texts on a line each, with a count of those above MAX_TENSORS."""
    all_texts = [*texts]
    more = len(all_texts) - MAX_TENSORS
    return "\n".join(all_texts[:MAX_TENSORS] + ([f"and {more} more"] if more > 0 else []))


def _kernel_text(traced: TracedPass) -> str:
    """Return the dtypes of the kernels, with the names of the first ones."""
    by_dtype: dict[str, list[str]] = {}
    for dtype, kernel in traced.kernels:
        by_dtype.setdefault(dtype, []).append(kernel)
    lines = []
    for dtype, kernels in by_dtype.items():
        more = ", …" if len(kernels) > MAX_KERNELS else ""
        lines.append(f"{dtype} ({', '.join(kernels[:MAX_KERNELS])}{more})")
    return "\n".join(lines) or "no product or norm"


def _loss_table(stats: Mapping[str, TensorStats]) -> Table:
    table = _table("what each format would lose of these tensors")
    for head in ("", *stats, "verdict"):
        table.add_column(head.replace(" ", "\n"))
    table.add_row("largest", *[_largest(tensor) for tensor in stats.values()], "")
    for name, label in FORMAT_LABELS.items():
        losses = [tensor.formats[name] for tensor in stats.values()]
        table.add_row(label, *map(_loss_text, losses), VERDICTS[_worst(losses)])
    return table


def _largest(stats: TensorStats) -> str:
    if stats.not_finite:
        return f"{_percent(stats.not_finite)} not finite"
    return format_number(stats.largest)


def _loss_text(loss: QuantizationLoss) -> str:
    """Return the relative rounding error, and the shares that overflow and become zero."""
    parts = [_error_text(loss.noise)]
    if loss.overflow:
        parts.append(f"{_percent(loss.overflow)} over")
    if loss.underflow >= LEAST_SHARE:
        parts.append(f"{_percent(loss.underflow)} zero")
    return ", ".join(parts)


def _error_text(noise: float) -> str:
    """Return a relative rounding error, the root of noise over signal, in percent."""
    error = math.sqrt(noise)
    if 0 < error < LEAST_ERROR:
        return f"<{_percent(LEAST_ERROR)}"
    return _percent(error) if error else "exact"


def _percent(share: float) -> str:
    """Return a share in percent, without the space that would widen the tables."""
    return format_share(share).replace(" ", "")


def _worst(losses: Iterable[QuantizationLoss]) -> Sensitivity:
    """Return what a format lacks for any of the tensors that lose this."""
    found = {loss.sensitivity for loss in losses}
    for lack in _SEVERITY:
        if lack in found:
            return lack
    return "none"


def _loss_caption(precision: Precision) -> str:
    """Return how to read the table of losses."""
    text = (
        "%: relative rounding error (root mean square), in at most "
        f"{MAX_SAMPLE_ELEMENTS:,} elements of a tensor; over: share past the largest value; "
        f"zero: share that becomes zero, from {_percent(LEAST_SHARE)} on."
    )
    if precision.formats:
        text += (
            " Some are rounded already by "
            f"precision={precision.name}: precision=32-true shows the loss of unrounded ones."
        )
    return text


def _module_cells(step: ExplainedStep, traced: TracedModule) -> Iterator[str]:
    """Yield the cells of a module in the table of several."""
    rows = step.conversion.rows(traced.name)
    yield traced.name
    yield f"{sum(row.done for row in rows)}/{len(rows)}" if rows else "-"
    largest = max(stored_tensors(traced.module), key=lambda tensor: tensor.size, default=None)
    yield "-" if largest is None else largest.dtype
    dtypes = _dtypes(traced.forward)
    backward = _dtypes(traced.backward)
    yield (dtypes or "-") if backward in ("", dtypes) else f"{dtypes}, backward {backward}"
    stats = traced.measure().values()
    for name in COMPARED_FORMATS:
        losses = [tensor.formats[name] for tensor in stats]
        lack = _worst(losses)
        worst = max((loss.noise for loss in losses), default=0.0)
        yield _error_text(worst) if lack == "none" else lack


def _dtypes(traced: TracedPass) -> str:
    return " ".join(sorted({dtype for dtype, _ in traced.kernels}))
