"""run(spec, out): the only orchestration, readable top to bottom."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from runner.checkpoint import checkpoint_file
from runner.config import trusted_targets
from runner.config.invocation import Invocation
from runner.config.resolve import flatten, resolve, to_dict
from runner.config.schema import RunSpec
from runner.config.schema_advise import LONE_ADVICE
from runner.config.targets import build_group, check_targets
from runner.diagnostics import saved_batch
from runner.diagnostics.memory.out_of_memory import explain_out_of_memory
from runner.diagnostics.numerics.callback import check_numerics
from runner.distributed import torchrun
from runner.distributed.strategy import Strategy
from runner.modes import artifacts, notes, resume
from runner.modes.context import RunContext, process_folder
from runner.modes.evaluate import evaluate_checkpoint
from runner.modes.plan import plan
from runner.modes.replay import replay
from runner.modes.result import RunResult, print_result
from runner.modes.rewind import with_run_config
from runner.modes.train import train
from runner.precision.precision import Precision
from runner.tracking import journal
from runner.tracking.rank_journal import ProcessJournal
from runner.tracking.tracker import RunInfo, Status, Tracker
from runner.tracking.upload_state import stored_run_id
from runner.training.optimizers import check_arguments
from runner.training.tasks.task import Task
from runner.utils.accelerator import Accelerator, choose_accelerator
from runner.utils.console import plain_console
from runner.utils.errors import CheckpointError, ConfigError, RunnerError, TrackingError
from runner.utils.files import os_error_reason, write_json
from runner.utils.folder_lock import folder_lock
from runner.utils.formatting import relative_path
from runner.utils.layout import CONFIG, RESULT
from runner.utils.reproducibility import process_state
from runner.utils.secrets import redact
from runner.utils.stop_signals import Stopped, StopSignals


def run(
    spec: RunSpec, out: Path, origin: Invocation | None = None, console: Console | None = None
) -> RunResult:
    """Train, evaluate or plan one spec.

    Args:
        spec: resolved.
        out: the run's folder; created.
        origin: labels and overrides of the config.
        console: where progress and the summary go.

    Raises:
        ConfigError: the config cannot run; it names every problem found.
        Unavailable: this machine lacks what the precision or accelerator needs.
        Stopped: by a signal, after a checkpoint.
    """
    strategy: Strategy = build_group("strategy", spec.strategy)
    with strategy.session():
        return _run(spec, out, origin or Invocation(), console or plain_console(), strategy)


def _run(
    spec: RunSpec, out: Path, origin: Invocation, console: Console, strategy: Strategy
) -> RunResult:
    resumed, place = None, strategy.place
    if not place.is_main:
        console = Console(file=io.StringIO())
    if was := _begin(spec, origin, out, console, strategy):
        out, resumed, spec, origin = was
    if spec.mode == "advise":
        raise ConfigError(LONE_ADVICE)
    problems = [*spec.problems()]
    if spec.mode == "evaluate" and not problems:
        spec, origin = _with_checkpoint(spec, origin)
    if problems := [*problems, *check_targets(spec)]:
        raise ConfigError(*problems)
    torchrun.publish_run_folder(out)
    out = process_folder(out, place)
    out.mkdir(parents=True, exist_ok=True)
    with StopSignals() as signals, folder_lock(out), process_state():
        with signals.at_once():
            this = _made(spec, out, origin, console, strategy, signals)
            this.resumed = resumed
            if this.spec.mode in ("plan", "replay"):
                return _untracked(this)
        with _tracked(this), explain_out_of_memory(this):
            result = (train if spec.mode == "train" else evaluate_checkpoint)(this)
            signals.check()
            with suppress(OSError):  # it is written once more when the record of the end has room
                this.tracker.artifact(result.write(out))
            this.note(notes.finished_note(origin.command, result, this.report))
    tracker = this.tracker
    result = replace(
        result,
        run_id=tracker.run_id,
        experiment_id=tracker.experiment_id,
        dashboard=tracker.dashboard,
    )
    print_result(console, result)
    _afterwards(this, result)
    return result


def _made(
    spec: RunSpec,
    out: Path,
    origin: Invocation,
    console: Console,
    strategy: Strategy,
    signals: StopSignals,
) -> RunContext:
    """The parts of a run, before any of its data or its model.

    Raises:
        ConfigError, Unavailable: as `run`.
    """
    accelerator = Accelerator(
        strategy.device(choose_accelerator(spec.accelerator.name, spec.accelerator.index).device)
    )
    if spec.mode == "replay":
        spec, origin = with_run_config(
            spec, origin, saved_batch.read_saved_batch(Path(spec.batch or ""))
        )
    precision: Precision = build_group("precision", spec.precision)
    precision.require(accelerator.device)
    precision.require_strategy(strategy)
    check_numerics(spec, strategy)
    task: Task = build_group("task", spec.task)
    check_arguments(spec)
    tracker: Tracker = build_group("tracking", spec.tracking)
    if not strategy.place.is_main:
        tracker = ProcessJournal()
    return RunContext(
        spec, origin, out, console, accelerator, precision, task, tracker, signals, strategy
    )


def _begin(
    spec: RunSpec, origin: Invocation, out: Path, console: Console, strategy: Strategy
) -> resume.ResumePlan | None:
    """What there is to go on with, as the first process finds it."""
    if strategy.place.world_size == 1:
        return resume.plan_resume(spec, origin, out, console)
    was = resume.plan_resume(spec, origin, out, console) if strategy.place.is_main else None
    path = strategy.broadcast_object(was and str(was.saved.path))
    if strategy.place.is_main or path is None:
        return was
    return resume.plan_resume(
        replace(spec, checkpoint=replace(spec.checkpoint, resume=path)), origin, out, console
    )


def _untracked(this: RunContext) -> RunResult:
    """mode=plan and mode=replay, which record nothing in the store."""
    spec, world = this.spec, this.strategy.place.world_size
    if world > 1:
        raise ConfigError(
            f"mode={spec.mode} works in one process, and torchrun started {world}. Leave torchrun "
            "and strategy= out."
        )
    work = plan if spec.mode == "plan" else partial(replay, task=this.task)
    parts = spec, this.out, this.origin, this.precision, this.accelerator
    result = work(*parts, console=this.console)
    result.write(this.out)
    return result


def _afterwards(this: RunContext, result: RunResult) -> None:
    """A stop that came while the end of the run waited for its store ends the command, and a result
    or a record that was refused is no success; a sweep sees to its own records."""
    try:
        _write_result(this, result)
        this.signals.check()
        if this.origin.sweep is None:
            this.tracker.check()
    except RunnerError as error:
        error.finished = True
        raise


def _write_result(this: RunContext, result: RunResult) -> None:
    try:
        result.write(this.out)
    except OSError as error:
        path = relative_path(this.out / RESULT)
        text = f"{path} was not written: {os_error_reason(error)}. The result is above."
        raise CheckpointError(text) from error


def _begin_folder(this: RunContext) -> None:
    """What the run is, before anything is computed or recorded.

    Raises:
        ConfigError: the folder takes no files.
    """
    environment = artifacts.environment_facts(this.origin)
    try:
        artifacts.write_config(this.out, this.spec, this.origin.own)
        write_json(this.out / artifacts.ENVIRONMENT, environment)
    except OSError as error:
        raise ConfigError(
            f"{relative_path(this.out)} takes no files: {os_error_reason(error)}. Make room, or "
            "type hydra.run.dir=<folder> (in a sweep hydra.sweep.dir=<folder>)."
        ) from error


@contextmanager
def _tracked(this: RunContext) -> Iterator[None]:
    """The run in the tracking store, whose status says what really happened."""
    tracker = this.tracker
    if this.origin.sweep is None:
        with this.signals.at_once():
            tracker.check_sweep()
    _begin_folder(this)
    tracker.open(_info(this))
    try:
        this.note(notes.running_note(this.origin.command))
        tracker.artifact(this.out / CONFIG)
        tracker.artifact(this.out / artifacts.ENVIRONMENT)
        yield
    except (Stopped, KeyboardInterrupt) as error:
        _close(this, "KILLED", str(error) or "Interrupted.")
        raise
    except BaseException as error:
        _close(this, "FAILED", redact(f"{type(error).__name__}: {error}"))
        raise
    tracker.close("FINISHED", stopped=this.signals.requested)


def _close(this: RunContext, status: Status, error: str) -> None:
    with suppress(TrackingError):  # what ended the run must not be hidden by its record
        this.note(notes.failed_note(this.origin.command, status, error))
    this.tracker.close(status, error, this.signals.requested)


def _info(this: RunContext) -> RunInfo:
    spec, origin = this.spec, this.origin
    model, data = origin.option_name("model", spec.model), origin.option_name("data", spec.data)
    tags = {
        "precision": this.precision.name,
        "model": model,
        "data": data,
        "accelerator": this.accelerator.kind,
        "device_name": this.device_name,
        "output_dir": str(this.out.absolute()),
        "mode": spec.mode,
        **(
            {"strategy": this.strategy.name, "processes": str(this.strategy.place.world_size)}
            if this.strategy.place.world_size > 1
            else {}
        ),
        **artifacts.git_tags(Path.cwd()),
    }
    info = RunInfo(this.out, flatten(spec), tags, name=this.label, sweep=origin.sweep)
    before = journal.latest_journal(this.out)
    if (saved := this.resumed) is None:
        old = stored_run_id(before) if before and spec.checkpoint.resume else None
        return replace(info, tags=tags | {"supersedes": old}) if old else info
    return replace(
        info,
        continues=before,
        step=saved.content["step"],
        changes=resume.changed_settings(spec, saved),
    )


def _with_checkpoint(spec: RunSpec, origin: Invocation) -> tuple[RunSpec, Invocation]:
    """The spec with the checkpoint's own model, data, task and precision where the user gave none,
    and the names that they had there."""
    assert spec.checkpoint.path is not None
    path = checkpoint_file.find_checkpoint(spec.checkpoint.path, spec.tracking.get("uri"))
    saved = checkpoint_file.load(path)
    if origin.overrides_key("adapter"):
        raise ConfigError(
            "mode=evaluate takes the adapter from the checkpoint, and merges it where the "
            "precision packs weights otherwise. Leave adapter= out."
        )
    groups = ("model", "adapter", "data", "task", "precision")
    own = [key for key in groups if not origin.overrides_key(key)]
    choices = {**origin.choices, **{key: saved["choices"].get(key, "") for key in own}}
    signed = checkpoint_file.is_own(saved)
    trusted_targets.check_trusted(saved["spec"], own, to_dict(spec), path, "checkpoint", signed)
    nodes = {key: saved["spec"].get(key, {}) for key in own}
    if origin.composed is not None:  # what was typed reads the checkpoint's values
        spec = resolve(OmegaConf.create({**origin.composed, **nodes}))
    spec = replace(spec, checkpoint=replace(spec.checkpoint, path=str(path)), **nodes)
    if problems := check_targets(spec):
        raise ConfigError(*problems)
    return spec, replace(origin, choices=choices, own=signed and origin.own)
