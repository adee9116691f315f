"""Record which dtypes each module really stores and computes in, in a step that runs anyway, and
share the matrix work of a forward among the formats that it was computed in.

Work is counted in floating-point operations, two for a multiplication and its addition.
"""

import re
from collections import Counter, defaultdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.config.messages import CPU_CASTS
from runner.core import ConversionReport, Precision, fmt, model_call, module_tape, tensor_facts
from runner.diagnostics.module_tensors import named_modules, tensors_in
from runner.precision.casting import KeptInFloat32
from runner.precision.layers.experts import Experts

MIN_ASKED_SHARE = 0.9
"""Share of the work in the format that was asked for, below which a run warns."""

_HEAVY = re.compile("convolution|mm|linear|scaled_dot_product|lstm|gru|rnn|norm|embedding")
"""Parts of the names of operators whose input dtype is the dtype that a module computes in."""
_NO_INDICES = {"int8", "bcomplex32", "complex32", "complex64", "complex128"}
"""Dtypes that are not floating and that kernels compute in; other integers are indices, as those of
an embedding."""

_PRODUCTS = ("mm", "bmm", "int_mm", "grouped_mm", "grouped_mm_fallback", "linear", "mv", "dot")
_PRODUCTS_ADDED = ("addmm", "baddbmm", "addbmm", "addmm_activation", "addmv")
"""Products that are added to their first argument."""


def _product(name: str, args: tuple[Any, ...], out: Any) -> tuple[Tensor, int] | None:
    """Return an operand of a product, and its floating-point operations; None for no product."""
    is_added = name in _PRODUCTS_ADDED
    if is_added or name.removeprefix("scaled_") in _PRODUCTS:
        factor = args[int(is_added)]
        return factor, 2 * factor.numel() * (1 if name in ("mv", "addmv", "dot") else out.shape[-1])
    if name == "convolution":
        image, weight, is_transposed = args[0], args[1], args[6]
        return image, 2 * (image if is_transposed else out).numel() * weight[0].numel()
    if "scaled_dot_product" in name:
        query, key = args[:2]
        return query, 4 * query.numel() * key.shape[-2]
    if name in ("mkldnn_rnn_layer", "cudnn_rnn"):
        weights = args[1] if name == "cudnn_rnn" else args[1:3]
        rows = args[0].numel() // args[0].shape[-1]
        return args[0], 2 * rows * sum(weight.numel() for weight in weights)
    return None


def _names(values: Any) -> set[str]:
    """Return the names of the dtypes of the tensors in a nest."""
    return {tensor_facts.dtype_name(tensor.dtype) for tensor in tensors_in(values)}


class DtypeProbe(TorchDispatchMode):
    """Context around one training step; table() gives a row per module that ran.

    A row holds the module's dotted name and kind and the dtypes of: `stores` (its own parameters),
    `inputs`, `computes` (what its convolutions and products took), `outputs` and `gradients`.
    A model of which torch compiled a part in place shows nothing: hooks would be compiled in.
    Dispatch comes after autocast, so the dtypes of products are those that kernels really get.

    Attributes:
        model: that is watched.
        seen: names of dtypes by column and module.
        work: floating-point operations of the forward's products by module, operator and dtype.
        input_rows: how many vectors each module was given, as tokens of a linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Modules have the names that the conversion's report gives them.
        self.model = model_call.plain_module(model)
        self._tape = module_tape.ModuleTape()
        self.seen: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self.work: Counter[tuple[str, str, str]] = Counter()
        self.input_rows: Counter[str] = Counter()
        # Compiled kernels are not dispatched one by one.
        self._shows_kernels = not hasattr(model, "_orig_mod")

    def _note(self, column: str, name: str, values: Any) -> None:
        self.seen[column, name] |= _names(values)

    def __enter__(self) -> "DtypeProbe":
        if any(module._compiled_call_impl for module in self.model.modules()):
            return self
        end = partial(self._note, "outputs")
        for name, module in named_modules(self.model):
            self._tape.watch_calls(name, module, self._note_inputs, end)
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    note = partial(self._note, "gradients", name)
                    self._tape.watch_gradient(p, lambda p, note=note: note(p.grad))
        if self._shows_kernels:
            super().__enter__()
            self._tape.push(super().__exit__)
        return self

    def __exit__(self, *_: object) -> None:
        self._tape.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._tape.running:
            module = self._tape.running[-1]
            # Without the operator's namespace and overload, as addmm.
            name = func._schema.name.split("::")[1].strip("_")
            if _HEAVY.search(name):
                # The first one alone: norms may hold weights and statistics in a wider dtype.
                floats = (a for a in args if isinstance(a, Tensor) and a.is_floating_point())
                first = next(floats, None)
                kinds = _names(args) & _NO_INDICES if first is None else {_kernel_dtype(first)}
                self.seen["computes", module] |= kinds
            product = _product(name, args, out)
            if product is not None:
                self.work[module, name, _kernel_dtype(product[0])] += product[1]
        return out

    def _note_inputs(self, name: str, values: Any) -> None:
        self._note("inputs", name, values)
        first = next((t for t in tensors_in(values) if t.ndim), None)
        if first is not None and first.numel():
            self.input_rows[name] += first.numel() // first.shape[-1]

    def table(self) -> list[dict[str, str]]:
        """Return a row for each module that ran, in the model's order."""
        rows = []
        for name, module in named_modules(self.model):
            if not self.seen["outputs", name]:
                continue
            columns = {"stores": _names(list(module.parameters(recurse=False)))}
            for column in ("inputs", "computes", "outputs", "gradients"):
                columns[column] = self.seen[column, name]
            row = {key: " ".join(sorted(value)) for key, value in columns.items()}
            rows.append({"module": name, "kind": type(module).__name__, **row})
        return rows


def _kernel_dtype(operand: Tensor) -> str:
    """Return the name of the dtype that a kernel gets an operand in."""
    # torchao's FP8 tensors say the dtype that they stand for; the kernel gets their codes.
    return tensor_facts.dtype_name(next(tensor_facts.inner_tensors(operand), operand).dtype)


class Computation(NamedTuple):
    """What a forward computed in.

    Attributes:
        matrix_work: the share of each format, as "82.0% float32, 18.0% bfloat16"; empty where no
            product was seen.
        matrix_formats: these formats.
        caveats: sentences on what was not computed as asked.
        cast_note: sentence that autocast followed torch's list for CPUs; empty where it did not.
    """

    matrix_work: str
    matrix_formats: list[str]
    caveats: list[str]
    cast_note: str


def computation(probe: DtypeProbe, precision: Precision, report: ConversionReport) -> Computation:
    """Return what the forward that a probe watched computed in."""
    # Converted layers count as their format.
    layer_format: str = getattr(precision, "layers_compute_in", "")
    seen = {module.removesuffix(".base_layer") for module, _, _ in probe.work}
    # Their kernels may be a library's own, which torch does not dispatch, or emulated.
    layers = _converted_elements(probe.model, report)
    counted = {name for name in layers if layer_format or name not in seen}
    work: _Work = Counter()
    for (module, operator, kind), flops in probe.work.items():
        if module.removesuffix(".base_layer") not in counted:
            work[module, operator, kind] += flops
    for name in counted:
        rows = probe.input_rows[name] or probe.input_rows[f"{name}.base_layer"]
        kind = layer_format or tensor_facts.dtype_name(precision.compute)
        work[name, "linear", kind] += 2 * layers[name] * rows
    shares: Counter[str] = Counter()
    for (_, _, kind), flops in work.items():
        shares[kind] += flops
    total = shares.total()
    formats = {kind: fmt.format_percent(n / total) for kind, n in shares.most_common() if n}
    texts = [f"{share} {kind}" for kind, share in formats.items()]
    caveats = [*filter(None, [_work_caveat(probe, precision, work)])]
    cast_note = ""
    emulate = getattr(precision, "emulate", None)
    cpu = tensor_facts.CPU_DEVICE
    is_on_cpu = any(p.device == cpu for p in probe.model.parameters())
    if is_on_cpu and not emulate and isinstance(precision.forward(cpu), torch.autocast):
        # It followed torch's list for CPUs.
        remedy = "" if emulate is None else " Type precision.emulate=true for CUDA's casts."
        cast_note = CPU_CASTS + remedy
    return Computation(", ".join(texts), [*formats], caveats, cast_note)


_Work = Counter[tuple[str, str, str]]
"""Work by module, operator and format."""


def _converted_elements(model: nn.Module, report: ConversionReport) -> dict[str, int]:
    """Return the elements of the weight of each converted layer by name; of experts, of the layer
    of each one."""
    modules = dict(model.named_modules())
    elements = {row.module: row.elements for row in report.modules}
    layers: dict[str, int] = {}
    for row in report.modules:
        module = modules.get(row.module)
        if row.is_converted and isinstance(module, Experts):
            own = module.layer_elements()
            layers |= {f"{row.module}.{name}": size for name, size in own.items()}
        elif row.is_converted:
            layers[row.module] = elements.get(row.counted_with, row.elements)
    return layers


def _work_caveat(probe: DtypeProbe, precision: Precision, work: _Work) -> str:
    """Return which operators computed too much in other formats than those asked for."""
    asked = {
        tensor_facts.dtype_name(precision.compute),
        getattr(precision, "layers_compute_in", ""),
    }
    # No complex tensor is narrower.
    asked.add("complex128" if precision.storage is torch.float64 else "complex64")
    # Emulated tensor cores give an LSTM's kernel its half operands in float32.
    accumulates = precision.kernels(probe.model, tensor_facts.CPU_DEVICE) == "float32_accumulate"
    named = probe.model.named_modules()
    kept = tuple(f"{name}." for name, module in named if isinstance(module, KeptInFloat32))
    # In a storage of 16 bits the model declares them, as T5 does its second products.
    weights = probe.model.named_parameters() if precision.storage.itemsize == 2 else ()
    wide = {n.rpartition(".")[0] for n, p in weights if p.dtype is torch.float32}
    other: dict[str, set[str]] = defaultdict(set)
    flops = 0
    for (module, operator, kind), count in work.items():
        is_asked = kind in asked or (accumulates and operator == "mkldnn_rnn_layer")
        is_asked |= kind == "float32" and module in wide
        if not is_asked and not f"{module}.".startswith(kept):
            flops += count
            other[f"{operator} in {kind}"].add(module)
    if flops <= (1 - MIN_ASKED_SHARE) * sum(work.values()):
        return ""
    places = [f"{name} ({fmt.first_names(sorted(modules), 2)})" for name, modules in other.items()]
    return (
        f"{fmt.format_percent(flops / sum(work.values()))} of the matrix work was not in "
        f"{precision.compute_format}: {fmt.first_names(places, 3)}."
    )
