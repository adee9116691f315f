"""mode=plan: print what a run would hold and convert, without data and without training."""

from collections.abc import Mapping
from typing import Any

import torch
from rich.table import Table
from torch import nn

from runner.config.schema import LARGEST_FORECAST_BATCH, RunSpec
from runner.diagnostics.memory.forecast import (
    build_fake_model,
    largest_fitting_batch,
    peak_forecast,
)
from runner.diagnostics.memory.limits import USABLE, free_memory
from runner.modes.context import RunContext
from runner.modes.result import RunResult
from runner.precision.keep_fp32 import Float32Island
from runner.precision.precision import Precision
from runner.training.compile import check_compile_options
from runner.training.example_batch import ForecastUnavailable
from runner.training.model import BuiltModel
from runner.training.optimizers import (
    build_optimizer,
    build_scheduled_optimizers,
    embedding_parameters,
    parameters_by_optimizer,
)
from runner.utils.files import write_json
from runner.utils.reproducibility import seed_all
from runner.utils.tensors import GIB, MIB, count_elements, stored_bytes, tensor_bytes


def plan(run: RunContext) -> RunResult:
    """Print what a run would hold, from its model built on the meta device and converted.

    Where a model's code reads values, it is built in memory. Nothing is trained, loaded or tracked.
    """
    spec, precision, accelerator = run.spec, run.precision, run.accelerator
    seed_all(spec.seed)
    built = build_fake_model(spec, precision)
    model, report = built.model, built.report
    build_scheduled_optimizers(spec, model, precision, steps=1)  # refuses what a run would refuse
    check_compile_options(spec, precision, accelerator.device, model)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = {
        key: (node, params)
        for key, node, params in parameters_by_optimizer(spec.optimizer, model, named)
    }
    table = _overview(run, built, optimizer)
    for name, text in _peak(spec, precision, accelerator.device).items():
        table.add_row(name, text)
    run.console.print(table)
    for line in report.lines(limit=len(report.modules)):
        run.console.print(line)
    if report.modules:
        run.console.print(
            "not proven: no batch was run, so layers that the model never calls are counted, too"
        )
    run.out.mkdir(parents=True, exist_ok=True)
    write_json(run.out / "conversion.json", report.to_list())
    islands = [n for n, m in model.named_modules() if isinstance(m, Float32Island)]
    if islands:
        run.console.print(f"kept in float32: {', '.join(islands)}", markup=False)
    return RunResult(precision.name, run.label, str(run.out), device=accelerator.name)


def _overview(
    run: RunContext,
    built: BuiltModel,
    optimizers: Mapping[str, tuple[Mapping[str, Any], list[nn.Parameter]]],
) -> Table:
    model = built.model
    params = list(model.parameters())
    trainable = [p for p in params if p.requires_grad]
    state = sum(_state_bytes(key, *pair, model) for key, pair in optimizers.items())
    weights, grads = stored_bytes(model), tensor_bytes(*trainable)
    scale = run.precision.scale(torch.device("cpu")).value
    train = run.spec.train
    length = f"{train.max_steps} steps" if train.max_steps else f"{train.epochs} epochs"
    rows = {
        "device": run.accelerator.name,
        "stored in": _dtypes(model),
        "computed in": run.precision.compute_format,
        "loss scale": "none" if scale is None else f"from {scale.item():g}",
        "parameters": f"{_count(params):,} ({_count(trainable):,} trainable)",
        "weights and buffers": f"{weights / MIB:.1f} MiB (float32: {built.plain_bytes / MIB:.1f})",
        "gradients": f"{grads / MIB:.1f} MiB",
        "optimizer state": f"{state / MIB:.1f} MiB",
        "before activations": f"{(weights + grads + state) / MIB:.1f} MiB",
        "batch": f"{train.batch_size} x {train.accumulate} micro-batches per step",
        "length": length,
    }
    table = Table(title=f"plan: {run.label}", title_justify="left", show_header=False)
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _peak(spec: RunSpec, precision: Precision, device: torch.device) -> dict[str, str]:
    """Return the table's rows on the memory of a step and the largest batch that fits."""
    own = spec.train.batch_size
    try:
        forecast = peak_forecast(spec, precision, device)
        most, room = forecast(own), free_memory(device)
        fits = largest_fitting_batch(forecast, own, USABLE * room)
    except ForecastUnavailable as error:
        return {"peak of a step": f"not predicted: {error}"}
    parts = [f"{name} {size / MIB:.1f}" for name, size in most._asdict().items()]
    more = " or more" if fits == LARGEST_FORECAST_BATCH else ""
    here = f"in {USABLE:g} of the {room / GIB:.1f} GiB that are free"
    rows = {
        "peak of a step": f"{most.total / MIB:.1f} MiB",
        "at the peak": f"{', '.join(parts[:3])},\n{', '.join(parts[3:])}",
        "largest batch": f"{'none' if fits is None else fits}{more} {here}",
    }
    if forecast.fallback:
        rows["predicted from"] = f"real steps on few examples; on fake tensors: {forecast.fallback}"
    return rows


def _count(params: list[nn.Parameter]) -> int:
    return sum(count_elements(p) for p in params)


def _dtypes(model: nn.Module) -> str:
    counts: dict[str, int] = {}
    for p in model.parameters():
        packed = getattr(p, "quant_state", None)
        name = packed.quant_type if packed else str(p.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + count_elements(p)
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(counts.items()))


def _state_bytes(
    key: str, node: Mapping[str, Any], params: list[nn.Parameter], model: nn.Module
) -> int:
    """Return the bytes of optimizer state after the first step.

    The optimizer's own code makes the state on the meta device: it takes no memory and is exact,
    also where the state depends on a tensor's size.
    """
    wide = embedding_parameters(model)
    twins = {p: nn.Parameter(torch.empty_like(p, device="meta")) for p in params}
    kept = [twin for p, twin in twins.items() if p in wide]
    optimizer = build_optimizer(key, node, list(twins.values()), kept)
    if _wants_closure(optimizer):
        return _probed_bytes(key, node, params)
    for twin in twins.values():
        twin.grad = torch.empty_like(twin)
    try:
        optimizer.step()
    except (NotImplementedError, RuntimeError):  # it reads values, which meta tensors lack
        return _probed_bytes(key, node, params)
    held = (v for values in optimizer.state.values() for v in values.values())
    return tensor_bytes(*(v for v in held if isinstance(v, torch.Tensor)))


def _probed_bytes(key: str, node: Mapping[str, Any], params: list[nn.Parameter]) -> int:
    """Estimate the bytes of optimizer state from one real step on a small tensor of each dtype.

    The state of 64 elements tells how many bytes an element of a parameter needs.
    """
    total = 0
    for dtype in {p.dtype for p in params}:
        probe = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
        optimizer = build_optimizer(key, node, [probe])
        probe.grad = torch.ones_like(probe)
        optimizer.step(None if not _wants_closure(optimizer) else lambda p=probe: p.sum())  # type: ignore[arg-type]
        state = [
            v
            for v in optimizer.state[probe].values()
            if isinstance(v, torch.Tensor) and v.numel() > 1
        ]
        per_element = tensor_bytes(*state) / probe.numel()
        total += int(per_element * sum(p.numel() for p in params if p.dtype is dtype))
    return total


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.LBFGS)
