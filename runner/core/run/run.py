"""Run one spec, from its folder and its parts to its result.

`run_spec` reads top to bottom: resume, check the spec, build the parts, open the record, hand over
to the mode, close the record, show and write the result. A mode's module is imported when a spec
names the mode.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runner.core.base import torchrun
from runner.core.base.accelerators import Accelerator, choose_accelerator
from runner.core.base.errors import CheckpointError, ConfigError, RunnerError, TrackingError, refuse
from runner.core.base.files import check_links, folder_lock, os_error_reason, unreadable, write_json
from runner.core.base.fmt import relative_path
from runner.core.base.layout import CONFIG, ENVIRONMENT, RESULT
from runner.core.base.random_streams import process_state
from runner.core.base.secrets import redact
from runner.core.base.stop_signals import Stopped, StopSignals
from runner.core.config.invocation import Invocation
from runner.core.config.room import Mode, Room
from runner.core.config.schema import RunSpec
from runner.core.config.targets import build_group
from runner.core.loop.strategy import Strategy
from runner.core.policy.sessions import one_run
from runner.core.record import journals as journal
from runner.core.record.checkpoint_file import LoadedCheckpoint, rename_superseded
from runner.core.record.journals import Status
from runner.core.record.tracker import Console, ProcessJournal, RunInfo, SilentConsole, Tracker
from runner.core.run import run_context
from runner.core.run.run_context import PlannedRun, RunContext, process_folder
from runner.core.run.run_result import RunPage, RunResult


def run_spec(
    spec: RunSpec,
    out: Path,
    invocation: Invocation | None = None,
    console: Console | None = None,
    show: Callable[[RunResult], None] = lambda result: None,
) -> RunResult:
    """Run one spec in its mode.

    Args:
        spec: what to run.
        out: the run's folder; it is created.
        invocation: what was typed, and how the run is labelled.
        console: where progress is printed; None prints nothing.
        show: prints the result, also where the store then turns out to have refused the run.

    Raises:
        ConfigError: the config cannot run; the message names every problem found.
        Unavailable: this machine lacks what the precision or the accelerator needs.
        Stopped: a signal ended the run, after a checkpoint.
    """
    strategy: Strategy = build_group("strategy", spec.strategy)
    console = console or SilentConsole()
    # Around everything: the processes must agree from the choice of the folder on.
    with one_run(partial(console.print, markup=False, soft_wrap=True)), strategy.session():
        invocation = invocation or Invocation()
        result, context = _run(spec, out, invocation, console, strategy)
        if context.mode.is_recorded:
            if strategy.rank.is_main:
                show(result)
            _check_end(context, result)
        return result


def _run(
    spec: RunSpec, out: Path, invocation: Invocation, console: Console, strategy: Strategy
) -> tuple[RunResult, RunContext]:
    rank = strategy.rank
    if not rank.is_main:
        console = SilentConsole()  # the first process prints for all
    say = partial(console.print, markup=False, soft_wrap=True)
    plan = PlannedRun(out, None, spec, invocation)
    try:
        plan = _complete_plan(plan, say, strategy)
    except PermissionError as error:
        raise unreadable(error) from error
    # After the resume has chosen the folder: a restarted process continues in the same one.
    torchrun.publish(torchrun.RESUME_KEY, plan.folder)
    check_links(plan.folder)
    out = process_folder(plan.folder, rank)
    out.mkdir(parents=True, exist_ok=True)
    with StopSignals() as signals, folder_lock(out), process_state():
        # Nothing is computed yet, so a signal ends the set-up at once.
        with signals.interruptible():
            context = _build_context(plan, out, console, strategy, signals)
            if rank.world_size > 1 and not context.mode.takes_processes:
                raise ConfigError(
                    f"mode={context.mode.name} works in one process, not {rank.world_size}: leave "
                    "torchrun out."
                )
            if not context.mode.is_recorded:
                with context.explain_errors():
                    context.mode.run(context, plan.saved)
                result = RunResult(
                    precision=context.precision.name,
                    label=context.label,
                    folder=str(out),
                    device=context.accelerator.name,
                )
                result.write(out)
                return result, context
        result = _run_tracked(context, plan)
    return result.with_store_ids(context.tracker), context


def _complete_plan(plan: PlannedRun, say: Callable[[str], None], strategy: Strategy) -> PlannedRun:
    """Return what to run, as its mode completes it: with the checkpoint that it continues.

    Raises:
        ConfigError: with every problem of the config.
    """
    # A plan is made of keys that fit its mode. All problems are collected, so that one message
    # names every one of them.
    if [*plan.spec.mode_problems()]:
        refuse(plan.spec.all_problems())
    plan = Mode.named(plan.spec.mode).plan(plan, say, strategy)
    refuse(plan.spec.all_problems())
    return plan


def _build_context(
    plan: PlannedRun, out: Path, console: Console, strategy: Strategy, signals: StopSignals
) -> RunContext:
    """Build the parts of a run that need neither its data nor its model.

    Raises:
        ConfigError, Unavailable: as `run`.
    """
    spec, invocation = plan.spec, plan.invocation
    chosen = choose_accelerator(spec.accelerator.name, spec.accelerator.index)
    accelerator = Accelerator(strategy.device(chosen.device))

    def build(group: str) -> Any:
        builder = next(room.parts[group] for room in Room.installed if group in room.parts)
        return builder(spec, strategy, accelerator.device)

    precision, task = build("precision"), build("task")
    for room in Room.installed:
        room.check(spec, strategy)
    tracker: Tracker = build_group("tracking", spec.tracking)
    # One run in the store for all processes: the first one records it.
    if not strategy.rank.is_main:
        tracker = ProcessJournal()
    return RunContext(
        out,
        console,
        tracker,
        spec,
        invocation,
        accelerator,
        precision,
        task,
        signals,
        strategy,
        build("callbacks"),
    )


def _run_tracked(context: RunContext, plan: PlannedRun) -> RunResult:
    """Run a mode that is recorded in the store."""
    resumed = plan.saved if context.mode.trains else None
    commit = run_context.git_tags(Path.cwd())
    info = _run_info(context, resumed, plan.changes, commit)
    page = RunPage(context.invocation.command_text(), info if resumed else None)
    with _tracked(context, info, page, commit):
        with context.explain_errors():
            outcome = context.mode.run(context, plan.saved)
        assert outcome is not None  # of a mode that is recorded
        result, report = outcome
        context.signals.check()
        result.log_cost(context.tracker)
        with suppress(OSError):  # _check_end writes it again, when the journal may have made room
            context.tracker.artifact(result.write(context.out))
        context.tracker.describe(replace(page, status="FINISHED", result=result, report=report))
    return result


@contextmanager
def _tracked(
    context: RunContext, info: RunInfo, page: RunPage, commit: Mapping[str, str]
) -> Iterator[None]:
    """Open the run in the store, and close it with the status that the run really had.

    Args:
        context: the run's parts.
        info: what the store is given.
        page: what the store shows while the run runs.
        commit: see run_context.git_tags.

    Raises:
        ConfigError: the folder takes no files.
    """
    tracker = context.tracker
    # A sweep has checked its own store, before its jobs.
    if context.invocation.sweep is None:
        with context.signals.interruptible():
            tracker.check_store()
    # The config and the environment are written before anything is computed or recorded.
    # A run that is in no store has no tags: its folder says which commit it ran.
    environment = {**run_context.environment_facts(context.invocation), **commit}
    try:
        run_context.write_config(context.out, context.spec, context.invocation.is_trusted)
        write_json(context.out / ENVIRONMENT, environment)
        if context.mode.trains and info.step == 0 and context.strategy.rank.is_main:
            # Those of an earlier run in this folder: the newest would be taken for this run's.
            rename_superseded(context.checkpoint_folder, -1)
        tracker.open(info)
    except OSError as error:
        raise ConfigError(
            f"{relative_path(Path(error.filename or context.out))} cannot be written: "
            f"{os_error_reason(error)}. Make room, or type hydra.run.dir=<folder> (in a sweep "
            "hydra.sweep.dir=<folder>)."
        ) from error
    try:
        tracker.describe(page)
        tracker.artifact(context.out / CONFIG)
        tracker.artifact(context.out / ENVIRONMENT)
        yield
    except (Stopped, KeyboardInterrupt) as error:
        _close(context, page, "KILLED", str(error) or "Interrupted.")
        raise
    except BaseException as error:
        _close(context, page, "FAILED", redact(f"{type(error).__name__}: {error}"))
        raise
    tracker.close("FINISHED", stopped=context.signals.is_stop_requested)


def _run_info(
    context: RunContext,
    resumed: LoadedCheckpoint | None,
    changes: Mapping[str, str],
    commit: Mapping[str, str],
) -> RunInfo:
    """Return what the store is given when the run is opened there."""
    spec = context.spec
    invocation = context.invocation
    strategy = context.strategy
    tags = {
        "precision": context.precision.name,
        "model": invocation.option_name("model", spec.model),
        "data": invocation.option_name("data", spec.data),
        "accelerator": context.accelerator.kind,
        "device_name": context.device_name,
        "settings": " ".join(invocation.settings(spec)),
        "output_dir": str(context.out.absolute()),
        "mode": spec.mode,
        # For reports that find no result.json.
        "quality": context.task.quality,
        "direction": context.task.direction,
    }
    if strategy.rank.world_size > 1:
        tags |= {"strategy": strategy.name, "processes": str(strategy.rank.world_size)}
    tags |= commit
    info = RunInfo(context.out, spec.flat(), tags, name=context.label, sweep=invocation.sweep)
    earlier = journal.latest_journal(context.out)
    if resumed is not None:
        return replace(info, continues=earlier, step=resumed.content["step"], changes=changes)
    # A run that should have been resumed and had no checkpoint starts over, as a new run.
    if earlier is None or not spec.checkpoint.resume:
        return info
    # The store may open the earlier run later than this one, which can name its journal alone.
    start, _ = next(journal.read_records(earlier), ({}, 0))
    superseded = context.tracker.stored_id(earlier) or start.get("id")
    return replace(info, tags=tags | {"supersedes": superseded}) if superseded else info


def _close(context: RunContext, page: RunPage, status: Status, error: str) -> None:
    with suppress(TrackingError):  # an error of the store must not hide why the run ended
        context.tracker.describe(replace(page, status=status, error=error))
    context.tracker.close(status, error, context.signals.is_stop_requested)


def _check_end(context: RunContext, result: RunResult) -> None:
    """Write the result, and raise what went wrong after the run's work was done.

    That is a signal that came while the records were uploaded, a result that could not be written,
    or records that the store refused. A sweep checks the records of its jobs itself.
    """
    try:
        try:
            result.write(context.out)
        except OSError as error:
            path = relative_path(context.out / RESULT)
            text = f"{path} was not written: {os_error_reason(error)}. The result is above."
            raise CheckpointError(text) from error
        context.signals.check()
        if context.invocation.sweep is None:
            context.tracker.check()
    except RunnerError as error:
        error.finished = True
        raise
