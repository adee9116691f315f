"""The precision contract: what the rest of the runner may ask of a precision.

An abstract base and final subclasses, no deeper inheritance. A new precision is one class and
one yaml in conf/precision/, or in the user's own --config-dir; the contract test, `doctor`,
mode=advise and the docs pick it up from there. No other module looks at a precision's name: what
messages, lists and the advisor need is a member here, with a default that follows from the dtypes.
"""

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.distributed.strategy import Strategy
from runner.precision.casting import cast_floats
from runner.precision.emulation.formats import FORMATS, FP8_ROUNDOFFS
from runner.precision.keep_fp32 import make_islands
from runner.precision.loss_scale import LossScale, NoLossScale
from runner.precision.weight_updates import UpdateRule
from runner.utils.errors import Unavailable
from runner.utils.tensors import dtype_name

CPU_DEVICE = torch.device("cpu")
# One object for all precisions: the backward enters it once per micro-batch.
_NO_CONTEXT = nullcontext()


@dataclass(frozen=True)
class ModuleConversion:
    """One module that a conversion looked at.

    Attributes:
        module: its dotted name.
        kind: its class before the conversion.
        done: whether it was converted.
        why: the reason why it was not converted; a remark, or empty, where it was.
        elements: number of elements of its matrix weights, which are its own parameters of two
            dimensions or more, as it was built. A shared parameter is counted in one row only.
        converted: how many of these elements are in the converted format, if `done`.
        counted_with: the module in whose row the elements of a shared weight are counted.
    """

    module: str
    kind: str
    done: bool
    why: str
    elements: int = 0
    converted: int = 0
    counted_with: str = ""

    def skip(self, why: str) -> "ModuleConversion":
        """Return the row of the same module, not converted for this reason."""
        return replace(self, done=False, why=why, converted=0)


@dataclass(frozen=True)
class ConversionReport:
    """A row for every module that a conversion looked at, converted or skipped.

    It has every layer, that is every module that holds matrix weights. Empty where a precision
    converts no modules.
    """

    modules: tuple[ModuleConversion, ...] = ()

    def __str__(self) -> str:
        converted, total = self.layer_counts
        return f"{converted}/{total}"

    @property
    def layer_counts(self) -> tuple[int, int]:
        """Return two counts: the converted layers, and all layers."""
        rows = [row for row in self.modules if row.elements]
        return sum(row.done for row in rows), len(rows)

    @property
    def weight_counts(self) -> tuple[int, int]:
        """Return two counts of matrix elements: the converted ones, and all."""
        converted = sum(row.converted for row in self.modules if row.done)
        return converted, sum(row.elements for row in self.modules)

    def lines(self, limit: int = 8) -> Iterator[str]:
        """Yield the console's lines: what was converted, and what was skipped for which reason.

        Args:
            limit: how many names, and how many reasons, are printed; of the others the number.
        """
        if not self.modules:
            return
        converted = [row.module for row in self.modules if row.done and row.elements]
        names = ", ".join(converted[:limit])
        if len(converted) > limit:
            names += f", and {len(converted) - limit} more"
        yield f"converted {self._counts()}" + (f": {names}" if names else "")
        skipped = summarize_modules(row for row in self.modules if not row.done)
        notes = summarize_modules(row for row in self.modules if row.done and row.why)
        texts = [f"  skipped {text}" for text in skipped]
        texts += [f"  converted {text}" for text in notes]
        yield from texts[:limit]
        if len(texts) > limit:
            yield f"  and {len(texts) - limit} more, all in conversion.json"

    def _counts(self) -> str:
        """Return the numbers of converted layers, weights and norms as a phrase."""
        done, layers = self.layer_counts
        converted, weights = self.weight_counts
        text = (
            f"{done} of {layers} layers, {converted:,} of {weights:,} matrix weights "
            f"({_percent(converted, weights)})"
        )
        # A converted module without matrix weights of its own or shared ones is a norm.
        norms = sum(row.done and not row.elements and not row.counted_with for row in self.modules)
        if norms == 1:
            text += " and 1 norm"
        elif norms:
            text += f" and {norms} norms"
        return text

    def tags(self) -> dict[str, str]:
        """Return the counts as tags of a run; empty where a precision converts no modules."""
        if not self.modules:
            return {}
        converted, weights = self.weight_counts
        return {"converted": str(self), "converted_weights": f"{converted}/{weights}"}

    def to_list(self) -> list[dict[str, Any]]:
        """Return the rows as conversion.json has them."""
        return [asdict(module) for module in self.modules]


def summarize_modules(rows: Iterable[ModuleConversion], limit: int = 4) -> list[str]:
    """Return a phrase for the modules of each class and reason.

    Args:
        rows: in the model's order.
        limit: how many modules are named; where there are more, their number is in the phrase too.
    """
    groups: dict[tuple[str, str, str], list[ModuleConversion]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.why, row.counted_with), []).append(row)
    texts = []
    for (kind, why, counted_with), group in groups.items():
        elements = sum(row.elements for row in group)
        size = f", {elements:,} weights" if elements else ""
        if counted_with:
            size += f", counted with {counted_with}"
        names = ", ".join(row.module for row in group[:limit])
        if len(group) > limit:
            texts.append(f"{len(group)} {kind} ({names}, …{size}): {why}")
        else:
            texts.append(f"{names} ({kind}{size}): {why}")
    return texts


def _percent(part: int, total: int) -> str:
    """Return a share in whole percent; "100 %" only where nothing is missing."""
    share = 100 * part / max(total, 1)
    # A share that rounds to 0 or to 100 would say "nothing" or "all".
    if 0 < share < 1:
        return "under 1 %"
    if part >= total:
        return "100 %"
    return f"{min(round(share), 99)} %"


class ComputeFormat(NamedTuple):
    """A number format narrower than float32 in which a precision computes.

    Attributes:
        name: a key of runner.precision.emulation.formats.FORMATS.
        kinds: the tensors that are rounded to it: "activations", "weights", "gradients" (only
            where no loss scale lifts them), "updates" (where weights are stored in it).
    """

    name: str
    kinds: tuple[str, ...]


class Precision(ABC):
    """One numerical precision.

    Attributes:
        name: label of the run, which is the name of its yaml.
        storage: dtype of floating parameters, gradients and optimizer state.
        compute: dtype of the matrix products in the forward.
        keep_fp32: patterns of modules that store and compute in float32.
        autocast_loss: the loss is computed in this precision too, not only the forward.
        layout: name of the format of a converted model's state dict; empty where the state dict
            can be loaded into a model that was never converted.
        freezes: converted weights do not train.
        trains_for: name of the precision that its weights are trained for, or empty.
        trained_in: where this precision trains adapters only, the one that trains its weights.
        update: how a step is added to weights of 16 bits, see runner.precision.weight_updates.
        unshardable_reason: reason why its weights cannot be sharded among processes; empty where
            they can.
        emulated: its arithmetic is emulated, so that speed and memory mean nothing.
        no_recompute_reason: reason why a forward can neither be compiled nor recomputed in the
            backward, with what to type; empty where it can.
        bypassed: modules that a conversion skips because the model does not call their forward:
            the reason, by dotted name.
    """

    name: str
    storage: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    keep_fp32: Sequence[str] = ()
    autocast_loss: bool = False
    layout: str = ""
    freezes: bool = False
    trains_for: str = ""
    trained_in: str = ""
    update: UpdateRule = "nearest"
    emulated: bool = False
    unshardable_reason: str = ""
    no_recompute_reason: str = ""
    bypassed: Mapping[str, str] = MappingProxyType({})

    def require(self, device: torch.device) -> None:
        """Raise Unavailable, with what is missing and the remedy, where the precision cannot run
        on the device."""

    def require_strategy(self, strategy: Strategy) -> None:
        """Raise Unavailable where the strategy cannot train the precision's layers."""
        if strategy.shards and self.unshardable_reason:
            raise Unavailable(
                f"precision={self.name} with strategy={strategy.name}: {self.unshardable_reason}.",
                "Type strategy=ddp, where every process has the whole model.",
            )

    def session(self, model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context around the whole run, which sets the process-wide switches that the
        precision needs and restores them after."""
        return nullcontext()

    def convert(
        self, model: nn.Module, device: torch.device = CPU_DEVICE
    ) -> tuple[nn.Module, ConversionReport]:
        """Return the model in this precision and a row per module that a conversion looked at.

        Args:
            model: changed in place, before its optimizer exists; on the device where it was built.
            device: where it will run; converted layers are made there.

        Raises:
            ConfigError: a pattern matches nothing, or a module cannot be converted.
        """
        islands = make_islands(model, self.keep_fp32, self.storage)
        cast_floats(model, self.storage, islands)
        return model, ConversionReport()

    def leave_unconverted(self, reasons: Mapping[str, str]) -> None:
        """Skip further modules, by dotted name and with the reason, in later conversions."""
        self.bypassed = {**self.bypassed, **reasons}

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ConfigError for an optimizer that cannot work in this precision."""

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context around the model's forward; reusable, entered once per micro-batch."""
        return nullcontext()

    def backward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context around the backward; reusable, entered once per micro-batch.

        A model's own activation checkpointing recomputes forwards there. It needs no autocast:
        torch.utils.checkpoint restores that by itself.
        """
        return _NO_CONTEXT

    def cast(self, inputs: Any) -> Any:
        """Return a batch's model inputs, a nest of tensors, in the dtype that the model needs."""
        return inputs

    def scale(self, device: torch.device) -> LossScale:
        """Return the loss scale of a run, whose tensors are on the device."""
        return NoLossScale()

    def eval_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context around an evaluation during training, so that the evaluation does not
        change the training that follows."""
        return nullcontext()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the precision's own state for checkpoints: tensors and plain values."""
        return {}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore what state_dict returned."""

    def gauges(self, model: nn.Module) -> dict[str, Tensor]:
        """Return scalars on the device to log at the log interval, by metric name."""
        return {}

    def kernels(self) -> str:
        """Return which kernels ran (a tag of the run); empty where there is no choice."""
        return ""

    @property
    def storage_format(self) -> str:
        """Return in which format parameters, gradients and optimizer state are, as a phrase."""
        return dtype_name(self.storage)

    @property
    def compute_format(self) -> str:
        """Return in which format the matrix products are, as a phrase."""
        return dtype_name(self.compute)

    # Below: what messages, lists and the advisor ask of a precision, in place of its name. The
    # defaults follow from the dtypes, so that a precision of the user's own has them, too.

    @property
    def converts_layers(self) -> bool:
        """Return whether layers are replaced, so that precision.ignore_modules can leave some."""
        return hasattr(self, "ignore_modules")

    @property
    def loses_updates(self) -> bool:
        """Return whether updates are rounded away that are small beside their weight."""
        return self.storage.itemsize == 2 and self.update == "nearest"

    @property
    def update_remedy(self) -> str:
        """Return what to type for updates that are rounded away; empty where the key is unknown."""
        return "precision.update=kahan, which keeps them, " if "update" in vars(self) else ""

    @property
    def formats(self) -> tuple[ComputeFormat, ...]:
        """Return the formats under 32 bits that it computes in, the narrowest first."""
        name = dtype_name(self.compute)
        if name not in FORMATS:
            return ()
        kinds = ["activations", "weights"]
        # A loss scale lifts gradients out of the format's smallest values.
        if self.scale(CPU_DEVICE).value is None:
            kinds.append("gradients")
        # An update is rounded to the format where the weight that it is added to is stored in it.
        if self.storage == self.compute and self.update == "nearest":
            kinds.append("updates")
        return (ComputeFormat(name, tuple(kinds)),)

    @property
    def operand_roundoffs(self) -> tuple[float, float]:
        """Return the unit roundoffs of a converted layer's operands and of its output gradients, up
        to which mode=diff takes differences for rounding."""
        return FP8_ROUNDOFFS

    @property
    def has_limited_range(self) -> bool:
        """Return whether values that float32 holds can overflow in float16."""
        return torch.float16 in (self.compute, self.storage)

    @property
    def wider_precision(self) -> str:
        """Return the precision to type when this one's numbers are out of range or too coarse;
        empty where it computes in float32 or float64 throughout."""
        if self.converts_layers:
            return "bf16-mixed"
        if self.compute.itemsize >= 4:
            return ""
        # bf16-mixed has no wider mixed precision than itself.
        is_bf16_mixed = (self.compute, self.storage) == (torch.bfloat16, torch.float32)
        return "32-true" if is_bf16_mixed else "bf16-mixed"

    @property
    def narrower_precision(self) -> str:
        """Return the precision to type when memory is short; empty where none needs less."""
        if self.converts_layers:
            return ""
        return {torch.float64: "32-true", torch.float32: "bf16-true"}.get(self.storage, "")

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Return the precision's place in lists, where the widest comes first: by the bytes of its
        narrowest format, by those of storage, then by range. Equal keys are ordered by name."""
        narrowest = FORMATS[self.formats[0].name].dtype if self.formats else self.compute
        return (-narrowest.itemsize, -self.storage.itemsize, -torch.finfo(self.compute).max)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Return the dtype of floating outputs and targets in the loss if autocast_loss is off."""
        return torch.float64 if self.storage is torch.float64 else torch.float32
