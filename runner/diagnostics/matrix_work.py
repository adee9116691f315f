"""Share the matrix work of a forward among the formats that it was computed in.

Work is counted in floating-point operations, two for a multiplication and its addition.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

import torch
from torch import nn

from runner.config.messages import CPU_CASTS
from runner.core import ConversionReport, Precision, fmt, tensor_facts
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.precision.casting import KeptInFloat32
from runner.precision.layers.experts import Experts

MIN_ASKED_SHARE = 0.9
"""Share of the work in the format that was asked for, below which a run warns."""


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
    work = _work(probe, precision, report)
    total = sum(work.values())
    shares: Counter[str] = Counter()
    for (_, _, kind), flops in work.items():
        shares[kind] += flops
    formats = {kind: fmt.format_percent(n / total) for kind, n in shares.most_common() if n}
    texts = [f"{share} {kind}" for kind, share in formats.items()]
    caveats = [*filter(None, [_work_caveat(probe, precision, work)])]
    return Computation(", ".join(texts), [*formats], caveats, _cast_note(probe.model, precision))


_Work = Counter[tuple[str, str, str]]
"""Work by module, operator and format."""


def _work(probe: DtypeProbe, precision: Precision, report: ConversionReport) -> _Work:
    """Return the work of a forward, in which converted layers count as their format."""
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
    return work


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
    kept = [n for n, m in probe.model.named_modules() if isinstance(m, KeptInFloat32)]
    # In a storage of 16 bits the model declares them, as T5 does its second products.
    weights = probe.model.named_parameters() if precision.storage.itemsize == 2 else ()
    wide = {n.rpartition(".")[0] for n, p in weights if p.dtype is torch.float32}
    other: dict[str, set[str]] = defaultdict(set)
    flops = 0
    for (module, operator, kind), count in work.items():
        is_asked = kind in asked or (accumulates and operator == "mkldnn_rnn_layer")
        is_asked |= kind == "float32" and module in wide
        if not is_asked and not any(f"{module}.".startswith(f"{name}.") for name in kept):
            flops += count
            other[f"{operator} in {kind}"].add(module)
    if flops <= (1 - MIN_ASKED_SHARE) * sum(work.values()):
        return ""
    places = [f"{name} ({fmt.first_names(sorted(modules), 2)})" for name, modules in other.items()]
    return (
        f"{fmt.format_percent(flops / sum(work.values()))} of the matrix work was not in "
        f"{precision.compute_format}: {fmt.first_names(places, 3)}."
    )


def _cast_note(model: nn.Module, precision: Precision) -> str:
    """Return that autocast followed the list of the CPU; empty where it did not run there."""
    is_on_cpu = any(parameter.device == tensor_facts.CPU_DEVICE for parameter in model.parameters())
    emulate = getattr(precision, "emulate", None)
    if emulate or not is_on_cpu:
        return ""
    if not isinstance(precision.forward(tensor_facts.CPU_DEVICE), torch.autocast):
        return ""
    text = CPU_CASTS
    if emulate is not None:
        text += " Type precision.emulate=true for CUDA's casts."
    return text
