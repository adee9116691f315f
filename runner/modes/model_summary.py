"""Report the model that a run has built: its size, its conversion, and how much of it trains."""

from typing import Any

from runner.modes.context import RunContext
from runner.training.model import BuiltModel
from runner.training.pretrained import starts_random
from runner.utils.files import write_json
from runner.utils.formatting import format_percent, now_ms
from runner.utils.tensors import MIB, count_elements, stored_bytes


def describe_model(run: RunContext, built: BuiltModel) -> dict[str, Any]:
    """Report the built model on the console and in the store; return its fields of RunResult."""
    params = list(built.model.parameters())
    every = sum(map(count_elements, params))
    trainable = sum(count_elements(p) for p in params if p.requires_grad)
    weights = stored_bytes(built.model) / MIB
    report = built.report
    size = f"{weights:.1f} MiB"
    if weights * MIB < built.plain_bytes:
        size += f" (in float32 {built.plain_bytes / MIB:.1f})"
    run.say(f"{run.label} on {run.device_name}: {every:,} parameters, {size}")
    for line in report.lines():
        run.say(line)
    tags = report.tags()
    if kernels := run.precision.kernels():
        tags["cpu_float16"] = kernels
    if run.precision.emulated:
        tags["emulated"] = "true"
    if run.spec.mode == "train" and trainable < every:
        tags["trainable"] = f"{trainable}/{every}"
        print_trainable(run, trainable, every)
    run.tracker.tags(tags)
    modules = report.to_list()
    run.save_artifact(run.out / "conversion.json", lambda path: write_json(path, modules))
    run.tracker.log_metrics([(0, now_ms(), {"memory/weights_mib": weights})])
    return {
        "weights_mib": weights,
        "plain_weights_mib": built.plain_bytes / MIB,
        "converted": tags.get("converted", ""),
        "converted_weights": tags.get("converted_weights", ""),
        "trains": trainable / every if every and run.spec.mode == "train" else None,
    }


def print_trainable(run: RunContext, trainable: int, every: int) -> None:
    """Print how many parameters train, and what a run should know whose weights are frozen."""
    run.say(f"{trainable:,} of {every:,} parameters train ({format_percent(trainable / every)})")
    adapts = bool(run.spec.adapter.get("_target_"))
    if adapts and (bypassed := run.precision.bypassed):
        names, more = ", ".join([*bypassed][:4]), " and others" * (len(bypassed) > 4)
        run.say(f"the adapter leaves {names}{more} out: {next(iter(bypassed.values()))}")
    random = starts_random(run.spec.model) and run.spec.init.weights is None
    start = " init.weights=<checkpoint>" if random else ""
    if not adapts and run.precision.freezes:
        run.say(
            f"warning: precision={run.precision.name} freezes the weights that it quantises. "
            f"Type adapter=lora{start} to tune a trained model, or "
            "precision=bnb-int8-training to train them all."
        )
    elif adapts and random:
        run.say(
            "warning: the frozen weights are random ones, for the model loads none. "
            "Type init.weights=<checkpoint> to tune a trained model."
        )
