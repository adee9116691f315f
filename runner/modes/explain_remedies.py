"""Say whether a precision converts a module, why not, and what to type to change that."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from runner.precision.contract import (
    ConversionReport,
    ModuleConversion,
    Precision,
    summarize_modules,
)
from runner.precision.conversion import IGNORED_REASON, ROOT_NAME, find_shared_weights
from runner.precision.keep_fp32 import Float32Island
from runner.precision.kept_blocks import KEPT_REASON
from runner.utils.modules import repeated_blocks

MAX_REASONS = 3
"""Reasons for skipped modules that are printed of a module that holds several layers."""
_REMEDY_BY_REASON = {
    IGNORED_REASON: "convert it: leave it out of precision.ignore_modules=",
    KEPT_REASON: "convert it: leave precision.keep_blocks= out, or keep fewer blocks",
}


def conversion_rows(report: ConversionReport, name: str) -> list[ModuleConversion]:
    """Return the report's rows of a module and of those inside it.

    Args:
        report: of the conversion.
        name: dotted name of the module; empty for the model.
    """
    # An adapter has put the layer under a further name.
    path = name.removesuffix(".base_layer")
    rows = []
    for row in report.modules:
        if not path or row.module == path or row.module.startswith(f"{path}."):
            rows.append(row)
    return rows


def describe_conversion(
    precision: Precision, report: ConversionReport, name: str, module: nn.Module
) -> Iterator[str]:
    """Yield sentences: whether the precision converts a module, and why not."""
    rows = conversion_rows(report, name)
    if not report.modules:
        yield (
            f"precision={precision.name} converts no modules: it stores {precision.storage_format} "
            f"and computes products in {precision.compute_format}"
        )
    elif not rows:
        yield f"not converted: precision={precision.name} finds no layer with weights in it"
    elif [row.module for row in rows] == [name.removesuffix(".base_layer") or ROOT_NAME]:
        yield _describe_layer(rows[0], module)
    else:
        yield f"converted {sum(row.done for row in rows)} of {len(rows)} modules with weights in it"
        skipped = summarize_modules(row for row in rows if not row.done)
        yield from (f"  skipped {text}" for text in skipped[:MAX_REASONS])
        if len(skipped) > MAX_REASONS:
            yield f"  and {len(skipped) - MAX_REASONS} more reasons, all in mode=plan"
    if precision.emulated:
        yield (
            f"emulated ({precision.compute_format}): the kernels below compute on numbers that are "
            "rounded to the format"
        )


def _describe_layer(row: ModuleConversion, module: nn.Module) -> str:
    """Return whether a layer is converted, to which class, and why not."""
    if not row.done:
        return f"not converted: {row.why}"
    while hasattr(module, "get_base_layer"):
        module = module.get_base_layer()  # type: ignore[operator,assignment]
    remark = f" ({row.why})" if row.why else ""
    return f"converted from {row.kind} to {type(module).__name__}{remark}"


class Remedies:
    """What to type so that a precision treats modules otherwise.

    Args:
        precision: of the run.
        keys: of the precision's config.
        model: as built.
        report: of the conversion.
    """

    def __init__(
        self,
        precision: Precision,
        keys: Collection[str],
        model: nn.Module,
        report: ConversionReport,
    ) -> None:
        self.precision = precision
        self.keys = keys
        self.model = model
        self.report = report

    def lines(self, pattern: str, names: Sequence[str]) -> Iterator[str]:
        """Yield a line for each change: what it does, and what to type.

        Args:
            pattern: that selects the modules.
            names: of the modules.
        """
        rows = [row for name in names for row in conversion_rows(self.report, name)]
        is_converted = any(row.done for row in rows)
        if is_converted and "ignore_modules" in self.keys:
            yield f"leave it unconverted: precision.ignore_modules=[{pattern}]"
        if is_converted and "keep_blocks" in self.keys:
            yield from self._block_lines(names)
        reasons = {row.why for row in rows}
        yield from (text for reason, text in _REMEDY_BY_REASON.items() if reason in reasons)
        yield from self._float32_lines(pattern, names)

    def _block_lines(self, names: Sequence[str]) -> Iterator[str]:
        """Yield how to leave the blocks that hold the modules unconverted, from the nearer end."""
        blocks = repeated_blocks(self.model)
        parts = [{id(part) for part in block.modules()} for block in blocks]
        modules = [self.model.get_submodule(name) for name in names]
        indices = [i for i, inside in enumerate(parts) if any(id(m) in inside for m in modules)]
        if not indices:
            return
        first = max(indices) + 1
        last = len(blocks) - min(indices)
        # Keeping every block is refused: nothing would be converted.
        if min(first, last) < len(blocks):
            counts = f"[{first},0]" if first <= last else f"[0,{last}]"
            yield f"leave the model's blocks up to it unconverted: precision.keep_blocks={counts}"

    def _float32_lines(self, pattern: str, names: Sequence[str]) -> Iterator[str]:
        """Yield how to keep the modules in float32, where the precision does not."""
        precision = self.precision
        computes_float32 = precision.compute is torch.float32 and not precision.converts_layers
        if "keep_fp32" not in self.keys or computes_float32:
            return
        modules = [self.model.get_submodule(name) for name in names]
        if all(isinstance(module, Float32Island) for module in modules):
            yield "compute it in the precision: leave it out of precision.keep_fp32="
            return
        patterns = ",".join([pattern, *self._shared_with(names)])
        yield f"store and compute it in float32: precision.keep_fp32=[{patterns}]"

    def _shared_with(self, names: Sequence[str]) -> list[str]:
        """Return the other modules that must be in float32, too, because they share a weight."""
        if self.precision.storage is torch.float32:
            return []
        inside = {f"{name}.".lstrip(".") for name in names}
        shared: set[str] = set()
        for name, others in find_shared_weights(self.model).items():
            if any(f"{name}.".startswith(prefix) for prefix in inside):
                shared.update(others)
        return sorted(n for n in shared if not any(f"{n}.".startswith(p) for p in inside))
