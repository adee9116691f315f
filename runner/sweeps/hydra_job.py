"""Compose a command with Hydra, and run its job or the jobs of its sweep."""

import gc
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from traceback import walk_tb
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from runner.config.hydra_plugins import ADVISE, MAIN_ARGUMENTS
from runner.config.messages import COMPOSE_ERRORS, explain
from runner.config.resolve import register_schema, remove_keys, resolve_spec
from runner.core import (
    ConfigError,
    Mode,
    RunnerError,
    RunResult,
    RunSpec,
    Unavailable,
    files,
    fmt,
    layout,
    run_result,
    secrets,
    stop_signals,
    terminal,
    torchrun,
)
from runner.output.lasting_output import lasting_output
from runner.sweeps.manifest import (
    is_sweep_job,
    job_invocation,
    job_overrides,
    keys_left_out_of_job,
    record_result,
    use_sweep_time,
)


def expand_resumed_sweep(argv: Sequence[str]) -> Sequence[str]:
    """Return the whole command of the sweep that sweep.resume= names, any other unchanged."""
    if not any(text.startswith("sweep.resume=") for text in argv):
        return argv
    from runner.sweeps.sweep_resume import expand_resume_command

    return expand_resume_command(argv)


def sweep_module() -> Any:
    """Return the module of sweeps if a sweep has imported it, else None: it is slow to import."""
    return sys.modules.get("runner.sweeps.sweep")


def call_hydra(argv: Sequence[str]) -> None:
    """Compose a command with Hydra, and run its job or jobs.

    Args:
        argv: as rewrite_arguments returns it.

    Raises:
        RunnerError: the command does not compose, or the sweep is refused.
        SystemExit: a job or the sweep ended with an exit status.
    """
    register_schema()
    # Hydra then raises errors instead of printing them, and we explain them ourselves.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    previous_argv = sys.argv
    sys.argv = [sys.argv[0], *argv]
    try:
        # Hydra reads sys.argv, and calls run_job once, or in a sweep through its launcher.
        as_main = hydra.main("pkg://runner.conf", "config", **MAIN_ARGUMENTS)
        as_main(run_job)()
    except COMPOSE_ERRORS as error:
        raise ConfigError(explain(error, argv)) from error
    except RecursionError as error:
        # A recursion in the user's own code is no matter of the command.
        if any(frame.f_code is run_job.__code__ for frame, _ in walk_tb(error.__traceback__)):
            raise
        raise ConfigError(
            "The command, or a yaml that it names, is nested too deeply. Name a file in place of "
            "a list or mapping of this depth."
        ) from error
    except SystemExit as stop:
        # A callback of Hydra's raises SystemExit, for Hydra would turn an error into a warning.
        if isinstance(stop.__cause__, RunnerError):
            raise stop.__cause__ from None
        raise
    finally:
        sys.argv = previous_argv


@lasting_output()
def run_job(config: DictConfig) -> float | None:
    """Run one job: the task function that Hydra calls with a composed config.

    Returns:
        What a sweeper optimizes. None if that is NaN or the job of a sweep failed: Optuna's sweeper
        then counts a failed trial and continues, while NaN would end its study.

    Raises:
        SystemExit: a signal ended the job, or a job failed that has this process for itself or
            whose failure ends its sweep. The result of a sweep's job is recorded before.
    """
    settings = HydraConfig.get()
    callback: Any = settings.callbacks.get("sweep")
    folder = Path(settings.runtime.output_dir)
    sweeping = is_sweep_job()
    mode = Mode.named(config.mode)
    leaves_line = sweeping and _leaves_line(config)
    # A run that ends by an error may have written its result itself.
    has_result = False
    try:
        result = _start(config, folder, sweeping, leaves_line)
        return _objective(result, 0 if sweeping else mode.exit_status(result))
    except RunnerError as error:
        from runner.sweeps.sweep_progress import alike_job

        status = _error_status(error, sweeping and callback.skip_refused)
        precision = str(settings.runtime.choices["precision"])
        # The line of a trial, or of a job that was not tried, says why; that of a job that fails
        # like an earlier one names it.
        is_in_line = leaves_line and (
            _is_trial() or status in run_result.UNTRIED or alike_job(folder, precision, str(error))
        )
        if not is_in_line:
            print_error_once(error)
        message, has_result = str(error), error.finished
        exit_status = max(error.exit_status, mode.failure_status)
        # A single run that was refused leaves no folder with nothing but Hydra's record of it.
        if not sweeping and {path.name for path in folder.iterdir()} <= {".hydra"}:
            rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt as error:
        status = "stopped"
        message = str(error) or "Interrupted."
        exit_status = stop_signals.interrupt_status(error)
    except Exception as error:
        text = secrets.redact(traceback.format_exc())
        print(terminal.sanitize(text), file=sys.stderr)
        with suppress(OSError):  # a full disk
            files.write_text(folder / "error.txt", text)
        status = "failed"
        message = secrets.redact(f"{type(error).__name__}: {error}")
        exit_status = mode.failure_status
    if sweeping and not has_result:
        record_result(config, folder, status, message)
    if leaves_line:
        from runner.sweeps.sweep_progress import print_job_line

        print_job_line(folder)
    if exit_status > 128 or settings.mode == RunMode.RUN:
        raise SystemExit(exit_status)
    if sweeping and callback.fail_fast:
        from runner.sweeps.sweep import end_if_failed

        if end_if_failed(folder):
            raise SystemExit(1)
    # Hydra's own launcher runs the jobs of a sweep in one process, which continues with the next.
    # Outside of `except` the traceback, whose frames hold the model, is free to be collected.
    gc.collect()
    return None


def _objective(result: "RunResult", exit_status: int) -> float | None:
    """Return what a sweeper optimizes.

    Raises:
        SystemExit: the status is not 0.
    """
    if exit_status:
        raise SystemExit(exit_status)
    return None if math.isnan(result.objective) else result.objective


def _error_status(error: RunnerError, skips_refused: bool) -> "run_result.Status":
    """Return the status of a job's result after an error."""
    if error.exit_status > 128:
        return "stopped"
    if isinstance(error, Unavailable):
        return "unavailable"
    return "refused" if skips_refused and isinstance(error, ConfigError) else "failed"


def _leaves_line(config: DictConfig) -> bool:
    """Return whether HydraConfig's job, one of a sweep, prints one line, and all else to a file."""
    settings = HydraConfig.get()
    # A job that a user types again has no id.
    is_typed = OmegaConf.is_missing(settings.job, "id")
    is_verbose = settings.callbacks["sweep"].verbose or is_typed
    return not is_verbose and Mode.named(config.mode).takes_processes


def _start(config: DictConfig, folder: Path, sweeping: bool, leaves_line: bool) -> "RunResult":
    """Resolve a job's config and run it; a job that is finished already returns its result."""
    settings = HydraConfig.get()
    caveat = ""
    if sweeping:
        name = terminal.one_line(" ".join(job_overrides()))
        if not leaves_line:
            print(f"\njob {settings.job.num}: {name}", flush=True)
        if not _is_trial():
            use_sweep_time()
            remove_keys(config, keys_left_out_of_job())
            caveat = _raise_eps(config)
    finished = _finished_before(config, folder, sweeping)
    if finished:
        # The other processes find the result, too, and leave.
        torchrun.publish(torchrun.START_KEY, folder)
        if torchrun.process_rank().is_main:
            name = f"{finished.label}: " if sweeping else ""
            print(terminal.sanitize(f"{name}{finished.outcome} before"), flush=True)
        return finished
    # Values of a checkpoint replace groups, whose interpolations may not resolve without them.
    reads_checkpoint = bool(config.checkpoint.path or config.checkpoint.resume)
    spec = resolve_spec(config, allow_unresolved=reads_checkpoint)
    composed: Any = OmegaConf.to_container(config)
    invocation = replace(job_invocation(sweeping), composed_config=composed, caveat=caveat)
    torchrun.publish(torchrun.START_KEY, folder)
    is_first = "runner.core.run.run" not in sys.modules
    with rare_garbage_collection():
        # torch.optim imports it at its first use, which is outside of this context.
        import torch._dynamo  # noqa: F401

        from runner.core import run_spec
        from runner.tracking.result_table import print_result
    if is_first:
        # Imported modules stay: no later collection has to look through them.
        gc.freeze()
    from runner.output.console import JobConsole, plain_console

    if not leaves_line:
        console = plain_console()
        return run_spec(spec, folder, invocation, console, partial(print_result, console))
    from runner.sweeps.sweep_progress import job_label, print_job_line

    label = job_label(Path(settings.sweep.dir), invocation.label(spec))
    with closing(JobConsole(folder / layout.LOG, label, _is_trial())) as console:
        result = run_spec(spec, folder, invocation, console, partial(print_result, console))
    print_job_line(folder)
    return result


def _raise_eps(config: DictConfig) -> str:
    """Raise an optimizer's eps, unless it was typed, to what a preset asks for the precision.

    Args:
        config: of a job.

    Returns:
        A sentence on it for the report; empty if eps stays.
    """
    settings = HydraConfig.get()
    least = settings.callbacks["sweep"].least_eps.get(settings.runtime.choices["precision"], 0.0)
    eps = config.optimizer.get("eps")
    is_typed = "optimizer.eps" in map(fmt.override_key, job_overrides())
    if isinstance(eps, float) and eps < least and not is_typed:
        config.optimizer.eps = least
        change = f"optimizer.eps={least:g} in place of {eps:g}"
        return f"trained with {change}, which its difference to others may come from."
    return ""


def _finished_before(config: DictConfig, folder: Path, sweeping: bool) -> "RunResult | None":
    """Return the result of a resumed job that is finished; set up any other to resume."""
    resumes_sweep = sweeping and HydraConfig.get().callbacks["sweep"].resume
    if resumes_sweep and Mode.named(config.mode).trains:
        with read_write(config):
            config.checkpoint.resume = RunSpec.AUTO
    if not (resumes_sweep or config.checkpoint.resume == RunSpec.AUTO):
        return None
    from runner.sweeps.sweep_resume import final_result

    result = final_result(folder, job_overrides())
    # A run that train.max_seconds ended continues; a sweep's jobs are compared after that time.
    return result if result is None or resumes_sweep or result.is_whole else None


def _is_trial() -> bool:
    """Return whether HydraConfig's job is a trial of mode=advise."""
    return HydraConfig.get().sweeper.get("_target_") == ADVISE


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect no old garbage within a context, for large imports.

    Imports create objects that stay; searching them again and again for garbage takes a fifth of
    the time of importing torch.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def print_error_once(error: RunnerError) -> None:
    """Print an error, or that a signal stopped the run, in one of torchrun's processes."""
    if torchrun.claim_message(str(error)):
        terminal.print_error(str(error), mark="" if error.exit_status > 128 else "error: ")
