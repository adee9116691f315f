"""Report what a run starts with: its data sets, its built and converted model, and how much trains.

The checks that may stop a run before it starts are in startup_checks.py.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import TensorDataset

from runner.data import fingerprint
from runner.data.splits import RunData
from runner.data.stream import is_stream
from runner.data.stream_loader import BatchLoader, StreamLoader
from runner.modes.context import RunContext
from runner.training.compile import fused_rounding
from runner.training.initial_weights import InitialWeights
from runner.training.model import BuiltModel, starts_random
from runner.training.optimizers import describe_state_dtypes
from runner.training.parameter_groups import describe_frozen, describe_groups
from runner.training.schedules import describe_schedule
from runner.training.state import TrainState
from runner.utils.files import write_json
from runner.utils.formatting import format_percent, now_ms
from runner.utils.secrets import redact_values
from runner.utils.tensors import MIB, count_elements, stored_bytes

_ROUNDING_LINES = {
    "eager": "compiled; rounding between fused operations: eager, after each one as uncompiled",
    "fused": "compiled; rounding between fused operations: fused, left out where half precision is "
    "fused; train.compile_rounding=eager rounds as the uncompiled model does",
}
"""What a run that compiles prints, by train.compile_rounding."""

_MAX_BYPASSED_NAMES = 4
"""Names of bypassed layers that a line shows before it says "and others"."""


def log_data_sets(run: RunContext, data: RunData) -> None:
    """Record which data sets the run reads, and say what several of them are for."""
    for line in _uses_of_sets(run, data):
        run.say(line)
    # The digest reads samples, so it is computed only for a tracker that stores it.
    if run.tracker.takes_runs:
        name = run.origin.option_name("data", run.spec.data)
        run.tracker.inputs(fingerprint.describe_data(name, redact_values(run.spec.data), data))


def _uses_of_sets(run: RunContext, data: RunData) -> Iterator[str]:
    """Yield what named validation sets and test sets are used for."""
    if len(data.validation) > 1 or "" not in data.validation:
        sizes = ", ".join(f"{name} ({_count(found)})" for name, found in data.validation.items())
        first = next(iter(data.validation))
        quality = run.task.quality
        chosen = f"{quality} of {first}, the first of them"
        if any(quality.startswith(f"val/{name}/") for name in data.validation):
            chosen = quality
        yield f"validation sets: {sizes}; runs are compared by {chosen}"
    if not data.test:
        return
    if run.spec.debug.overfit:
        yield "test set: not evaluated with debug.overfit"
        return
    sizes = ", ".join(f"{name or 'test'} ({_count(found)})" for name, found in data.test.items())
    if run.spec.mode == "evaluate":
        yield f"test sets: {sizes}; their metrics are called test/..."
        return
    yield (
        f"test sets: {sizes}; evaluated once, at the end, with the last weights and not the best "
        "ones; their metrics are called test/..."
    )


def _count(dataset: Any) -> str:
    """Return the number of examples of a data set, or that it is a stream."""
    return "stream" if is_stream(dataset) else str(len(dataset))


def log_loading(run: RunContext, loader: BatchLoader) -> None:
    """Say what data.sampler changes, and data.collate and train.num_workers for data in memory.

    Of a stream, say how it is read.
    """
    if isinstance(loader, StreamLoader):
        every = run.spec.train.eval_every
        evaluated = f"every {every} steps" if every else "after the last step (train.eval_every)"
        run.say(
            f"data: the train set is a stream ({type(loader.dataset).__name__}), read in its own "
            f"order, without data.shuffle, and begun anew where it ends before train.max_steps="
            f"{run.spec.train.max_steps}; evaluated {evaluated}"
        )
        return
    if loader.sampler:
        run.say(
            f"data.sampler={loader.sampler.name}: an epoch has {loader.epoch_examples} examples, "
            f"drawn from {loader.examples}"
        )
    if loader.collator and type(loader.dataset) is TensorDataset:
        name = run.origin.option_name("data", run.spec.data)
        run.say(
            f"data.collate={loader.collator.name} takes single examples: those of data={name} are "
            "loaded one by one, in place of slices of its tensors."
        )
    if loader.workers and not loader.uses_workers:
        name = run.origin.option_name("data", run.spec.data)
        run.say(
            f"train.num_workers={loader.workers} starts no process: data={name} is in memory, and "
            "its batches are slices of it."
        )


def describe_model(run: RunContext, built: BuiltModel) -> dict[str, Any]:
    """Report the built model on the console and in the store; return its fields of RunResult."""
    params = list(built.model.parameters())
    every = sum(map(count_elements, params))
    trainable = sum(count_elements(p) for p in params if p.requires_grad)
    weights_mib = stored_bytes(built.model) / MIB
    plain_mib = built.plain_bytes / MIB
    size = f"{weights_mib:.1f} MiB"
    if weights_mib < plain_mib:
        size += f" (in float32 {plain_mib:.1f})"
    run.say(f"{run.label} on {run.device_name}: {every:,} parameters, {size}")
    if built.initial is not None:
        run.say(built.initial.describe())
        _record_initial_weights(run, built.initial)
        _warn_of_frozen_fresh(run, built.model, built.initial)
    for line in built.report.lines():
        run.say(line)
    tags = built.report.tags()
    kernels = run.precision.kernels()
    if kernels:
        tags["cpu_float16"] = kernels
    if run.precision.emulated:
        tags["emulated"] = "true"
    rounding = fused_rounding(run.spec.train)
    if rounding:
        tags["fused_rounding"] = rounding
        run.say(_ROUNDING_LINES[rounding])
    trains = run.spec.mode == "train"
    if trains and run.spec.train.freeze:
        run.say(describe_frozen(built.model))
    # Only a training says it: in an evaluation nothing trains anyway.
    if trains and trainable < every:
        tags["trainable"] = f"{trainable}/{every}"
        print_trainable(run, trainable, every)
    run.tracker.tags(tags)
    modules = built.report.to_list()
    run.save_artifact(run.out / "conversion.json", lambda path: write_json(path, modules))
    # Step 0: before anything trains.
    run.tracker.log_metrics([(0, now_ms(), {"memory/weights_mib": weights_mib})])
    return {
        "weights_mib": weights_mib,
        "plain_weights_mib": plain_mib,
        "converted": tags.get("converted", ""),
        "converted_weights": tags.get("converted_weights", ""),
        "fused_rounding": rounding,
        "trains": trainable / every if every and trains else None,
    }


def _record_initial_weights(run: RunContext, initial: InitialWeights) -> None:
    """Record by name what the model took from init.weights and what it did not."""
    every = len(initial.loaded) + len(initial.fresh)
    run.tracker.tags({"init_weights": f"{len(initial.loaded)}/{every}"})
    content = initial._asdict()
    run.save_artifact(run.out / "init_weights.json", lambda path: write_json(path, content))


def _warn_of_frozen_fresh(run: RunContext, model: nn.Module, initial: InitialWeights) -> None:
    """Warn where an adapter freezes weights that init.skip left at random values."""
    if run.spec.mode != "train" or not run.spec.adapter.get("_target_"):
        return
    fresh = set(initial.fresh)
    frozen: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        # peft puts the layers that it adds to one level lower.
        own_name = name.replace(".base_layer.", ".")
        if own_name in fresh and not parameter.requires_grad:
            frozen[own_name.rpartition(".")[0] or own_name] = None
    if frozen:
        modules = ",".join(frozen)
        run.say(
            f"warning: init.skip leaves {', '.join(frozen)} at random values, and the adapter "
            f"freezes them. Type adapter.train=[{modules}] to train them in full."
        )


def describe_optimizers(run: RunContext, state: TrainState, steps: int) -> None:
    """Print groups of parameters, schedules and dtypes of state and strategy that settings chose.

    Args:
        run: the run.
        state: its optimizers are described.
        steps: optimizer steps of the whole run.
    """
    task = run.task
    # The schedules of several optimizers are of one kind.
    schedule = state.optimizers[0].scheduler
    lines = [
        describe_groups(state.optimizers),
        describe_schedule(schedule, steps, task.quality, task.direction),
        state.average.describe() if state.average is not None else "",
        *describe_state_dtypes(run.spec.optimizer, state.optimizers),
        state.strategy.describe(),
    ]
    for line in lines:
        if line:
            run.say(line)


def print_trainable(run: RunContext, trainable: int, every: int) -> None:
    """Print how many parameters train, and warn of frozen weights that are probably a mistake.

    Args:
        run: the run.
        trainable: elements of the parameters that train.
        every: elements of all parameters.
    """
    run.say(f"{trainable:,} of {every:,} parameters train ({format_percent(trainable / every)})")
    has_adapter = bool(run.spec.adapter.get("_target_"))
    bypassed = run.precision.bypassed
    if has_adapter and bypassed:
        names = ", ".join([*bypassed][:_MAX_BYPASSED_NAMES])
        more = " and others" if len(bypassed) > _MAX_BYPASSED_NAMES else ""
        run.say(f"the adapter leaves {names}{more} out: {next(iter(bypassed.values()))}")
    random = starts_random(run.spec.model) and run.spec.init.weights is None
    start = " init.weights=<checkpoint>" if random else ""
    if not has_adapter and run.precision.freezes:
        run.say(
            f"warning: precision={run.precision.name} freezes the weights that it quantises. "
            f"Type adapter=lora{start} to tune a trained model, or "
            "precision=bnb-int8-training to train them all."
        )
    elif has_adapter and random:
        run.say(
            "warning: the frozen weights are random ones, for the model loads none. "
            "Type init.weights=<checkpoint> to tune a trained model."
        )
