"""What a run says of the model that it has built."""

from typing import TYPE_CHECKING, Any

from runner.training.model import BuiltModel
from runner.training.pretrained import starts_random
from runner.utils.files import write_json
from runner.utils.formatting import format_percent, now_ms
from runner.utils.tensors import MIB, count_elements, stored_bytes

if TYPE_CHECKING:
    from runner.modes.context import RunContext


def describe_model(this: "RunContext", built: BuiltModel) -> dict[str, Any]:
    """What was built, on the console, as tags, artifact and metric; its part of the result."""
    params = list(built.model.parameters())
    every = sum(map(count_elements, params))
    trainable = sum(count_elements(p) for p in params if p.requires_grad)
    weights = stored_bytes(built.model) / MIB
    this.report = report = built.report
    size = f"{weights:.1f} MiB"
    if weights * MIB < built.plain_bytes:
        size += f" (in float32 {built.plain_bytes / MIB:.1f})"
    this.say(f"{this.label} on {this.device_name}: {every:,} parameters, {size}")
    for line in report.lines():
        this.say(line)
    tags = report.tags()
    if kernels := this.precision.kernels():
        tags["cpu_float16"] = kernels
    if this.precision.emulated:
        tags["emulated"] = "true"
    if this.spec.mode == "train" and trainable < every:
        tags["trainable"] = f"{trainable}/{every}"
        print_trainable(this, trainable, every)
    this.tracker.tags(tags)
    modules = report.to_list()
    this.leave(this.out / "conversion.json", lambda path: write_json(path, modules))
    this.tracker.metrics(0, now_ms(), {"memory/weights_mib": weights})
    return {
        "weights_mib": weights,
        "plain_weights_mib": built.plain_bytes / MIB,
        "converted": tags.get("converted", ""),
        "converted_weights": tags.get("converted_weights", ""),
        "trains": trainable / every if every and this.spec.mode == "train" else None,
    }


def print_trainable(this: "RunContext", trainable: int, every: int) -> None:
    """Print how many parameters train, and what a run should know whose weights are frozen."""
    this.say(f"{trainable:,} of {every:,} parameters train ({format_percent(trainable / every)})")
    adapts = bool(this.spec.adapter.get("_target_"))
    if adapts and (bypassed := this.precision.bypassed):
        names, more = ", ".join([*bypassed][:4]), " and others" * (len(bypassed) > 4)
        this.say(f"the adapter leaves {names}{more} out: {next(iter(bypassed.values()))}")
    random = starts_random(this.spec.model) and this.spec.init.weights is None
    start = " init.weights=<checkpoint>" if random else ""
    if not adapts and this.precision.freezes:
        this.say(
            f"warning: precision={this.precision.name} freezes the weights that it quantises. "
            f"Type adapter=lora{start} to tune a trained model, or "
            "precision=bnb-int8-training to train them all."
        )
    elif adapts and random:
        this.say(
            "warning: the frozen weights are random ones, for the model loads none. "
            "Type init.weights=<checkpoint> to tune a trained model."
        )
