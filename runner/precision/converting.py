"""Share the conversion of linear layers among the precisions that replace them."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from runner.core import ConversionPlan, ConversionReport, tensor_facts
from runner.precision.base import BasePrecision
from runner.precision.casting import cast_floats
from runner.precision.conversion import (
    ConversionRules,
    convert_modules,
    find_routers,
    named_experts,
)
from runner.precision.keep_fp32 import find_kept_modules, find_kept_tensors, keep_in_float32
from runner.precision.layers.conv1d import linear_classes

# Operands are scaled to the format's range first. Output gradients are in e4m3 too in most recipes,
# and e5m2, which the others take, is wider.
FP8_LAYERS = {"float8_e4m3fn": ("activations", "weights", "gradients")}


class ConvertingPrecision(BasePrecision):
    """Low-precision linear layers; the rest of the model computes by autocast, or as it is stored.

    A subclass says which layers it cannot hold, and replaces the others. It has autocast where it
    computes in another dtype than it stores.

    Attributes:
        ignore_modules: patterns of modules that are not converted.
        experts: patterns of stacked weights of experts, see conversion.named_experts.
        keeps_dtypes: what is not converted keeps the dtype that it was built in; else it is cast
            to the storage dtype.
        skips_shared: layers that share a parameter are not converted.
        layers_compute_in: the format of the products of converted layers, as a phrase; empty where
            they are in the dtype of the others.
        layer_formats: the number formats of converted layers, the narrowest first.
    """

    converts_layers = True
    ignore_modules: Sequence[str] = ()
    experts: Sequence[str] = ()
    keeps_dtypes: bool = False
    skips_shared: bool = False
    layers_compute_in: str = ""
    layer_formats: Mapping[str, Sequence[str]] = MappingProxyType({})

    @abstractmethod
    def find_obstacle(self, module: nn.Module) -> str:
        """Return why a linear layer that is not converted cannot be; empty where it can."""

    def convert_layer(self, module: nn.Module, device: torch.device) -> None:
        """Replace a linear layer, in place; the device is the one where it will run.

        A subclass has this method, or a convert_layers of its own.
        """
        raise NotImplementedError

    def convert_layers(
        self, model: nn.Module, rules: ConversionRules, device: torch.device
    ) -> ConversionReport:
        """Replace the layers that the rules allow, in place, on the device where they will run."""
        convert_layer = partial(self.convert_layer, device=device)
        return convert_modules(model, dict.fromkeys(linear_classes(), convert_layer), rules)

    def convert(
        self,
        model: nn.Module,
        device: torch.device = tensor_facts.CPU_DEVICE,
        plan: ConversionPlan = ConversionPlan(),
    ) -> tuple[nn.Module, ConversionReport]:
        # Before the conversion: what either refuses leaves the model unchanged.
        kept = find_kept_modules(model, self.keep_fp32, self.storage)
        own_dtypes, lines = find_kept_tensors(model, self.storage, device)
        rules = ConversionRules(
            self.name,
            self.ignore_modules,
            kept,
            self.find_obstacle,
            # A packed weight is a new object.
            new_weights=self.freezes,
            skips_shared=self.skips_shared,
            kept=own_dtypes,
            experts={**named_experts(model, self.experts), **plan.expert_layouts},
            plan=plan,
        )
        wide = kept | find_routers(model, rules)
        report = self.convert_layers(model, rules, device)
        keep_in_float32(model, wide, self.storage)
        if not self.keeps_dtypes:
            in_float32 = dict.fromkeys(wide, torch.float32)
            cast_floats(model, self.storage, {**own_dtypes, **in_float32})
        return model, replace(report, kept=lines)

    @property
    def compute_format(self) -> str:
        if not self.layers_compute_in:
            return super().compute_format
        return f"{self.layers_compute_in} in linear layers, {super().compute_format} elsewhere"

    @property
    def formats(self) -> Mapping[str, Sequence[str]]:
        return {**self.layer_formats, **super().formats}
