"""Check data sets, strategy and first batch before anything trains or is evaluated.

Errors that the training loop raises later are explained by training_errors.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from runner.config.schema import TrainSpec
from runner.data.stream_loader import BatchLoader, StreamLoader
from runner.diagnostics.data_checks import data_problems
from runner.diagnostics.memory.out_of_memory import is_out_of_memory
from runner.modes import batch_rules
from runner.modes.context import RunContext
from runner.modes.error_rules import Failure
from runner.modes.training_errors import explain_dead_workers
from runner.training.evaluation import evaluate, evaluation_mode
from runner.training.evaluation_hook import EvaluationHook
from runner.training.model_call import describe_call
from runner.training.state import TrainState
from runner.training.step import loss_of
from runner.utils.errors import ConfigError, DataError, HookError, ModelError, RunnerError
from runner.utils.reproducibility import host_rng_state, set_host_rng_state


def check_data(run: RunContext, loaders: Mapping[str, BatchLoader]) -> None:
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
    classes = (run.spec.data.get("meta") or {}).get("classes")
    for label, loader in loaders.items():
        with explain_dead_workers(run, label):
            problems += data_problems(loader, label, run.task, classes)
        if label.startswith("test"):
            loader.close()  # it is read again after the last step: no process waits until then
    if action == "stop" and problems:
        raise DataError("\n".join([*problems, "To train on them all the same: guard.data=warn."]))
    for problem in problems:
        run.say(f"warning: {problem}")


def check_stream(run: RunContext, split: str, loader: BatchLoader) -> None:
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
    # true is the default, too, which a stream leaves aside: log_loading says so.
    if is_shuffled and run.origin.overrides_key("data.shuffle"):
        raise ConfigError(
            "data.shuffle=true: the train set is a stream, which is read in its own order. Leave "
            "data.shuffle out, and shuffle in the stream (docs/own-code.md)."
        )
    if iter(loader.dataset) is iter(loader.dataset):
        raise ConfigError(
            f"data: the {split} set's stream, a {type(loader.dataset).__name__}, is the same "
            "iterator each time, and can be read once only. Have its __iter__ return a new "
            "iterator over all examples (docs/own-code.md)."
        )
    if run.strategy.place.world_size == 1:
        return
    digest = loader.first_digest()
    largest = run.strategy.all_reduce_max(digest)
    smallest = -run.strategy.all_reduce_max(-digest)
    if largest != smallest:
        raise ConfigError(
            f"data: the processes read different examples from the {split} set's stream. Each must "
            "read the whole stream, and the runner divides each batch: leave "
            "split_dataset_by_node and the like out, and let random numbers follow from the seed "
            "(docs/own-code.md)."
        )


def check_strategy(state: TrainState, train: TrainSpec) -> None:
    """Check that the strategy can run the settings, the optimizer and the model.

    Raises:
        ConfigError: it takes one process, or the strategy cannot shard what the model holds.
    """
    has_processes = state.strategy.place.world_size > 1
    if has_processes and train.max_seconds is not None:
        # Each process has a clock of its own, and all must stop after the same step.
        raise ConfigError(
            f"train.max_seconds={train.max_seconds} ends a run of one process. Type "
            "train.max_steps=<steps>, or leave torchrun and strategy= out."
        )
    if has_processes and state.takes_closure:
        raise ConfigError(
            "optimizer=lbfgs searches along a line by itself, in one process only. Type another "
            "optimizer, or leave torchrun and strategy= out."
        )
    if not state.strategy.shards:
        return
    unsupported = _unshardable_part(state)
    if unsupported:
        name = state.strategy.name
        raise ConfigError(f"strategy={name} cannot shard {unsupported}. Type strategy=ddp.")


def _unshardable_part(state: TrainState) -> str:
    """Return what of a model or an optimizer no strategy can shard; empty for nothing."""
    for scheduled in state.optimizers:
        if hasattr(scheduled.optimizer, "wide_embeddings"):
            return f"the low-bit state of {type(scheduled.optimizer).__name__}"
    if state.complex_parameters:
        return "complex weights"
    return "sparse gradients" if state.sparse_gradient_parameters else ""


def check_evaluation(
    run: RunContext,
    state: TrainState,
    sets: Mapping[str, BatchLoader],
    hook: EvaluationHook | None = None,
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
    if quality is None and task.added_metrics is None:
        return
    drawn = host_rng_state()
    first = next(iter(sets.values()))
    try:
        metrics = evaluate(state, first, batches=1) or {}
        names = [*metrics]
        if quality is not None and quality not in _all_names(names, sets) and hook is not None:
            with TemporaryDirectory() as folder:
                tried = evaluate(state, first, batches=1, hook=hook.on_trial(Path(folder)))
            names = [*(tried or {})]
    except (ModelError, HookError) as error:
        raise ConfigError(str(error)) from error
    finally:
        set_host_rng_state(drawn)
    recorded = _all_names(names, sets)
    if quality is not None and quality not in recorded:
        raise ConfigError(
            f"task.quality={quality} is not recorded here. Type task.quality=<name>, one of: "
            f"{', '.join(recorded)}."
        )
    if quality is not None:
        better = "more" if task.direction == "max" else "less"
        run.say(f"runs are compared by {quality}: {better} is better")


def _all_names(names: Sequence[str], sets: Mapping[str, BatchLoader]) -> list[str]:
    """Return the names under which the metrics of all validation sets are recorded."""
    found = list(names)
    for label in sets:
        if label:
            found += [name.replace("val/", f"val/{label}/", 1) for name in names]
    return found


def try_batch(
    run: RunContext, state: TrainState, loader: BatchLoader, says_layout: bool = True
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
    inputs, target = next(loader.epoch(0))
    names = {
        key: run.origin.option_name(key, getattr(run.spec, key))
        for key in ("model", "data", "task")
    }
    names["precision"] = run.precision.name
    layout = describe_call(state.plain_model, inputs)
    if layout and says_layout:
        run.say(layout)
    with batch_rules.outputs_of(state.plain_model) as outputs:
        try:
            with (
                torch.no_grad(),
                evaluation_mode(state.model, state.task, state.device),
                run.precision.eval_context(state.plain_model),
            ):
                loss = loss_of(state, inputs, target)
        except RunnerError:
            raise  # its message says already what to change
        except Exception as error:
            if is_out_of_memory(error):
                raise  # MemoryWatch explains it
            failure = Failure(
                error, state.plain_model, run.precision, run.task, names, inputs, target, outputs
            )
            raise ConfigError(
                f"{batch_rules.explain_batch_error(failure)} {run.save_traceback()}"
            ) from error
    problem = batch_rules.loss_problem(loss, names["task"])
    if problem:
        raise ConfigError(problem)
    taken = state.task.describe_output(outputs[-1]) if outputs else ""
    if taken and says_layout:
        run.say(taken)
