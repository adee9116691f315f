"""mode=plan: print what a run would hold and convert, without data and without training."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.table import Table
from torch import nn

from runner.core import (
    ConfigError,
    ConversionPlan,
    ConversionReport,
    RunContext,
    files,
    fmt,
    random_streams,
    tensor_facts,
)
from runner.diagnostics.memory.forecast import (
    MAX_FORECAST_BATCH_SIZE,
    find_experts,
    largest_fitting_batch,
    peak_forecast,
)
from runner.diagnostics.memory.limits import USABLE_MEMORY_SHARE, free_memory
from runner.modes.execution import read_initial_weights
from runner.planning.card_answer import card_rows, with_quality
from runner.planning.card_plan import plan_card, rehearse
from runner.planning.card_speed import least_seconds, product_format, step_seconds
from runner.planning.measured_device import MEASURED, measure_device
from runner.planning.room import PLAN, DeviceSpec
from runner.precision.casting import KeptInFloat32
from runner.training.compile import check_compile_options
from runner.training.example_batch import ForecastUnavailable
from runner.training.model import BuiltModel, ModelBuilder
from runner.training.setup import (
    attach_rules,
    build_optimizer,
    build_scheduled_optimizers,
    closure_calls,
    embedding_parameters,
    parameters_by_optimizer,
)


def plan(run: RunContext) -> None:
    """Print what a run would hold, from its model built on the meta device and converted.

    Where a model's code reads values, or a forward has to find its experts, it is built in memory.
    Nothing is trained or tracked; of init.weights the names and shapes are compared with the
    model's.
    """
    spec = run.spec
    precision = run.precision
    device = run.accelerator.device
    random_streams.seed_all(spec.seed)
    start = read_initial_weights(spec)
    found = find_experts(spec, precision, device)
    built = ModelBuilder(spec, precision, start).build_on_meta(found)
    model = built.model
    report = built.report
    build_scheduled_optimizers(spec, model, precision, steps=1)  # refuses what a run would refuse
    check_compile_options(spec, precision, device, model)
    card = spec.section(DeviceSpec)
    title = f"plan: {run.label}" + (f" on {card.name}" if card.name else "")
    table = Table(title=title, title_justify="left", show_header=False)
    rows = _overview(run, built)
    if card.name:
        rows |= {"device": card.name} | _card_rows(run, report, found)
    else:
        rows |= _peak_rows(run, found)
    for name, text in rows.items():
        table.add_row(name, text)
    run.console.print(table)
    if built.initial is not None:
        run.say(built.initial.describe())
    # All lines: a plan is asked for the details that a run shortens.
    for line in report.lines(limit=len(report.modules)):
        run.console.print(line)
    if report.modules:
        run.say("not proven: no batch was run, so layers that the model never calls count, too")
    files.write_json(run.out / "conversion.json", report.to_list())
    kept = [n for n, m in model.named_modules() if isinstance(m, KeptInFloat32)]
    if kept:
        run.console.print(f"kept in float32: {', '.join(kept)}", markup=False)


def _card_rows(run: RunContext, report: ConversionReport, found: ConversionPlan) -> dict[str, str]:
    """Plan for the card of a run, write the plan to its folder, and return the table's rows."""
    spec, sweep = run.spec, run.invocation.sweep
    settings = run.invocation.settings(spec) if sweep else []
    names = ("device", "precision.emulate")
    varied = [word for word in settings if fmt.override_key(word) not in names]
    card_plan = with_quality(plan_card(spec, run.precision, report, found), spec)
    card_plan = replace(card_plan, settings=" ".join(varied))
    files.write_json(run.out / PLAN, asdict(card_plan))
    return card_rows(card_plan, spec)


def _overview(run: RunContext, built: BuiltModel) -> dict[str, str]:
    """Return the table's rows on what the run holds before a step."""
    model = built.model
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    trainable = list(named.values())
    elements = sum(map(tensor_facts.count_elements, model.parameters()))
    update = run.precision.update
    parts = parameters_by_optimizer(run.spec.optimizer, model, named)
    state = sum(_state_bytes(k, node, [*part.values()], model, update) for k, node, part in parts)
    weights = tensor_facts.stored_bytes(model)
    grads = tensor_facts.tensor_bytes(*trainable)
    if run.spec.train.accumulate > 1 and run.spec.train.accumulate_float32:
        grads += sum(2 * tensor_facts.count_elements(p) for p in trainable if p.itemsize == 2)
    scale = run.precision.scale(torch.device("cpu")).value
    train = run.spec.train
    length = f"{train.max_steps} steps" if train.max_steps else f"{train.epochs} epochs"
    trained = sum(map(tensor_facts.count_elements, trainable))
    mib = tensor_facts.MIB
    return {
        "device": run.accelerator.name,
        "stored in": _dtypes(model),
        "computed in": run.precision.compute_format,
        "loss scale": "none" if scale is None else f"from {scale.item():g}",
        "parameters": f"{elements:,} ({trained:,} trainable)",
        "weights and buffers": f"{weights / mib:.1f} MiB (float32: {built.plain_bytes / mib:.1f})",
        "gradients": f"{grads / mib:.1f} MiB",
        "optimizer state": f"{state / mib:.1f} MiB",
        "before activations": f"{(weights + grads + state) / mib:.1f} MiB",
        "batch": f"{train.batch_size} x {train.accumulate} micro-batches per step",
        "length": length,
    }


def _peak_rows(run: RunContext, found: ConversionPlan) -> dict[str, str]:
    """Return the table's rows on a step's memory and time, and the largest batch that fits."""
    spec, precision, device = run.spec, run.precision, run.accelerator.device
    batch_size = spec.train.batch_size
    try:
        forecast = peak_forecast(spec, precision, device, found)
        peak = forecast.peak(batch_size)
        free = free_memory(device)
        largest = largest_fitting_batch(forecast.peak, batch_size, USABLE_MEMORY_SHARE * free)
    except ForecastUnavailable as error:
        return {"peak of a step": f"not predicted: {error}"}
    mib, gib = tensor_facts.MIB, tensor_facts.GIB
    parts = [f"{name} {size / mib:.1f}" for name, size in peak._asdict().items()]
    # The search stops there, so a larger batch may fit, too.
    more = " or more" if largest == MAX_FORECAST_BATCH_SIZE else ""
    share = f"in {USABLE_MEMORY_SHARE:g} of the {free / gib:.1f} GiB that are free"
    rows = {
        "peak of a step": f"{peak.total / mib:.1f} MiB",
        "at the peak": f"{', '.join(parts[:3])},\n{', '.join(parts[3:])}",
        "largest batch": f"{'none' if largest is None else largest}{more} {share}",
    }
    if precision.emulated:
        rows["emulated"] = "this memory is the emulation's; the hardware's own layers may hold less"
    if not forecast.fallback:
        rows |= _bound_row(run, found)
    else:
        rows["predicted from"] = f"real steps on few examples; on fake tensors: {forecast.fallback}"
    return rows


def _bound_row(run: RunContext, found: ConversionPlan) -> dict[str, str]:
    """Return the table's row on the time of a step here, from products that are measured now; none
    where the precision is emulated, packs weights, or its operators want values."""
    precision, accelerator, train = run.precision, run.accelerator, run.spec.train
    if precision.emulated or precision.converts_layers or accelerator.device.type not in MEASURED:
        return {}
    dtype = product_format(precision)
    tf32 = dtype == "tf32"
    single = replace(run.spec, train=replace(train, accumulate=1))
    try:
        cost = rehearse(single, precision, found, train.batch_size).cost
        card = measure_device(accelerator, (dtype, "float32"))
    except (ConfigError, RuntimeError):  # it wants values, or the memory is taken
        return {}
    if dtype not in card.tflops:
        return {}
    bound = 1000 * train.accumulate * least_seconds(cost, card, tf32)
    step = step_seconds(cost, card, tf32, bool(train.compile))
    expected = 1000 * (train.accumulate * (step.total - step.update) + step.update)
    return {
        "a step takes": f"at least {bound:.3g} ms, for its products at {card.tflops[dtype]:.3g} "
        f"TFLOP/s, measured now; expected: {expected:.3g} ms"
    }


def _dtypes(model: nn.Module) -> str:
    """Return the formats of a model's parameters, each with its number of elements."""
    counts: dict[str, int] = {}
    for p in model.parameters():
        # Packed 4-bit weights are uint8; quant_state names the format of bitsandbytes' ones.
        packed = getattr(p, "quant_state", None)
        plain_name = "4-bit codes" if p.dtype is torch.uint8 else tensor_facts.dtype_name(p.dtype)
        name = packed.quant_type if packed else plain_name
        counts[name] = counts.get(name, 0) + tensor_facts.count_elements(p)
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(counts.items()))


def _state_bytes(
    key: str, node: Mapping[str, Any], params: list[nn.Parameter], model: nn.Module, update: str
) -> int:
    """Return the bytes of optimizer state after the first step.

    The optimizer's own code makes the state on the meta device: it takes no memory and is exact,
    also where the state depends on a tensor's size. Where a step needs a loss or reads values, one
    real step on a small tensor of each dtype gives the bytes that an element of a parameter needs.
    """
    # Optimizers with low-bit state keep that of embeddings in 32 bits.
    wide = embedding_parameters(model)
    twins = {p: nn.Parameter(torch.empty_like(p, device="meta")) for p in params}
    wide_twins = [twin for p, twin in twins.items() if p in wide]
    optimizer = build_optimizer(key, node, [*twins.values()], wide_twins)
    takes_closure, _ = closure_calls(key, node, optimizer)
    if not takes_closure:
        attach_rules(key, node, optimizer, update)
        for twin in twins.values():
            twin.grad = torch.empty_like(twin)
        try:
            optimizer.step()
            return tensor_facts.tensor_bytes(*_state_tensors(optimizer))
        except (NotImplementedError, RuntimeError):  # it reads values, which meta tensors lack
            pass
    total = 0
    for dtype in {p.dtype for p in params}:
        probe = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
        optimizer = build_optimizer(key, node, [probe])
        attach_rules(key, node, optimizer, update)
        probe.grad = torch.ones_like(probe)
        closure = (lambda p=probe: p.sum()) if takes_closure else None
        try:
            optimizer.step(closure)  # type: ignore[arg-type]
        except RuntimeError:  # of SparseAdam, for a dense gradient
            probe.grad = probe.grad.to_sparse()
            optimizer.step(closure)  # type: ignore[arg-type]
        # A tensor of one element, a step count, does not grow with the parameter.
        state = [value for value in _state_tensors(optimizer) if value.numel() > 1]
        elements = sum(p.numel() for p in params if p.dtype is dtype)
        total += int(tensor_facts.tensor_bytes(*state) / probe.numel() * elements)
    return total


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
