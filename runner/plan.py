"""mode=plan: what a run would do, without data and without training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from runner.accelerator import MIB, Accelerator
from runner.build import build_driven, build_model, build_optimizer, shares
from runner.errors import RunnerError
from runner.isolation import seed_all
from runner.precision.base import Precision
from runner.precision.islands import Float32Island
from runner.result import RunResult
from runner.spec import Origin, RunSpec


def plan(
    spec: RunSpec,
    out: Path,
    origin: Origin,
    precision: Precision,
    accelerator: Accelerator,
    console: Console,
) -> RunResult:
    """Build the model without memory where its code allows, convert it, and print what a run
    would hold. Nothing is trained, loaded or tracked."""
    seed_all(spec.seed)
    model, report = _build(spec, precision)
    build_driven(spec, model, precision, steps=1)  # refuses what a run would refuse
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = {key: (node, params) for key, node, params in shares(spec.optimizer, model, named)}
    console.print(_overview(spec, origin, precision, accelerator, model, optimizer))
    for row in report.modules:
        console.print(
            f"{'converted' if row.done else 'skipped'}  {row.module} ({row.kind}) {row.why}"
        )
    islands = [n for n, m in model.named_modules() if isinstance(m, Float32Island)]
    if islands:
        console.print(f"kept in float32: {', '.join(islands)}", markup=False)
    return RunResult(precision.name, origin.label(spec), str(out), device=accelerator.name)


def _build(spec: RunSpec, precision: Precision) -> tuple[nn.Module, Any]:
    """On the meta device, which takes no memory; on the CPU where a model's code reads values."""
    try:
        return build_model(spec, precision, torch.device("meta"), made_on=torch.device("meta"))
    except RunnerError:
        raise
    except (NotImplementedError, RuntimeError):
        return build_model(spec, precision, torch.device("cpu"))


def _overview(
    spec: RunSpec,
    origin: Origin,
    precision: Precision,
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: Mapping[str, tuple[Mapping[str, Any], list[nn.Parameter]]],
) -> Table:
    params, buffers = list(model.parameters()), list(model.buffers())
    trainable = [p for p in params if p.requires_grad]
    state = sum(_state_bytes(key, *pair) for key, pair in optimizers.items())
    weights, grads = _bytes([*params, *buffers]), _bytes(trainable)
    scale = precision.scale(torch.device("cpu")).value
    train = spec.train
    length = f"{train.max_steps} steps" if train.max_steps else f"{train.epochs} epochs"
    rows = {
        "device": accelerator.name,
        "stored in": _dtypes(model),
        "computed in": str(precision.compute).removeprefix("torch."),
        "loss scale": "none" if scale is None else f"from {scale.item():g}",
        "parameters": f"{_count(params):,} ({_count(trainable):,} trainable)",
        "weights and buffers": f"{weights / MIB:.1f} MiB",
        "gradients": f"{grads / MIB:.1f} MiB",
        "optimizer state": f"{state / MIB:.1f} MiB",
        "before activations": f"{(weights + grads + state) / MIB:.1f} MiB",
        "batch": f"{train.batch_size} x {train.accumulate} micro-batches per step",
        "length": length,
    }
    table = Table(title=f"plan: {origin.label(spec)}", title_justify="left", show_header=False)
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _count(params: list[nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _dtypes(model: nn.Module) -> str:
    counts: dict[str, int] = {}
    for p in model.parameters():
        name = str(p.dtype).removeprefix("torch.")
        counts[name] = counts.get(name, 0) + p.numel()
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(counts.items()))


def _state_bytes(key: str, node: Mapping[str, Any], params: list[nn.Parameter]) -> int:
    """Bytes of optimizer state: one real step on a small tensor of each shape class tells how
    many bytes an element of a parameter needs."""
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
        per_element = sum(v.numel() * v.element_size() for v in state) / probe.numel()
        total += int(per_element * sum(p.numel() for p in params if p.dtype is dtype))
    return total


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.LBFGS)
