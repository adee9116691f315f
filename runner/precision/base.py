"""Implement the precision contract by dtypes, as every built-in precision does.

How to add a precision: make a final, frozen dataclass whose fields are the keys of its yaml in
conf/precision/, or in the user's own --config-dir, and whose __post_init__ refuses values that are
not allowed (`refuse`) and derives storage, compute and what else differs from the defaults
(`_derive`). The contract test, `doctor`, mode=advise and the docs find it by its yaml. A precision
that computes by autocast is like MixedPrecision; one that replaces linear layers is a
ConvertingPrecision, like Float8Precision.
"""

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.core import ConversionPlan, ConversionReport, Precision, sessions, tensor_facts
from runner.precision.casting import autocast, cast_fields, cast_floats, cast_nest, default_dtype
from runner.precision.emulation.cpu_kernels import KernelChoice, choose_kernels
from runner.precision.emulation.formats import FP8_ROUNDOFFS
from runner.precision.keep_fp32 import find_kept_modules, find_kept_tensors, keep_in_float32
from runner.precision.options import choice_problems, switch_problems
from runner.precision.switches import MATMUL_PRECISIONS, switched

_NO_CONTEXT = nullcontext()


class BasePrecision(Precision):
    """A precision that casts a model to its storage dtype, but for what stays in float32.

    Attributes:
        cpu_float16: which kernels float16 takes on a CPU; see emulation.cpu_kernels.
        reduced_precision_reduction: half-precision products on CUDA may add their parts in half
            precision.
        emulates_products: on a CPU, products are computed as tensor cores compute them.
    """

    cpu_float16: KernelChoice = "auto"
    reduced_precision_reduction: bool = False
    emulates_products: bool = False
    operand_roundoffs = FP8_ROUNDOFFS

    def _derive(self, **values: Any) -> None:
        """Set attributes that follow from the fields, while __post_init__ builds the value."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @contextmanager
    def session(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        if not self.float32_matmul:
            yield
            return
        wanted = self._switches(model, device)
        with sessions.open_session(sessions.Session(self.name, wanted, switched(wanted, model))):
            yield

    def convert(
        self,
        model: nn.Module,
        device: torch.device = tensor_facts.CPU_DEVICE,
        plan: ConversionPlan = ConversionPlan(),
    ) -> tuple[nn.Module, ConversionReport]:
        self._check_model(model)
        kept = find_kept_modules(model, self.keep_fp32, self.storage)
        keep_in_float32(model, kept, self.storage)
        own_dtypes, lines = find_kept_tensors(model, self.storage, device)
        cast_floats(model, self.storage, {**own_dtypes, **dict.fromkeys(kept, torch.float32)})
        return model, ConversionReport(kept=lines)

    def _check_model(self, model: nn.Module) -> None:
        """Raise ConfigError for a model that cannot be converted."""

    def forward(
        self, device: torch.device, plan: ConversionPlan = ConversionPlan()
    ) -> AbstractContextManager[Any]:
        if self.has_autocast:
            return autocast(device.type, self.compute, plan.caches_casts)
        return self._default_dtype(plan)

    def backward(
        self, device: torch.device, plan: ConversionPlan = ConversionPlan()
    ) -> AbstractContextManager[Any]:
        return self._default_dtype(plan)

    def _default_dtype(self, plan: ConversionPlan) -> AbstractContextManager[Any]:
        """Return the context in which tensors that are made without a dtype get the storage dtype;
        torch's default is float32."""
        if self.has_autocast or plan.makes_float32 or self.storage is torch.float32:
            return _NO_CONTEXT
        return default_dtype(self.storage)

    def cast(self, inputs: Any, plan: ConversionPlan = ConversionPlan()) -> Any:
        return cast_fields(inputs, self.storage, plan.wide_inputs)

    def cast_target(self, target: Any) -> Any:
        return cast_nest(target, self.storage)

    def loss_pair(self, output: Any, target: Any) -> tuple[Any, Any]:
        dtypes = {leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
        dtype = torch.float64 if torch.float64 in dtypes else self.loss_dtype
        return cast_nest(output, dtype), cast_nest(target, dtype)

    def kernels(self, model: nn.Module, device: torch.device) -> str:
        return self._switches(model, device).kernels if self.float32_matmul else ""

    def _switches(self, model: nn.Module, device: torch.device) -> sessions.Switches:
        """Return what a session switches, so that products are computed as the keys say."""
        kernels = ""
        matmul = self.float32_matmul
        has_half_products = self.compute is torch.float16 or self.emulates_products
        replaced = set[Hashable]()
        if device.type == "cpu" and getattr(self, "emulate", False):
            replaced.add("cuda_casts")
        if self.has_autocast:
            replaced.add("grouped_casts")
        # In evaluation torch.nn's encoders and attention have kernels that read their parts'
        # weights, and know no autocast on a CPU. torch leaves them out under CUDA's, and where a
        # part has a hook (converted and adapted layers have one, and those of keep_fp32); but of
        # padded inputs an encoder makes nested tensors, with which no part can compute.
        encoders = [each for each in model.modules() if isinstance(each, nn.TransformerEncoder)]
        parts = [part for encoder in encoders for part in encoder.modules()]
        if replaced or any(part._forward_pre_hooks or part._forward_hooks for part in parts):
            replaced.add("calls_parts")
        if self.emulates_products and self.compute is torch.float32:
            # torch's own switch is off: the emulation rounds the operands, and sums are float32.
            matmul = "highest"
            replaced.add("tf32")
        elif device.type == "cpu" and has_half_products:
            # Tensor cores sum in float32, which native kernels of a CPU need not do.
            choice = "float32_accumulate" if self.emulates_products else self.cpu_float16
            kernels = choose_kernels(choice, model)
            if kernels == "float32_accumulate":
                replaced.add(self.compute)
        concerning: set[Hashable] = {"tf32", self.storage, self.compute}
        if self.has_autocast:
            concerning |= {"cuda_casts", "grouped_casts"}  # without autocast they change nothing
        return sessions.Switches(
            matmul, self.reduced_precision_reduction, replaced, concerning, kernels
        )

    def _product_problems(self) -> list[str]:
        """Return a sentence for each value that is not allowed, of the keys that say how products
        are computed."""
        # torch itself only warns of an unknown value.
        problems = choice_problems("float32_matmul", self.float32_matmul, MATMUL_PRECISIONS)
        problems += choice_problems("cpu_float16", self.cpu_float16, get_args(KernelChoice))
        return problems + switch_problems(
            emulate=self.emulates_products,
            reduced_precision_reduction=self.reduced_precision_reduction,
        )
