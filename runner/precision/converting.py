"""The base of the precisions that replace a model's linear layers by low-precision ones."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from runner.precision.casting import autocast, cast_floats, cast_inputs, float64_to_float32
from runner.precision.contract import CPU_DEVICE, ComputeFormat, Precision
from runner.precision.conversion import ConversionReport, ConversionRules, convert_modules
from runner.precision.keep_fp32 import find_kept_modules, find_kept_tensors, keep_in_float32
from runner.precision.layers.conv1d import linear_classes


class ConvertingPrecision(Precision):
    """Low-precision linear layers; the rest of the model computes by autocast, or as it is stored.

    A subclass says which layers it cannot hold, and replaces the others. It has autocast where it
    computes in another dtype than it stores.

    Attributes:
        ignore_modules: patterns of modules that are not converted.
        keeps_dtypes: what is not converted keeps the dtype that it was built in; else it is cast
            to the storage dtype.
        skips_shared: layers that share a parameter are not converted.
        layers_compute_in: the format of the products of converted layers, as a phrase; empty where
            they are in the dtype of the others.
        layer_formats: the number formats of converted layers, the narrowest first.
    """

    ignore_modules: Sequence[str] = ()
    keeps_dtypes: bool = False
    skips_shared: bool = False
    layers_compute_in: str = ""
    layer_formats: tuple[ComputeFormat, ...] = ()

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
        self, model: nn.Module, device: torch.device = CPU_DEVICE
    ) -> tuple[nn.Module, ConversionReport]:
        # Before the conversion: what either refuses leaves the model unchanged.
        kept = find_kept_modules(model, self.keep_fp32, self.storage)
        tensors = find_kept_tensors(model, self.storage)
        rules = ConversionRules(
            self.name,
            self.ignore_modules,
            kept,
            self.find_obstacle,
            # A packed weight is a new object.
            new_weights=self.freezes,
            bypassed=self.bypassed,
            skips_shared=self.skips_shared,
            kept=tensors.dtypes,
        )
        report = self.convert_layers(model, rules, device)
        keep_in_float32(model, kept, self.storage)
        if not self.keeps_dtypes:
            in_float32 = dict.fromkeys(kept, torch.float32)
            cast_floats(model, self.storage, {**tensors.dtypes, **in_float32})
        return model, replace(report, kept=tensors.lines)

    @property
    def has_autocast(self) -> bool:
        """Return whether the model's forward runs under autocast."""
        return self.compute is not self.storage

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        if not self.has_autocast:
            return self._plain_context
        return autocast(device.type, self.compute, self.caches_casts)

    def cast(self, inputs: Any) -> Any:
        """Return the inputs in the storage dtype. Under autocast they are not cast, so that
        modules kept in float32 and unconverted layers get the original values; only float64, which
        autocast does not cast, becomes float32."""
        if self.has_autocast:
            return float64_to_float32(inputs)
        return cast_inputs(inputs, self.storage, self.wide_inputs)

    @property
    def compute_format(self) -> str:
        if not self.layers_compute_in:
            return super().compute_format
        return f"{self.layers_compute_in} in linear layers, {super().compute_format} elsewhere"

    @property
    def formats(self) -> tuple[ComputeFormat, ...]:
        return (*self.layer_formats, *super().formats)
