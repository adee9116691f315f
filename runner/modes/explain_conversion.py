"""Say whether a precision converts a module, why not, and what to type to change that."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import nn

from runner.precision.contract import (
    ConversionReport,
    ModuleConversion,
    Precision,
    summarize_modules,
)
from runner.precision.conversion import IGNORED_REASON, ROOT_NAME, find_shared_weights
from runner.precision.keep_fp32 import ISLAND_REASON, Float32Island
from runner.precision.kept_blocks import KEPT_REASON
from runner.utils.modules import repeated_blocks

MAX_REASONS = 3
"""Reasons for skipped modules that are printed."""
_REMEDY_BY_REASON = {
    IGNORED_REASON: "convert it: leave it out of precision.ignore_modules=",
    KEPT_REASON: "convert it: leave precision.keep_blocks= out, or keep fewer blocks",
}


class ConversionExplainer:
    """Says how a precision treats the modules of a model, and what to type to change that.

    Args:
        precision: of the run.
        keys: of the precision's config.
        model: as the precision has converted it.
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

    def rows(self, name: str) -> list[ModuleConversion]:
        """Return the report's rows of a module and of those inside it.

        Args:
            name: dotted name; empty for the model.
        """
        path = _name_in_report(name)
        rows = []
        for row in self.report.modules:
            is_inside = path == ROOT_NAME or row.module.startswith(f"{path}.")
            if is_inside or row.module == path:
                rows.append(row)
        return rows

    def describe(self, name: str) -> Iterator[str]:
        """Yield lines: whether the precision converts a module, and why not."""
        precision = self.precision
        rows = self.rows(name)
        if [row.module for row in rows] == [_name_in_report(name)]:
            yield self._describe_layer(name, rows[0])
        elif rows:
            done = sum(row.done for row in rows)
            yield f"converted {done} of {len(rows)} modules with weights in it"
            yield from skipped_lines(rows)
        elif self._is_in_island(name):
            yield ISLAND_REASON
        elif self.report.modules:
            yield f"not converted: precision={precision.name} finds no layer with weights in it"
        else:
            yield (
                f"precision={precision.name} converts no modules: it stores "
                f"{precision.storage_format} and computes products in {precision.compute_format}"
            )
        if precision.emulated:
            yield (
                f"emulated ({precision.compute_format}): the kernels below compute on numbers that "
                "are rounded to the format"
            )

    def remedies(self, pattern: str, names: Sequence[str]) -> Iterator[str]:
        """Yield a line for each change of modules: what it does, and what to type.

        Args:
            pattern: that selects the modules.
            names: of the modules.
        """
        rows = [row for name in names for row in self.rows(name)]
        is_converted = any(row.done for row in rows)
        if is_converted and "ignore_modules" in self.keys:
            yield f"leave it unconverted: precision.ignore_modules=[{pattern}]"
        if is_converted and "keep_blocks" in self.keys:
            yield from self._block_remedy(names)
        reasons = {row.why for row in rows}
        yield from (text for reason, text in _REMEDY_BY_REASON.items() if reason in reasons)
        yield from self._float32_remedy(pattern, names)

    def _describe_layer(self, name: str, row: ModuleConversion) -> str:
        """Return whether a layer is converted, to which class, and why not."""
        if not row.done:
            return f"not converted: {row.why}"
        module = self.model.get_submodule(name)
        # An adapter's wrapper has taken the name.
        while hasattr(module, "get_base_layer"):
            module = module.get_base_layer()  # type: ignore[operator,assignment]
        remark = f" ({row.why})" if row.why else ""
        return f"converted from {row.kind} to {type(module).__name__}{remark}"

    def _is_in_island(self, name: str) -> bool:
        """Return whether precision.keep_fp32 selects a module or one that holds it."""
        parts = name.split(".") if name else []
        holders = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
        return any(isinstance(self.model.get_submodule(n), Float32Island) for n in holders)

    def _block_remedy(self, names: Sequence[str]) -> Iterator[str]:
        """Yield how to keep the blocks that hold the modules, from the nearer end of the model."""
        modules = {id(self.model.get_submodule(name)) for name in names}
        blocks = repeated_blocks(self.model)
        indices = []
        for i, block in enumerate(blocks):
            if not modules.isdisjoint(id(part) for part in block.modules()):
                indices.append(i)
        if not indices:
            return
        first = max(indices) + 1
        last = len(blocks) - min(indices)
        # Keeping every block is refused: nothing would be converted.
        if min(first, last) < len(blocks):
            counts = f"[{first},0]" if first <= last else f"[0,{last}]"
            yield f"leave the model's blocks up to it unconverted: precision.keep_blocks={counts}"

    def _float32_remedy(self, pattern: str, names: Sequence[str]) -> Iterator[str]:
        """Yield how to keep the modules in float32, where the precision does not."""
        precision = self.precision
        computes_float32 = precision.compute is torch.float32 and not precision.converts_layers
        if "keep_fp32" not in self.keys or computes_float32:
            return
        if all(self._is_in_island(name) for name in names):
            yield "compute it in the precision: leave it out of precision.keep_fp32="
            return
        patterns = ",".join([pattern, *self._shared_with(names)])
        yield f"store and compute it in float32: precision.keep_fp32=[{patterns}]"

    def _shared_with(self, names: Sequence[str]) -> list[str]:
        """Return the other modules that must be in float32, too, because they share a weight."""
        # keep_fp32 changes no dtype of what is stored in float32.
        if self.precision.storage is torch.float32:
            return []
        prefixes = tuple(f"{name}.".lstrip(".") for name in names)
        shared: set[str] = set()
        for name, others in find_shared_weights(self.model).items():
            if f"{name}.".startswith(prefixes):
                shared.update(others)
        return sorted(name for name in shared if not f"{name}.".startswith(prefixes))


def skipped_lines(rows: Iterable[ModuleConversion]) -> Iterator[str]:
    """Yield a line for each reason for which modules were not converted, up to MAX_REASONS."""
    skipped = summarize_modules(row for row in rows if not row.done)
    yield from (f"  skipped {text}" for text in skipped[:MAX_REASONS])
    if len(skipped) > MAX_REASONS:
        yield f"  and {len(skipped) - MAX_REASONS} more reasons, all in mode=plan"


def _name_in_report(name: str) -> str:
    """Return the name that a conversion report gives a module; an adapter's layer has its own."""
    return name.removesuffix(".base_layer") or ROOT_NAME
