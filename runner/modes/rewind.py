"""Rebuild a run's state right before a step by training it again from its last checkpoint.

Training is bit-exact, from the seed as from a checkpoint, so the state is the original one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from rich.console import Console

from runner.checkpoint import checkpoint_file
from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.checkpoint.locate import checkpoints_of_run
from runner.config.invocation import Invocation
from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.data.batch_layout import Batch
from runner.data.build import RunLoaders, build_data, build_run_loaders
from runner.data.stream_loader import BatchLoader
from runner.data.task_target import build_task
from runner.diagnostics.saved_batch import SavedBatch
from runner.modes.saved_run import RUN_KEYS, check_run, folder_config, merge
from runner.modes.trial_forward import build_proven_model
from runner.precision.contract import Precision
from runner.precision.conversion import ConversionReport
from runner.training import state_dict
from runner.training.compile import check_compile_options, prepare_model
from runner.training.evaluation import evaluate_validation
from runner.training.evaluation_hook import EvaluationHook, HookOutput
from runner.training.loop import accumulation_batches, is_evaluation_step, total_steps
from runner.training.setup import TrainingSetup, build_state, model_builder
from runner.training.state import TrainState, saved_state
from runner.training.step import train_step
from runner.training.tasks.task import Task
from runner.utils.errors import ConfigError
from runner.utils.reproducibility import make_deterministic, seed_all


def run_folder_of_batch(batch: Path) -> Path:
    """Return the folder of the run whose guard saved a batch, as `guard/batch-<step>.json`."""
    return batch.absolute().parent.parent


def run_of_batch(spec: RunSpec, origin: Invocation) -> RunSpec | None:
    """Return the spec of the run whose guard saved the batch; None where its config is gone.

    Args:
        spec: of the replay; its batch names the file in the run's folder.
        origin: what was typed.

    Raises:
        ConfigError: the run's config is damaged, or names code that is not trusted.
    """
    config = folder_config(run_folder_of_batch(Path(spec.batch or "")), "batch")
    return config and replace(check_run(config, spec, origin), batch=spec.batch)


def with_run_config(
    spec: RunSpec, origin: Invocation, saved: SavedBatch
) -> tuple[RunSpec, Invocation]:
    """Return the spec of a replay, with its run's values where none was typed.

    Args:
        spec: of the replay; its batch names the file in the run's folder.
        origin: what was typed.
        saved: the batch.

    Returns:
        The spec, and the invocation with the names of the run's options.

    Raises:
        ConfigError: the run's config is damaged, or names code that is not trusted.
    """
    config = folder_config(run_folder_of_batch(Path(spec.batch or "")), "batch")
    if config is None:
        return spec, origin
    untyped = [key for key in RUN_KEYS if not origin.overrides_key(key)]
    choices = {key: name for key, name in saved.names.items() if key in untyped}
    origin = replace(origin, choices={**origin.choices, **choices})
    return merge(config, spec, origin, untyped), origin


def checkpoint_before_step(folder: Path, saved: SavedBatch) -> LoadedCheckpoint | None:
    """Return the newest checkpoint before the step; None where the run starts from its seed.

    Raises:
        ConfigError: the run was resumed, and no checkpoint from there to the step exists.
    """
    # Newest first: the fewer steps are trained again, the sooner the replay begins.
    for path in reversed(checkpoints_of_run(folder)):
        with suppress(ConfigError):  # damaged: an earlier one costs more steps, no exactness
            checkpoint = LoadedCheckpoint(path, checkpoint_file.load(path))
            # One from before the resume was trained with other settings.
            if saved.begun <= checkpoint.content["step"] < saved.steps[0]:
                return checkpoint
    if saved.begun:
        raise ConfigError(
            f"The run was resumed at step {saved.begun}, and no checkpoint from there to step "
            f"{saved.steps[0]} is left. Type init.weights=<a checkpoint from shortly before>."
        )
    return None


@contextmanager
def rewind_to_step(
    spec: RunSpec, saved: SavedBatch, device: torch.device, console: Console
) -> Iterator[tuple[TrainState, list[Batch], str]]:
    """Return a context that yields the state right before a step.

    Args:
        spec: the run's own; its batch names the run's folder.
        saved: the batch that its guard saved.
        device: where it trains.
        console: prints how many steps are trained again.

    Yields:
        The state in training mode, the step's micro-batches, and words for where the weights come
        from.
    """
    start = checkpoint_before_step(run_folder_of_batch(Path(spec.batch or "")), saved)
    say = partial(console.print, markup=False, soft_wrap=True)
    origin = f"{start.path}" if start else "the beginning"
    for reached in states_before(spec, saved.steps[:1], start, device, say):
        with reached.state.precision.session(reached.state.plain_model, device):
            yield reached.state, reached.micros, f"those before the step, trained from {origin}"


def _describe_rewind(start: LoadedCheckpoint | None, step: int) -> str:
    """Return in words how many steps are trained again before a step."""
    origin = f"{start.path}" if start else "the beginning"
    first = start.content["step"] if start else 0
    return f"trains {step - 1 - first} steps again, from {origin}"


class ReachedStep(NamedTuple):
    """A run right before a step.

    Attributes:
        step: its number, from 1.
        state: in training mode; it trains on where the next step is asked for.
        micros: micro-batches of the step.
        report: what the precision converted.
    """

    step: int
    state: TrainState
    micros: list[Batch]
    report: ConversionReport


def states_before(
    spec: RunSpec,
    steps: Sequence[int],
    start: LoadedCheckpoint | None,
    device: torch.device,
    say: Callable[[str], None],
    compiles: bool = False,
) -> Iterator[ReachedStep]:
    """Train a run once more, and yield it right before each of the steps.

    The caller may compute with the state; the run does not see it.

    Args:
        spec: the run's own.
        steps: from 1, in rising order.
        start: a checkpoint before the first of them; None for the run's beginning.
        device: where it trains.
        say: prints how many steps are trained.
        compiles: whether the model is compiled as spec.train has it.

    Raises:
        ConfigError: the run has fewer steps.
    """
    rebuilt = _rebuild(spec, steps[-1], start, device, compiles)
    if steps[-1] > 1:
        say(_describe_rewind(start, steps[-1]))
    state, loader = rebuilt.state, rebuilt.loaders.train
    for micros, _ in accumulation_batches(state, loader, spec.train.accumulate):
        step = state.step + 1
        if step in steps:
            restore = saved_state(state)
            state.model.train()
            # Outside the session: the caller may compute in another precision.
            yield ReachedStep(step, state, micros, rebuilt.report)
            restore()
        if step == steps[-1]:
            return
        with state.precision.session(state.plain_model, device):
            state.model.train()
            train_step(state, micros)
            if is_evaluation_step(spec.train, loader, state.step):
                # Its data may draw random numbers, and a schedule may follow its quality.
                _evaluate(state, rebuilt.loaders.validation)


class _Rebuilt(NamedTuple):
    """A run that can train again: its state, its data, and what its precision converted."""

    state: TrainState
    loaders: RunLoaders
    report: ConversionReport


def _rebuild(
    spec: RunSpec,
    last: int,
    start: LoadedCheckpoint | None,
    device: torch.device,
    compiles: bool,
) -> _Rebuilt:
    """Build a run by the same calls in the same order as mode=train, or the bits would differ.

    Args:
        last: the last step that is wanted.
        spec, start, device, compiles: as in `states_before`.
    """
    precision: Precision = build_group("precision", spec.precision)
    precision.require(device)
    task: Task = build_task(spec.task)
    if spec.deterministic:
        make_deterministic()
    # Seeded twice, as mode=train does: whatever random numbers the data draws, the model's weights
    # are those of the seed.
    seed_all(spec.seed)
    loaders = build_run_loaders(spec, build_data(spec), device, task=task)
    planned = total_steps(spec.train, loaders.train)
    if last > planned:
        raise ConfigError(
            f"There is no step {last}: this training has {planned} steps. Type diff.steps= up to "
            f"{planned}."
        )
    seed_all(spec.seed)
    make = model_builder(spec, precision, device, start)
    built = build_proven_model(
        make, precision, device, spec.seed, lambda: next(loaders.val.epoch(0))[0]
    )
    with precision.session(built.model, device):
        # A precision that cannot train has no optimizers, and its first step can be looked at.
        is_trained = start is not None or last > 1
        setup = TrainingSetup(spec, precision, task, device)
        state = build_state(setup, built.model, planned if is_trained else None)
        if compiles:
            check_compile_options(spec, precision, device, built.model)
            prepare_model(spec, precision, device, built.model)
        if start is not None:
            state_dict.restore(state, start, spec, [])
    return _Rebuilt(state, loaders, built.report)


def _evaluate(state: TrainState, validation: Mapping[str, BatchLoader]) -> None:
    """Evaluate as the run did, its hook included, whose files are deleted."""
    with TemporaryDirectory() as folder:
        if state.task.additions.hook is not None:
            output = HookOutput(Path(folder), lambda path, name: None, lambda: "")
            state.set_evaluation_hook(EvaluationHook(state, output))
        metrics = evaluate_validation(state, validation)
    if metrics is not None:
        state.record_evaluation(metrics)
