"""Say which modules a conversion replaced, and for which reason it left each other one."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from runner.core.base.fmt import first_names, format_part, grouped


class Fate(Enum):
    """What became of a module that a conversion looked at."""

    CONVERTED = "converted"
    UNPROVEN = "converted, but it ran in no forward yet"
    DECLINED = "not converted, by choice of the user or of the model's author"
    SKIPPED = "not converted, for another reason"


@dataclass(frozen=True)
class ModuleConversion:
    """One module that a conversion looked at.

    Attributes:
        module: its dotted name.
        kind: its class before the conversion.
        fate: what became of it.
        why: the reason why it does not count as converted; a remark, or empty, where it does.
        elements: number of elements of its matrix weights, which are its own parameters of two
            dimensions or more, as it was built. A shared parameter is counted in one row only.
        converted: how many of these elements are in the converted format, if `is_converted`.
        counted_with: the module in whose row the elements of a shared weight are counted.
    """

    module: str
    kind: str
    fate: Fate
    why: str
    elements: int = 0
    converted: int = 0
    counted_with: str = ""

    @property
    def is_converted(self) -> bool:
        """Return whether the module counts as converted."""
        return self.fate is Fate.CONVERTED


@dataclass(frozen=True)
class ConversionReport:
    """A row for every module that a conversion looked at, converted or skipped.

    It has every layer, that is every module that holds matrix weights. Empty where a precision
    converts no modules.

    Attributes:
        modules: the rows.
        kept: lines on parameters and buffers that keep their dtype.
    """

    modules: tuple[ModuleConversion, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        converted, total = self.layer_counts
        return f"{converted}/{total}"

    @property
    def layer_counts(self) -> tuple[int, int]:
        """Return two counts: the converted layers, and all layers."""
        rows = [row for row in self.modules if row.elements]
        return sum(row.is_converted for row in rows), len(rows)

    @property
    def weight_counts(self) -> tuple[int, int]:
        """Return two counts of matrix elements: the converted ones, and all."""
        converted = sum(row.converted for row in self._converted_rows())
        return converted, sum(row.elements for row in self.modules)

    def lines(self, limit: int = 8) -> Iterator[str]:
        """Yield the console's lines: what was converted, and what was skipped for which reason.

        Args:
            limit: how many names, and how many reasons, are printed; of the others the number.
        """
        yield from self.kept
        if not self.modules:
            return
        converted = self._converted_rows()
        names = first_names([row.module for row in converted if row.elements], limit)
        yield f"converted {self._counts()}" + (f": {names}" if names else "")
        skipped = (row for row in self.modules if not row.is_converted)
        texts = _summaries(skipped, "  skipped ")
        texts += _summaries((row for row in converted if row.why), "  converted ")
        yield from texts[:limit]
        if len(texts) > limit:
            yield f"  and {len(texts) - limit} more, all in conversion.json"

    def summaries(self) -> list[str]:
        """Return a phrase for the modules of each class and reason."""
        return _summaries(self.modules)

    def _converted_rows(self) -> list[ModuleConversion]:
        return [row for row in self.modules if row.is_converted]

    def _counts(self) -> str:
        """Return the numbers of converted layers, weights and norms as a phrase."""
        done, layers = self.layer_counts
        converted, weights = self.weight_counts
        text = (
            f"{done} of {layers} layers, {converted:,} of {weights:,} matrix weights "
            f"({format_part(converted, weights)})"
        )
        # A converted module without matrix weights of its own or shared ones is a norm.
        norms = sum(not row.elements and not row.counted_with for row in self._converted_rows())
        if not norms:
            return text
        return f"{text} and {norms} norm" + "s" * (norms > 1)

    def tags(self) -> dict[str, str]:
        """Return the counts as tags of a run; empty where a precision converts no modules."""
        if not self.modules:
            return {}
        converted, weights = self.weight_counts
        return {"converted": str(self), "converted_weights": f"{converted}/{weights}"}

    def to_list(self) -> list[dict[str, Any]]:
        """Return the rows as conversion.json has them, with `done` in the place of the fate."""
        rows = []
        for row in self.modules:
            names = {"module": row.module, "kind": row.kind, "done": row.is_converted}
            facts = asdict(row)
            del facts["fate"]
            rows.append({**names, **facts})
        return rows

    def names(self, fate: Fate) -> list[str]:
        """Return the names of the modules with this fate, in the model's order."""
        return [row.module for row in self.modules if row.fate is fate]

    def change(self, names: Collection[str], fate: Fate, why: str) -> "ConversionReport":
        """Return the report with another fate of some modules, for a reason."""
        rows = [
            replace(row, fate=fate, why=why) if row.module in names else row for row in self.modules
        ]
        return replace(self, modules=tuple(rows))


def _summaries(rows: Iterable[ModuleConversion], prefix: str = "") -> list[str]:
    """Return a phrase for the modules of each class and reason, after a prefix; the rows are in
    the model's order.

    Four modules are named at most; where there are more, their number is in the phrase too.
    """
    groups = grouped(((row.kind, row.why, row.counted_with), row) for row in rows)
    texts = []
    for (kind, why, counted_with), group in groups.items():
        elements = sum(row.elements for row in group)
        size = f", {elements:,} weights" if elements else ""
        if counted_with:
            size += f", counted with {counted_with}"
        names = ", ".join(row.module for row in group[:4])
        if len(group) > 4:
            texts.append(f"{prefix}{len(group)} {kind} ({names}, …{size}): {why}")
        else:
            texts.append(f"{prefix}{names} ({kind}{size}): {why}")
    return texts
