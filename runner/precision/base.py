"""Implement the precision contract by dtypes, as every built-in precision does.

How to add a precision: make a final, frozen dataclass whose fields are the keys of its yaml in
conf/precision/, or in the user's own --config-dir, and whose __post_init__ refuses values that are
not allowed (`refuse`) and derives storage, compute and what else differs from the defaults
(`_derive`). The contract test, `doctor`, mode=advise and the docs find it by its yaml. A precision
that computes by autocast is like MixedPrecision; one that replaces linear layers is a
ConvertingPrecision, like Float8Precision.
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.core import (
    ConversionPlan,
    ConversionReport,
    Precision,
    random_streams,
    sessions,
    tensor_facts,
)
from runner.precision.casting import (
    autocast,
    cast_fields,
    cast_floats,
    cast_nest,
    default_dtype,
    find_kept_modules,
    find_kept_tensors,
    keep_in_float32,
)
from runner.precision.conversion import (
    ConversionRules,
    convert_modules,
    find_routers,
    named_experts,
)
from runner.precision.emulation.autocast_kernels import cuda_casts, grouped_casts
from runner.precision.emulation.cpu_kernels import (
    KernelChoice,
    choose_kernels,
    float32_accumulate,
    tf32_products,
)
from runner.precision.emulation.formats import FP8_ROUNDOFFS
from runner.precision.layers.conv1d import linear_classes
from runner.precision.options import choice_problems, switch_problems

_NO_CONTEXT = nullcontext()
# Attributes of torch.backends.cuda.matmul.
_SWITCHES = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
MATMUL_PRECISIONS = ("highest", "high", "medium")  # of torch.set_float32_matmul_precision
# Operands are scaled to the format's range first. Output gradients are in e4m3 too in most recipes,
# and e5m2, which the others take, is wider.
FP8_LAYERS = {"float8_e4m3fn": ("activations", "weights", "gradients")}


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


@contextmanager
def switched(switches: sessions.Switches, model: nn.Module) -> Iterator[None]:
    """Return the context in which switches are set, and after which torch's own are restored, also
    after an exception.

    torch's default allows reduced sums: cuBLAS may then split a long sum (split-K) and add the
    parts in the dtype of the result, which rounds each of them.

    Source: pytorch.org/docs/stable/notes/numerical_accuracy.html, reduced precision reduction.
    """
    matmul = torch.backends.cuda.matmul
    allowed = switches.reduced_sums
    with ExitStack() as stack:
        stack.callback(random_streams.saved_float32_switches())
        random_streams.set_float32_switches(switches.float32_matmul)
        for switch in _SWITCHES:
            # torch refuses reduced sums where sums may not be split at all.
            split_k = getattr(matmul, f"{switch}_split_k")
            stack.callback(setattr, matmul, switch, (getattr(matmul, switch), split_k))
            setattr(matmul, switch, (allowed, allowed or split_k))
        for key in switches.replacements:
            if isinstance(key, torch.dtype):
                stack.enter_context(float32_accumulate(key))
            elif key == "tf32":
                stack.enter_context(tf32_products(model))
            elif key == "calls_parts":
                fuses = torch.backends.mha.get_fastpath_enabled()
                stack.callback(torch.backends.mha.set_fastpath_enabled, fuses)
                torch.backends.mha.set_fastpath_enabled(False)
            else:
                stack.enter_context(cuda_casts() if key == "cuda_casts" else grouped_casts())
        yield


@dataclass(frozen=True, eq=False)
class ConvertingPrecision(BasePrecision):
    """Low-precision linear layers; the rest of the model computes by autocast, or as it is stored.

    A subclass says which layers it cannot hold, and replaces the others. It has autocast where it
    computes in another dtype than it stores.

    Args:
        name: label of the run.
        ignore_modules: patterns of modules that are not converted.
        experts: patterns of stacked weights of experts beside those that are found, see
            conversion.named_experts.
        keep_fp32: patterns of modules that store and compute in float32, and are not converted.
        autocast_loss: compute the loss as the rest of the model, else on float32 outputs.
        reduced_precision_reduction: products on CUDA may add their parts in half precision.

    Attributes:
        keeps_dtypes: what is not converted keeps the dtype that it was built in; else it is cast
            to the storage dtype.
        skips_shared: layers that share a parameter are not converted.
        layers_compute_in: the format of the products of converted layers, as a phrase; empty where
            they are in the dtype of the others.
        layer_formats: the number formats of converted layers, the narrowest first.
    """

    converts_layers = True
    keeps_dtypes = False
    skips_shared = False
    layers_compute_in = ""
    layer_formats: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType({})
    name: str
    _: KW_ONLY
    ignore_modules: Sequence[str] = ()
    experts: Sequence[str] = ()
    keep_fp32: Sequence[str] = ()
    autocast_loss: bool = False
    reduced_precision_reduction: bool = False

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
