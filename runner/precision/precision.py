"""The precision contract: what the rest of the runner may ask of a precision.

An abstract base and final subclasses, no deeper inheritance. A new precision is one class and
one yaml in conf/precision/; the contract test, `doctor` and the docs pick it up from there.
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
from runner.precision.emulation.formats import FORMATS
from runner.precision.keep_fp32 import make_islands
from runner.precision.loss_scale import LossScale, NoLossScale
from runner.utils.errors import Unavailable

CPU = torch.device("cpu")
_NOTHING = nullcontext()


@dataclass(frozen=True)
class ModuleConversion:
    """One module that a conversion looked at.

    Attributes:
        module: its dotted name.
        kind: its class before the conversion.
        done: whether it was converted.
        why: why it was not; what else there is to say of it where it was.
        elements: of its matrix weights: its own parameters of two dimensions or more, as it was
            built. A parameter that modules share is in one row only.
        converted: how many of these elements are in the converted format; they count where done.
        counted_with: the module whose row holds the elements of a weight that both share.
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
    """Every module that a conversion looked at, among them every one that holds matrix weights.

    Empty where a precision converts no modules. A layer is a module that holds matrix weights.
    """

    modules: tuple[ModuleConversion, ...] = ()

    def __str__(self) -> str:
        done, every = self.layers
        return f"{done}/{every}"

    @property
    def layers(self) -> tuple[int, int]:
        """Return how many layers were converted, and how many there are."""
        rows = [row for row in self.modules if row.elements]
        return sum(row.done for row in rows), len(rows)

    @property
    def weights(self) -> tuple[int, int]:
        """Return how many elements of matrix weights were converted, and how many there are."""
        converted = sum(row.converted for row in self.modules if row.done)
        return converted, sum(row.elements for row in self.modules)

    def lines(self, most: int = 8) -> Iterator[str]:
        """Yield the console's lines: what was converted, and what was skipped for which reason."""
        if not self.modules:
            return
        done = [row.module for row in self.modules if row.done and row.elements]
        names = ", ".join(done[:most])
        more = f", and {len(done) - most} more" if len(done) > most else ""
        yield f"converted {self._counts()}{': ' * bool(done)}{names}{more}"
        skipped = summarize_modules(row for row in self.modules if not row.done)
        notes = summarize_modules(row for row in self.modules if row.done and row.why)
        texts = [f"  skipped {text}" for text in skipped]
        texts += [f"  converted {text}" for text in notes]
        yield from texts[:most]
        if len(texts) > most:
            yield f"  and {len(texts) - most} more, all in conversion.json"

    def _counts(self) -> str:
        (done, layers), (converted, weights) = self.layers, self.weights
        text = (
            f"{done} of {layers} layers, {converted:,} of {weights:,} matrix weights "
            f"({_percent(converted, weights)})"
        )
        norms = sum(row.done and not row.elements and not row.counted_with for row in self.modules)
        if norms:
            text += f" and {norms} norm{'s' * (norms > 1)}"
        return text

    def tags(self) -> dict[str, str]:
        """Return the counts as a run's tags; empty where a precision converts no modules."""
        if not self.modules:
            return {}
        converted, weights = self.weights
        return {"converted": str(self), "converted_weights": f"{converted}/{weights}"}

    def to_list(self) -> list[dict[str, Any]]:
        return [asdict(module) for module in self.modules]


def summarize_modules(rows: Iterable[ModuleConversion], most: int = 4) -> list[str]:
    """Return a text for the modules of each class and reason: up to `most` by their names, more as
    a number and the first names."""
    alike: dict[tuple[str, str, str], list[ModuleConversion]] = {}
    for row in rows:
        alike.setdefault((row.kind, row.why, row.counted_with), []).append(row)
    texts = []
    for (kind, why, counted_with), found in alike.items():
        elements = sum(row.elements for row in found)
        size = f", {elements:,} weights" if elements else ""
        if counted_with:
            size += f", counted with {counted_with}"
        names = ", ".join(row.module for row in found[:most])
        if len(found) > most:
            texts.append(f"{len(found)} {kind} ({names}, …{size}): {why}")
        else:
            texts.append(f"{names} ({kind}{size}): {why}")
    return texts


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix, as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _percent(part: int, whole: int) -> str:
    """Return a share in whole percent; "100 %" is said of all of it only."""
    share = 100 * part / max(whole, 1)
    if 0 < share < 1:
        return "under 1 %"
    return f"{min(round(share), 99) if part < whole else 100} %"


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
        name: its label, the name of its yaml.
        storage: dtype of floating parameters, gradients and optimizer state.
        compute: dtype of the matrix products in the forward.
        keep_fp32: patterns of modules that store and compute in float32.
        autocast_loss: the precision holds in the loss too, not in the forward only.
        layout: what a converted model's state dict holds in place of plain weights; empty where
            it can be loaded into the model that was never converted.
        freezes: converted weights do not train.
        whole: why its weights cannot be parted among processes; empty where they can.
        emulated: its arithmetic is imitated, so that speed and memory tell nothing of it.
        unrepeatable: why a forward can neither be compiled nor computed a second time for the
            backward, and what to type; empty where it can.
        bypassed: dotted names of modules that a conversion leaves as they were, because the model
            passes their forward by, with the reason.
    """

    name: str
    storage: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    keep_fp32: Sequence[str] = ()
    autocast_loss: bool = False
    layout: str = ""
    freezes: bool = False
    emulated: bool = False
    whole: str = ""
    unrepeatable: str = ""
    bypassed: Mapping[str, str] = MappingProxyType({})

    def require(self, device: torch.device) -> None:
        """Raise Unavailable, with what is missing and the remedy, where it cannot run."""

    def require_strategy(self, strategy: Strategy) -> None:
        """Raise Unavailable where its layers cannot be trained by several processes in this way."""
        if strategy.shards and self.whole:
            raise Unavailable(
                f"precision={self.name} with strategy={strategy.name}: {self.whole}.",
                "Type strategy=ddp, where every process has the whole model.",
            )

    def session(self, model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
        """Context around the whole run: the process-wide switches it needs, restored after."""
        return nullcontext()

    def building(self) -> AbstractContextManager[Any]:
        """Context around the construction of a model that must never be whole in float32
        (init.low_memory)."""
        return nullcontext()

    def convert(
        self, model: nn.Module, device: torch.device = CPU
    ) -> tuple[nn.Module, ConversionReport]:
        """The model in this precision. Called once, before the optimizer exists.

        Args:
            model: changed in place; where it is still wherever it was made.
            device: where it will run; converted layers are made there.
        """
        islands = make_islands(model, self.keep_fp32, self.storage)
        cast_floats(model, self.storage, islands)
        return model, ConversionReport()

    def leave_unconverted(self, reasons: Mapping[str, str]) -> None:
        """Leave further modules, by dotted name, as they were in later conversions."""
        self.bypassed = {**self.bypassed, **reasons}

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ConfigError for an optimizer that cannot work in this precision."""

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context around the model's forward; reusable, entered once per micro-batch."""
        return nullcontext()

    def backward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context around the backward; reusable, entered once per micro-batch.

        A model's own activation checkpointing computes forwards again there. Autocast is not in
        it: torch.utils.checkpoint restores that by itself.
        """
        return _NOTHING

    def cast(self, inputs: Any) -> Any:
        """A batch's model inputs in the dtype that the model wants."""
        return inputs

    def scale(self, device: torch.device) -> LossScale:
        """The loss scale of a run."""
        return NoLossScale()

    def evaluating(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Context around an evaluation during training, which leaves no trace in the training."""
        return nullcontext()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """What the precision itself must remember: tensors and plain values, for checkpoints."""
        return {}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave."""

    def gauges(self, model: nn.Module) -> dict[str, Tensor]:
        """Scalars on the device to log at the log interval, under their metric names."""
        return {}

    def kernels(self) -> str:
        """Which kernels ran, where a precision has a choice (a tag of the run)."""
        return ""

    @property
    def stores(self) -> str:
        """What parameters, gradients and optimizer state are in, in words."""
        return dtype_name(self.storage)

    @property
    def computes(self) -> str:
        """What the products are in, in words."""
        return dtype_name(self.compute)

    # What messages, lists and the advisor ask of a precision, in place of its name. The defaults
    # follow from the dtypes, so that a precision of the user's own has them, too.

    @property
    def converts_layers(self) -> bool:
        """Return whether layers are replaced, so that precision.ignore_modules can leave some."""
        return hasattr(self, "ignore_modules")

    @property
    def formats(self) -> tuple[ComputeFormat, ...]:
        """Return the formats under 32 bits that it computes in, the narrowest first."""
        name = dtype_name(self.compute)
        if name not in FORMATS:
            return ()
        kinds = ["activations", "weights"]
        if self.scale(CPU).value is None:
            kinds.append("gradients")
        if self.storage == self.compute:
            kinds.append("updates")
        return (ComputeFormat(name, tuple(kinds)),)

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
        is_bf16_mixed = (self.compute, self.storage) == (torch.bfloat16, torch.float32)
        return "32-true" if is_bf16_mixed else "bf16-mixed"

    @property
    def narrower_precision(self) -> str:
        """Return the precision to type when memory is short; empty where none is known to need
        less."""
        if self.converts_layers:
            return ""
        return {torch.float64: "32-true", torch.float32: "bf16-true"}.get(self.storage, "")

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Return its place in lists, which begin with the widest: by the bytes of what it computes
        in and of what it stores, then by range. Names order what is equal."""
        narrowest = FORMATS[self.formats[0].name].dtype if self.formats else self.compute
        return (-narrowest.itemsize, -self.storage.itemsize, -torch.finfo(self.compute).max)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Dtype of floating outputs and targets in the loss when autocast_loss is off."""
        return torch.float64 if self.storage is torch.float64 else torch.float32
