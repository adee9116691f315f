"""Build the data of a run, check it, the strategy and the first batch, and report what starts.

The checks stop a run before anything trains or is evaluated. Errors that the training loop raises
later are explained by training_errors.py.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.core import (
    ConfigError,
    LoadedCheckpoint,
    RunContext,
    RunnerError,
    RunSpec,
    TrainState,
    errors,
    files,
    fmt,
    layout,
    loss_of,
    model_call,
    random_streams,
    refuse,
    secrets,
    tensor_facts,
    training_loop,
)
from runner.data import fingerprint
from runner.data.build import RunLoaders, build_data, build_run_loaders
from runner.data.loader import restored_random_state
from runner.data.splits import RunData
from runner.data.stream_loader import DatasetLoader, StreamLoader, is_stream
from runner.data.workers import explain_dead_workers
from runner.diagnostics.data_checks import (
    check_totals,
    checked_losses,
    data_problems,
    output_lines,
    packing_lines,
)
from runner.diagnostics.memory.out_of_memory import is_out_of_memory
from runner.modes.execution import prepare_process
from runner.precision.casting import CastCacheWatch
from runner.precision.gradient_hooks import describe_hooks, gradient_hooks
from runner.precision.measured_speeds import slow_warning
from runner.training.compile import fused_rounding
from runner.training.model import BuiltModel, starts_random
from runner.training.own_state import saved_state
from runner.training.parameter_groups import describe_frozen, describe_groups
from runner.training.schedules import describe_schedule
from runner.training.setup import describe_state_dtypes

if TYPE_CHECKING:
    from runner.training.evaluation_hook import EvaluationHook
    from runner.training.initial_weights import InitialWeights

_ROUNDING_LINES = {
    "eager": "compiled; rounding between fused operations: eager, after each one as uncompiled",
    "fused": "compiled; rounding between fused operations: fused, left out where half precision is "
    "fused; train.compile_rounding=eager rounds as the uncompiled model does",
}
"""What a run that compiles prints, by train.compile_rounding."""


def prepare_loaders(run: RunContext, saved: LoadedCheckpoint | None = None) -> RunLoaders:
    """Build, report and check the loaders of a run's data sets, those that its mode reads.

    The generators are seeded before the data and again after it, so that the weights follow from
    the seed, whatever numbers a data set draws.

    Args:
        run: the run.
        saved: the checkpoint that the run continues or evaluates; None without one.

    Raises:
        ConfigError: a data set does not fit the command, or a resumed run has other data.
        DataError: a data set holds what it must not, see guard.data.
    """
    prepare_process(run)
    data = build_data(run.spec)
    rank = run.strategy.rank
    loaders = build_run_loaders(run.spec, data, run.device, rank, run.task)
    labelled = loaders.labelled
    trains = run.spec.trains
    if not trains:
        del labelled["train"]
    datasets = {label: loader.dataset for label, loader in labelled.items()}
    learned = saved.content.get("learned", {}) if saved else {}
    refuse(fingerprint.fact_problems(learned, "the checkpoint", datasets))
    # With several processes the others would not know that a wait was interrupted.
    if trains and rank.world_size == 1:
        for loader in labelled.values():
            loader.wait_context = run.signals.interruptible
    for line in _uses_of_sets(run, data):
        run.say(line)
    # The digest reads samples, so it is computed only where it is stored.
    if trains or run.tracker.takes_runs:
        _record_digests(run, data, saved if trains else None)
    for label, loader in labelled.items():
        check_stream(run, label, loader)
    if trains:
        _log_loading(run, loaders.train)
    check_data(run, labelled)
    random_streams.seed_all(run.spec.seed)
    return loaders


def _record_digests(run: RunContext, data: RunData, resumed: LoadedCheckpoint | None) -> None:
    """Record the digests of a run's data sets in the store and in the run's folder.

    Args:
        run: the run.
        data: its data sets.
        resumed: the checkpoint that it continues from; None for a run that starts.

    Raises:
        ConfigError: the digests are not those of the run before its checkpoint, see guard.data.
    """
    name = run.invocation.option_name("data", run.spec.data)
    describe = partial(fingerprint.describe_data, name, secrets.redact_values(run.spec.data), data)
    described = describe()
    path = run.out / layout.DATA_DIGESTS
    text = former = "; ".join("{context} {digest} {profile}".format(**each) for each in described)
    with suppress(OSError, ValueError):  # a checkpoint may be alone
        former = files.read_text(path)
    # Examples that are others each time that they are read have no digest to compare.
    action = run.spec.guard.data if resumed and former != text else "ignore"
    if action != "ignore" and describe() == described:
        message = f"the data have changed since the checkpoint: before {former}, now {text}"
        if action == "stop":
            raise ConfigError(
                f"checkpoint.resume: {message}. Examples of the training may be among those of the "
                "validation. Put the former data back, or type guard.data=warn to train on, or "
                "init.weights= in place of checkpoint.resume= for a new run."
            )
        run.say(f"warning: {message}")
    run.write_file(path, lambda path: files.write_text(path, text))
    if run.tracker.takes_runs:
        run.tracker.inputs(described)


def check_data(run: RunContext, loaders: Mapping[str, DatasetLoader]) -> None:
    """Check the data sets before anything is computed from them, and act as guard.data says.

    Args:
        run: the run.
        loaders: of the data sets, by their labels in messages.

    Raises:
        DataError: with every problem.
    """
    action = run.spec.guard.data
    if action == "ignore":
        return
    problems: list[str] = []
    notes: list[str] = []
    classes = (run.spec.data.get("meta") or {}).get("classes")
    for label, loader in loaders.items():
        with explain_dead_workers(run, label):
            problems += data_problems(loader, label, run.task, classes, notes)
        if label.startswith("test"):
            loader.close()  # it is read again after the last step: no process waits until then
    if action == "stop" and problems:
        raise errors.DataError(
            "\n".join([*problems, "To train on them all the same: guard.data=warn."])
        )
    for problem in [*problems, *notes]:
        run.say(f"warning: {problem}")


def check_stream(run: RunContext, split: str, loader: DatasetLoader) -> None:
    """Check that a stream can obey the command, and is the same in all processes.

    Args:
        run: the run.
        split: label of the data set in messages.
        loader: of the data set; nothing is checked of a map-style one.

    Raises:
        ConfigError: it cannot be read twice, or the processes read different examples.
    """
    if not isinstance(loader, StreamLoader):
        return
    is_shuffled = split == "train" and run.spec.data.get("shuffle") is True
    # true is the default, too, which a stream leaves aside: _log_loading says so.
    if is_shuffled and run.invocation.overrides_key("data.shuffle"):
        raise ConfigError(
            "data.shuffle=true: the train set is a stream, which is read in its own order. Leave "
            "data.shuffle out, and shuffle in the stream (docs/own-code.md)."
        )
    if iter(loader.dataset) is iter(loader.dataset):
        raise ConfigError(
            f"data: the {split} set's stream, a {type(loader.dataset).__name__}, is the same "
            "iterator each time, and can be read once only. Have __iter__ return a new iterator."
        )
    if run.strategy.rank.world_size == 1:
        return
    digest = loader.first_digest()
    largest = run.strategy.all_reduce_max(digest)
    smallest = -run.strategy.all_reduce_max(-digest)
    if largest != smallest:
        raise ConfigError(
            f"data: the processes read different examples from the {split} set's stream. Each must "
            "read the whole of it, and the runner divides each batch: leave split_dataset_by_node "
            "and the like out, and let random numbers follow from the seed (docs/own-code.md)."
        )


def check_strategy(state: TrainState, spec: RunSpec) -> None:
    """Check that the strategy can run the settings, the optimizer and the model.

    Raises:
        ConfigError: it takes one process, or the strategy cannot shard what the model holds.
    """
    train = spec.train
    has_processes = state.strategy.rank.world_size > 1
    if has_processes and train.max_seconds is not None:
        # Each process has a clock of its own, and all must stop after the same step.
        raise ConfigError(
            f"train.max_seconds={train.max_seconds} ends a run of one process. Type "
            "train.max_steps=<steps>, or leave torchrun and strategy= out."
        )
    if has_processes and state.takes_closure:
        raise ConfigError(
            f"optimizer={type(state.optimizers[0].optimizer).__name__.lower()} evaluates the loss "
            "by itself, in one process. Type another one, or leave torchrun and strategy= out."
        )
    task = type(state.task).__name__
    if state.task.whole_batch and train.accumulate > 1:
        raise ConfigError(
            f"train.accumulate={train.accumulate}: the loss of task={task} is of the batch as a "
            f"whole (whole_batch). Type train.accumulate=1 train.batch_size="
            f"{train.accumulate * train.batch_size}; processes (strategy=ddp) share such a batch."
        )
    if state.task.whole_batch and has_processes and state.task.passes_target:
        raise ConfigError(
            f"task={task}: the model computes the loss, of a process's share, and it is of the "
            "whole batch (whole_batch). Compute it in a task, or leave torchrun and strategy= out."
        )
    if not state.strategy.shards:
        return
    optimizers = [scheduled.optimizer for scheduled in state.optimizers]
    low_bit = [type(each).__name__ for each in optimizers if hasattr(each, "wide_embeddings")]
    if low_bit:
        unsupported = f"the low-bit state of {low_bit[-1]}"
    elif state.complex_parameters:
        unsupported = "complex weights"
    elif state.sparse_gradient_parameters:
        unsupported = "sparse gradients"
    else:
        return
    raise ConfigError(
        f"strategy={state.strategy.name} cannot shard {unsupported}. Type strategy=ddp."
    )


def check_evaluation(
    run: RunContext,
    state: TrainState,
    sets: Mapping[str, DatasetLoader],
    hook: "EvaluationHook | None" = None,
) -> None:
    """Check the metrics and the quality that the config adds to the task, on one batch.

    Args:
        run: the run.
        state: its model is evaluated, which changes nothing.
        sets: loaders of the validation sets by name.
        hook: is tried in a folder that is deleted, where the quality may be one of its numbers.

    Raises:
        ConfigError: a metric fails or has a name that is taken, the hook fails, or the quality is
            not recorded.
    """
    task = run.task
    quality = task.additions.quality
    if quality is None and not task.additions.metrics:
        return
    first = next(iter(sets.values()))

    def recorded_names(metrics: Mapping[str, float] | None) -> list[str]:
        """Return the names under which the metrics of all validation sets are recorded."""
        names = [*(metrics or {})]
        for label in filter(None, sets):
            names += [name.replace("val/", f"val/{label}/", 1) for name in metrics or {}]
        return names

    try:
        with random_streams.saved_forward_state(state.plain_model, state.device):
            recorded = recorded_names(training_loop.evaluate(state, first, batches=1))
            if quality is not None and quality not in recorded and hook is not None:
                with TemporaryDirectory() as folder:
                    trial = hook.on_trial(Path(folder))
                    recorded = recorded_names(
                        training_loop.evaluate(state, first, batches=1, hook=trial)
                    )
    except (errors.ModelError, errors.HookError) as error:
        raise ConfigError(str(error)) from error
    if quality is None:
        return
    if quality not in recorded:
        raise ConfigError(
            f"task.quality={quality} is not recorded here. Type one of: {', '.join(recorded)}."
        )
    better = "more" if task.direction == "max" else "less"
    run.say(f"runs are compared by {quality}: {better} is better")


def try_batch(
    run: RunContext, state: TrainState, loader: DatasetLoader, says_layout: bool = True
) -> None:
    """Compute one forward and loss in evaluation mode, which changes nothing.

    So an error here means that model, data and task do not fit, not that the training failed.

    Args:
        run: the run.
        state: its model is called.
        loader: its first batch is taken.
        says_layout: say how a batch that is more than a tensor reaches the model.

    Raises:
        ConfigError: they do not fit; the message says what to change.
    """
    with restored_random_state():
        inputs, target = next(loader.epoch(0))
    names = {
        key: run.invocation.option_name(key, getattr(run.spec, key))
        for key in ("model", "data", "task")
    }
    model = state.plain_model
    layout = model_call.describe_call(model, inputs)
    if layout and says_layout:
        run.say(layout)
    outputs: list[Any] = []
    try:
        with _trial(run, state), watched_casts(run, state), checked_losses(run.task):
            # Without further outputs, which are not the batch's.
            with model.register_forward_hook(lambda *call: outputs.append(call[-1])):
                loss = loss_of(state, inputs, target)
            if outputs and isinstance(loss, Tensor):
                check_totals(state, outputs[-1], target)
            if outputs and says_layout:
                for line in packing_lines(state, inputs, outputs[-1]):
                    run.say(line)
    except RunnerError:
        raise  # its message says already what to change
    except Exception as error:
        if is_out_of_memory(error):
            raise  # MemoryWatch explains it
        # Explanations are imported where there is something to explain.
        from runner.modes.batch_rules import explain_batch_error
        from runner.modes.error_rules import Failure

        def call() -> None:
            with _trial(run, state):
                loss_of(state, inputs, target)

        # One process alone would wait for the others in a collective.
        again = call if run.strategy.rank.world_size == 1 else None
        batch = (inputs, target, outputs)
        cause = Failure(error, model, run.precision, run.task, names, *batch, again)
        raise ConfigError(f"{explain_batch_error(cause)} {run.save_traceback()}") from error
    if not (isinstance(loss, Tensor) and loss.numel() == 1):
        from runner.modes.batch_rules import explain_loss

        raise ConfigError(explain_loss(loss, names["task"]))
    if outputs and says_layout:
        with _trial(run, state):
            for line in output_lines(run, state, (inputs, target), outputs[-1]):
                run.say(line)


@contextmanager
def _trial(run: RunContext, state: TrainState) -> Iterator[None]:
    """Return a context in which the model is evaluated, and which leaves it as it was."""
    with (
        saved_state(state),
        torch.no_grad(),
        training_loop.evaluation_mode(state),
        run.precision.eval_context(state.plain_model),
    ):
        yield


@contextmanager
def watched_casts(run: RunContext, state: TrainState) -> Iterator[None]:
    """Return a context around a forward, after which weights that change within one are cast at
    each use; see CastCacheWatch."""
    with CastCacheWatch(state.plain_model) as watch:
        yield
    if watch.rewritten and state.plan.caches_casts:
        state.cast_at_each_use()
        run.say(
            f"the forward changes {fmt.first_names([*watch.rewritten], 4)} between two uses: "
            "autocast "
            "casts weights at each use, without its cache"
        )


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
    when = "evaluated once, at the end, with the last weights; " if run.spec.trains else ""
    yield f"test sets: {sizes}; {when}metrics test/..."


def _count(dataset: Any) -> str:
    """Return the number of examples of a data set, or that it is a stream."""
    return "stream" if is_stream(dataset) else str(len(dataset))


def _log_loading(run: RunContext, loader: DatasetLoader) -> None:
    """Say what data.sampler changes, and train.num_workers for data in memory.

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
    options = loader.options
    if options.sampler:
        run.say(
            f"data.sampler={options.sampler.name}: an epoch has {loader.epoch_examples} examples, "
            f"drawn from {loader.examples}"
        )
    if options.workers and not loader.uses_workers:
        run.say(f"train.num_workers={options.workers} starts no process: the data are in memory")


def describe_model(run: RunContext, built: BuiltModel) -> dict[str, Any]:
    """Report the built model on the console and in the store; return its fields of RunResult."""
    params = list(built.model.parameters())
    every = sum(map(tensor_facts.count_elements, params))
    trainable = sum(tensor_facts.count_elements(p) for p in params if p.requires_grad)
    weights_mib = tensor_facts.stored_bytes(built.model) / tensor_facts.MIB
    plain_mib = built.plain_bytes / tensor_facts.MIB
    size = f"{weights_mib:.1f} MiB"
    if weights_mib < plain_mib:
        size += f" (in float32 {plain_mib:.1f})"
    run.say(f"{run.label} on {run.device_name}: {every:,} parameters, {size}")
    initial = built.initial
    if initial is not None:
        run.say(initial.describe())
        weights = len(initial.loaded) + len(initial.fresh)
        run.tracker.tags({"init_weights": f"{len(initial.loaded)}/{weights}"})
        run.save_json("init_weights.json", initial._asdict())
        _warn_of_frozen_fresh(run, built.model, initial)
    slow = slow_warning(run.precision, built.model, run.accelerator.name, run.spec)
    for line in filter(None, [*built.report.lines(), slow]):
        run.say(line)
    tags = built.report.tags()
    kernels = run.precision.kernels(built.model, run.device)
    if kernels:
        tags["cpu_float16"] = kernels
    if run.precision.emulated:
        tags["emulated"] = "true"
    rounding = fused_rounding(run.spec)
    if rounding:
        tags["fused_rounding"] = rounding
        run.say(_ROUNDING_LINES[rounding])
    trains = run.spec.trains
    if trains and run.spec.train.freeze:
        run.say(describe_frozen(built.model))
    # Only a training says it: in an evaluation nothing trains anyway.
    if trains and trainable < every:
        tags["trainable"] = f"{trainable}/{every}"
        print_trainable(run, trainable, every, built.plan.bypassed)
    run.tracker.tags(tags)
    run.save_json("conversion.json", built.report.to_list())
    # Step 0: before anything trains.
    run.tracker.log_metrics([(0, fmt.now_ms(), {"memory/weights_mib": weights_mib})])
    return {
        "weights_mib": weights_mib,
        "plain_weights_mib": plain_mib,
        "converted": tags.get("converted", ""),
        "converted_weights": tags.get("converted_weights", ""),
        "fused_rounding": rounding,
        "kernels": kernels,
        "trains": trainable / every if every and trains else None,
    }


def _warn_of_frozen_fresh(run: RunContext, model: nn.Module, initial: "InitialWeights") -> None:
    """Warn where an adapter freezes weights that init.skip left at random values."""
    if not run.spec.trains or not run.spec.adapter.get("_target_"):
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
        describe_hooks(gradient_hooks(state.plain_model)) if state.scale.value is not None else "",
        describe_groups(state.optimizers),
        describe_schedule(schedule, steps, task.quality, task.direction),
        state.evaluated.describe() if state.evaluated is not None else "",
        *describe_state_dtypes(run.spec.optimizer, state.optimizers),
        state.strategy.describe(),
    ]
    for line in filter(None, lines):
        run.say(line)


def print_trainable(
    run: RunContext, trainable: int, every: int, bypassed: Mapping[str, str]
) -> None:
    """Print how many parameters train, and warn of frozen weights that are probably a mistake.

    Args:
        run: the run.
        trainable: elements of the parameters that train.
        every: elements of all parameters.
        bypassed: modules that the conversion and the adapter leave as they are, and why.
    """
    run.say(
        f"{trainable:,} of {every:,} parameters train ({fmt.format_percent(trainable / every)})"
    )
    has_adapter = bool(run.spec.adapter.get("_target_"))
    if has_adapter and bypassed:
        reason = next(iter(bypassed.values()))
        run.say(f"the adapter leaves {fmt.first_names([*bypassed], 4)} out: {reason}")
    random = starts_random(run.spec.model) and run.spec.init.weights is None
    start = " init.weights=<checkpoint>" if random else ""
    if not has_adapter and run.precision.freezes:
        run.say(
            f"warning: precision={run.precision.name} freezes the weights that it quantises. "
            f"Type adapter=lora{start}, or precision=bnb-int8-training to train them all."
        )
    elif has_adapter and random:
        run.say(
            "warning: the frozen weights are random ones, for the model loads none. "
            "Type init.weights=<checkpoint> to tune a trained model."
        )
