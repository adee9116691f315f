"""Adapters: small trainable additions to a frozen model, so that quantised weights can be tuned.

Source: Hu et al., LoRA, arXiv:2106.09685; Dettmers et al., QLoRA, arXiv:2305.14314.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import nn

from runner.config.targets import instantiate
from runner.precision.conversion import find_shared_weights
from runner.precision.layers.conv1d import linear_classes
from runner.precision.layers.te_layers import FusedNormLinear
from runner.utils.errors import ConfigError, Unavailable
from runner.utils.modules import select_modules
from runner.utils.quiet_import import quiet_imports


class Adapter(ABC):
    """What changes a model after its conversion and before its optimizer."""

    @abstractmethod
    def add(self, model: nn.Module, dtype: torch.dtype, bypassed: Collection[str] = ()) -> None:
        """Freeze the model and add what trains, in this dtype; the function stays the same.
        Nothing is added to `bypassed`, names of layers whose forward the model passes by."""

    @abstractmethod
    def merge(self, model: nn.Module) -> None:
        """Work what was trained into the plain weights and remove the additions, in place. What
        add() froze stays frozen."""


def build_adapter(node: Mapping[str, Any]) -> Adapter | None:
    """Build the adapter of a config node; None where it names none."""
    return instantiate(node) if node.get("_target_") else None


@final
class Lora(Adapter):
    """Low-rank additions to linear layers, made by peft.

    Args:
        rank: of each addition.
        alpha: the addition is scaled by alpha / rank.
        dropout: probability on the addition's input, in [0, 1).
        modules: patterns of linear layers; None: every one that shares its weight with no other.
        train: patterns of modules that train in full besides (norms, a head).

    Raises:
        ConfigError: a value is out of range.
        Unavailable: peft is not installed.
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        modules: Sequence[str] | None = None,
        train: Sequence[str] = (),
    ) -> None:
        problems = [
            f"adapter.{key}={value} is out of range. Allowed: {allowed}."
            for key, value, fits, allowed in (
                ("rank", rank, rank >= 1, "1 and up"),
                ("alpha", alpha, alpha > 0, "above 0"),
                ("dropout", dropout, 0 <= dropout < 1, "0 and up, below 1"),
            )
            if not fits
        ]
        if problems:
            raise ConfigError(*problems)
        if find_spec("peft") is None:
            raise Unavailable(
                "adapter=lora needs peft, which is not installed.",
                'Type pip install "precision-runner[lora]".',
            )
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        self.modules, self.train = modules, train

    def add(self, model: nn.Module, dtype: torch.dtype, bypassed: Collection[str] = ()) -> None:
        with quiet_imports():
            from peft import LoraConfig, inject_adapter_in_model

        names = [name for name, _ in model.named_modules()]
        trained = select_modules("adapter.train", self.train, names)
        chosen = self._chosen(model, names, bypassed)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules="|".join(re.escape(name) for name in chosen),
        )
        full = [p for name in trained for p in model.get_submodule(name).parameters()]
        _refuse(model, trained)
        with (
            quiet_imports()
        ):  # peft warns of a Conv1D, for which it transposes the addition by itself
            inject_adapter_in_model(config, model)
        for added in (p for p in model.parameters() if p.requires_grad):
            added.data = added.data.to(dtype)  # peft takes the layer's compute dtype
        for parameter in full:
            parameter.requires_grad_(True)

    def _chosen(
        self, model: nn.Module, names: Sequence[str], bypassed: Collection[str]
    ) -> list[str]:
        """Dotted names of the linear layers that get an addition."""
        wanted = (
            names
            if self.modules is None
            else select_modules("adapter.modules", self.modules, names)
        )
        tied = find_shared_weights(model)
        linear = [
            name
            for name, module in model.named_modules()
            if isinstance(module, linear_classes())
            and name
            and name in wanted
            and type(module).__name__ != "NonDynamicallyQuantizableLinear"
        ]
        if self.modules is not None and (both := [name for name in linear if name in tied]):
            raise ConfigError(
                f"adapter.modules names {both[0]}, which shares its weight with "
                f"{', '.join(tied[both[0]])}: what is added to one would be merged into both. "
                "Leave it out."
            )
        chosen = [name for name in linear if name not in tied and name not in bypassed]
        if not chosen:
            what = "the model" if self.modules is None else f"adapter.modules={list(self.modules)}"
            raise ConfigError(
                f"adapter=lora finds no linear layer of its own in {what}. "
                "Name linear layers in adapter.modules, or type adapter=none."
            )
        return chosen

    def merge(self, model: nn.Module) -> None:
        with quiet_imports():
            from peft.tuners.lora import LoraLayer

        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()  # type: ignore[operator]
                holder, _, last = name.rpartition(".")
                setattr(model.get_submodule(holder), last, module.get_base_layer())
        vars(model).pop("peft_config", None)


def _refuse(model: nn.Module, trained: Collection[str]) -> None:
    """Raise ConfigError for what an addition would compute wrongly or could not train."""
    packed = [
        name
        for name in sorted(trained)
        for parameter in model.get_submodule(name).parameters(recurse=False)
        if not parameter.is_floating_point()
    ]
    if packed:
        raise ConfigError(
            f"adapter.train names {', '.join(packed)}, whose weight is quantised and cannot train. "
            f"Type precision.ignore_modules=[{','.join(packed)}], too."
        )
    if any(isinstance(module, FusedNormLinear) for module in model.modules()):
        raise ConfigError(
            "adapter=lora would add to the inputs of layers that compute their norm themselves. "
            "Type precision.fuse=false."
        )
