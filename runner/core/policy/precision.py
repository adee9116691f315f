"""The precision contract: what the rest of the runner may ask of a precision.

What messages, lists and the advisor need of a precision is a member here, with a default that
follows from the dtypes, so that a precision of the user's own has it, too.
runner.precision.base implements the contract by dtypes, and says how to add a precision.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import isabstract
from typing import Any, Self

import torch
from torch import Tensor, nn

from runner.core.base.errors import Unavailable
from runner.core.base.tensor_facts import CPU_DEVICE, dtype_name
from runner.core.loop.strategy import Strategy
from runner.core.policy.conversion_report import ConversionReport
from runner.core.policy.loss_scale import LossScale


@dataclass(frozen=True)
class ConversionPlan:
    """What forwards of a model have found out, by which the model is converted and called.

    Attributes:
        bypassed: modules that the conversion skips, by dotted name, and why: the model does not
            call their forward.
        expert_layouts: dotted names of the stacked weights of experts, and whether each is
            transposed.
        finds_experts: a forward follows the conversion that finds further ones.
        wide_inputs: dtypes of the model's inputs that are exceptions from the rule of
            `Precision.cast`, by key or position: labels, and what a trial forward takes so.
        caches_casts: autocast casts a weight once in a forward, not at each use.
        makes_float32: tensors that a forward makes without a dtype are float32, and not in the
            storage dtype.
        plain_stacks: why stacked weights are not those of experts, by the name of their module in
            reports.
    """

    bypassed: Mapping[str, str] = field(default_factory=dict)
    expert_layouts: Mapping[str, bool] = field(default_factory=dict)
    finds_experts: bool = False
    wide_inputs: Mapping[str | int, torch.dtype] = field(default_factory=dict)
    caches_casts: bool = True
    makes_float32: bool = False
    plain_stacks: Mapping[str, str] = field(default_factory=dict)


class Precision(ABC):
    """One numerical precision: a value that nothing changes once it is built.

    Abstract: BasePrecision implements what has no default here.

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
        emulated: its arithmetic is emulated, so that speed and memory mean nothing.
        unshardable_reason: reason why its weights cannot be sharded among processes; empty where
            they can.
        no_recompute_reason: reason why a forward can neither be compiled nor recomputed in the
            backward, with what to type; empty where it can.
        float32_matmul: for torch.set_float32_matmul_precision; anything but `highest` lets float32
            products run in TF32 (10-bit mantissa), convolutions too. Empty leaves all of torch's
            settings of products.
        operand_roundoffs: the unit roundoffs of a converted layer's operands and of its output
            gradients, up to which mode=diff takes differences for rounding.
        converts_layers: layers are replaced, so that precision.ignore_modules can leave some.
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
    update: str = "nearest"
    emulated: bool = False
    unshardable_reason: str = ""
    no_recompute_reason: str = ""
    float32_matmul: str = ""
    operand_roundoffs: tuple[float, float] = (0.0, 0.0)
    converts_layers: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if isabstract(cls):
            raise TypeError(
                f"{cls.__name__} lacks {', '.join(sorted(cls.__abstractmethods__))}. Derive it "
                "from runner.precision.BasePrecision, which has them."
            )
        return super().__new__(cls)

    def substitute(self, device: torch.device) -> "Precision":
        """Return the precision that runs in this one's place on the device: itself, unless a key
        allows another one."""
        return self

    def require(self, device: torch.device) -> None:
        """Raise Unavailable, with what is missing and the remedy, where the precision cannot run
        on the device."""

    def require_strategy(self, strategy: Strategy) -> None:
        """Raise Unavailable where the strategy cannot train the precision's layers."""
        if strategy.shards and self.unshardable_reason:
            what = f"precision={self.name}, strategy={strategy.name}: {self.unshardable_reason}."
            raise Unavailable(what, "Type strategy=ddp.")

    @abstractmethod
    def session(self, model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
        """Return the context around the whole run, which sets the process-wide switches that the
        precision needs and restores them after.

        Raises:
            PolicyError: another session or run is open, in this thread or another, that needs
                other switches.
        """

    @abstractmethod
    def convert(
        self,
        model: nn.Module,
        device: torch.device = CPU_DEVICE,
        plan: ConversionPlan = ConversionPlan(),
    ) -> tuple[nn.Module, ConversionReport]:
        """Return the model in this precision and a row per module that a conversion looked at.

        Args:
            model: changed in place, before its optimizer exists; on the device where it was built.
            device: where it will run; converted layers are made there.
            plan: what forwards have found out about the model.

        Raises:
            ConfigError: a pattern matches nothing, or a module cannot be converted.
        """

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ConfigError for an optimizer that cannot work in this precision."""

    @abstractmethod
    def forward(
        self, device: torch.device, plan: ConversionPlan = ConversionPlan()
    ) -> AbstractContextManager[Any]:
        """Return the context around the model's forward; reusable, entered once per micro-batch.

        Args:
            device: where the model computes.
            plan: by which the model is called.
        """

    @abstractmethod
    def backward(
        self, device: torch.device, plan: ConversionPlan = ConversionPlan()
    ) -> AbstractContextManager[Any]:
        """Return the context around the backward; reusable, entered once per micro-batch.

        A model's own activation checkpointing recomputes forwards there. It needs no autocast:
        torch.utils.checkpoint restores that by itself.
        """

    @abstractmethod
    def cast(self, inputs: Any, plan: ConversionPlan = ConversionPlan()) -> Any:
        """Return a batch's model inputs in the dtypes that the model needs.

        Args:
            inputs: a nest of tensors, which get the storage dtype; autocast casts from it.
            plan: names the fields that get another dtype.
        """

    @abstractmethod
    def cast_target(self, target: Any) -> Any:
        """Return a target for a loss in the precision (autocast_loss), a nest of tensors."""

    @abstractmethod
    def loss_pair(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return a model's output and a target as a loss outside the precision takes them: in
        float32; in float64 under 64-true, and where the model returns float64."""

    def scale(self, device: torch.device) -> LossScale:
        """Return the loss scale of a run, whose tensors are on the device."""
        return LossScale()

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

    def kernels(self, model: nn.Module, device: torch.device) -> str:
        """Return which kernels compute a model's half precision in a session; empty where there is
        no choice."""
        return ""

    @property
    def storage_format(self) -> str:
        """Return in which format parameters, gradients and optimizer state are, as a phrase."""
        return dtype_name(self.storage)

    @property
    def compute_format(self) -> str:
        """Return in which format the matrix products are, as a phrase."""
        return dtype_name(self.compute)

    @property
    def has_autocast(self) -> bool:
        """Return whether the model's forward runs under autocast."""
        return self.compute is not self.storage

    # Below: what messages, lists and the advisor ask of a precision, in place of its name. The
    # defaults follow from the dtypes, so that a precision of the user's own has them, too.

    @property
    def loses_updates(self) -> bool:
        """Return whether updates are rounded away that are small beside their weight."""
        return self.storage.itemsize == 2 and self.update == "nearest"

    @property
    def update_remedy(self) -> str:
        """Return what to type for updates that are rounded away; empty where the key is unknown or
        keeps them already."""
        return "precision.update=kahan, " if vars(self).get("update") == "nearest" else ""

    @property
    def formats(self) -> Mapping[str, Sequence[str]]:
        """Return the formats under 32 bits that it computes in, the narrowest first.

        By the name of a dtype, without "torch.", the kinds of tensors that are rounded to it:
        "activations", "weights", "gradients" (only where no loss scale lifts them), "updates" (only
        where weights are stored in it).
        """
        if self.compute.itemsize > 2:
            return {}
        kinds = ["activations", "weights"]
        # A loss scale lifts gradients out of the format's smallest values.
        if self.scale(CPU_DEVICE).value is None:
            kinds.append("gradients")
        # An update is rounded to the format where the weight that it is added to is stored in it.
        if self.storage == self.compute and self.update == "nearest":
            kinds.append("updates")
        return {dtype_name(self.compute): kinds}

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
        narrowest = getattr(torch, next(iter(self.formats), dtype_name(self.compute)))
        return (-narrowest.itemsize, -self.storage.itemsize, -torch.finfo(self.compute).max)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Return the dtype of floating outputs and targets in the loss if autocast_loss is off."""
        return torch.float64 if self.storage is torch.float64 else torch.float32
