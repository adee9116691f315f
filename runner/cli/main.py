"""The command line: argv -> Hydra -> run. torch and mlflow are imported inside functions only, so
that --help, --cfg and tab completion answer at once."""

import gc
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner.cli.help import COMMAND_HELP, print_help
from runner.config.hydra_plugins import ADVISE
from runner.config.messages import explain
from runner.config.overrides import config_dir, rewrite_arguments, shadowed
from runner.config.precision_keys import drop_keys
from runner.config.resolve import register_schema, resolve
from runner.config.schema import AUTO
from runner.distributed import torchrun
from runner.sweep.job_result import (
    job_origin,
    job_overrides,
    keys_left_out_of_job,
    record_result,
)
from runner.utils.errors import RunnerError, Unavailable
from runner.utils.secrets import redact
from runner.utils.stop_signals import CommandSignals, Interrupted
from runner.utils.terminal import PlainFormatter, is_text, one_line, print_error, sanitize

if TYPE_CHECKING:
    from runner.modes.result import RunResult


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. See docs/commands.md."""
    try:
        with CommandSignals(_sweeping):
            status = _main(argv)
    except KeyboardInterrupt as error:
        status = _status(error)
    if status:
        torchrun.publish_failure()
    return status


def _main(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if odd := next((text for text in argv if not is_text(text)), None):
        print_error(f"{odd} is not UTF-8. Type names that are.")
        return 2
    if logging.lastResort:  # writes warnings to stderr
        logging.lastResort.setFormatter(PlainFormatter())
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))  # a console script lacks it; `python -m runner` has it
    if argv and argv[0] in COMMANDS:
        if {"--help", "-h"} & set(argv):
            print(COMMAND_HELP[argv[0]])
            return 0
        return COMMANDS[argv[0]](argv[1:])
    try:
        argv = torchrun.join(rewrite_arguments(_whole(argv)))
    except RunnerError as error:
        _complain_once(str(error))
        return error.exit_status
    except torchrun.MainRankFailed:
        return 2
    if {"--help", "-h"} & set(argv):
        print(print_help(argv), flush=True)
        argv = [*(text for text in argv if text not in ("--help", "-h")), "--cfg", "job"]
    if (folder := config_dir(argv)) and not folder.is_dir():
        text = f"{folder} is no folder in {Path.cwd()}. Type --config-dir <folder of your configs>."
        _complain_once(f"--config-dir={text}")
        return 2
    for warning in shadowed(folder) if folder else ():
        if torchrun.claim_message(warning):
            print(sanitize(warning), file=sys.stderr)
    return _hydra(argv)


def _complain_once(text: str) -> None:
    """Print an error; of several processes that have it, one does."""
    if torchrun.claim_message(text):
        print_error(text)


def _whole(argv: Sequence[str]) -> Sequence[str]:
    """The command of the sweep that sweep.resume= names, any other as it is."""
    if not any(text.startswith("sweep.resume=") for text in argv):
        return argv
    from runner.sweep.sweep_resume import expand_resume_command

    return expand_resume_command(argv)


_COMPOSING = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    ValueError,
    OSError,
    TypeError,
)


def _hydra(argv: Sequence[str]) -> int:
    """Hand the command to Hydra and turn what comes back into an exit status."""
    register_schema()
    # Hydra then raises what went wrong instead of printing it, and we explain it ourselves.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    previous, sys.argv = sys.argv, [sys.argv[0], *argv]
    status = 0
    try:
        hydra.main(version_base="1.3", config_path="pkg://runner.conf", config_name="config")(job)()
    except _COMPOSING as error:
        print_error(explain(error, argv))
        status = 2
    except RunnerError as error:
        print_error(str(error))
        status = error.exit_status
    except KeyboardInterrupt as error:
        status = _status(error)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = previous
        status = _finish_sweep(status)
    return status


def _status(error: KeyboardInterrupt) -> int:
    """The exit status of what Ctrl-C or another signal has ended."""
    return error.exit_status if isinstance(error, Interrupted) else 130


def _sweeping() -> bool:
    """Whether this process has a sweep to end."""
    sweep = sys.modules.get("runner.sweep.sweep")
    return sweep is not None and sweep.Sweep.current is not None


def _finish_sweep(status: int) -> int:
    sweep = sys.modules.get("runner.sweep.sweep")
    return sweep.finish_sweep(status) if sweep else status


def job(config: DictConfig) -> float | None:
    """One job: Hydra's task function. It returns what a sweeper optimises, None without a number:
    Optuna's then counts the trial as failed and goes on, where NaN would end its study. A failed
    job of a sweep is recorded and the sweep goes on; nothing keeps its traceback, whose frames
    would keep its model."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    sweeping = settings.mode == RunMode.MULTIRUN
    status: int | None = None
    finished = False
    try:
        objective = _start(config, folder, sweeping).objective
        return None if math.isnan(objective) else objective
    except RunnerError as error:
        if sweeping and _is_trial():
            name = " ".join(job_origin(True).swept_overrides).removeprefix("precision=")
            if (folder.parent / "advise.json").is_file():  # else the command says so, and ends
                print(sanitize(f"{name}: {str(error).splitlines()[0]}"), flush=True)
        else:
            _complain_once(str(error))
        kind = "unavailable" if isinstance(error, Unavailable) else "failed"
        message, status, finished = str(error), error.exit_status, error.finished
        if status > 128:
            kind = "stopped"
    except KeyboardInterrupt as error:
        kind, message, status = "stopped", str(error) or "Interrupted.", _status(error)
    except Exception as error:
        text = redact(traceback.format_exc())
        print(sanitize(text), file=sys.stderr)
        with suppress(OSError):  # a full disk
            (folder / "error.txt").write_text(text)
        kind, message, status = "failed", redact(f"{type(error).__name__}: {error}"), 1
    if sweeping and not finished:
        record_result(config, folder, kind, message)
    gc.collect()
    if status > 128 or not sweeping:
        raise SystemExit(status)
    return None


def _start(config: DictConfig, folder: Path, sweeping: bool) -> "RunResult":
    trial = sweeping and _is_trial()
    if sweeping and not trial:
        overrides = one_line(" ".join(job_overrides()))
        print(f"\njob {HydraConfig.get().job.num}: {overrides}", flush=True)
    if sweeping and not trial:
        drop_keys(config, keys_left_out_of_job())
    again = sweeping and HydraConfig.get().callbacks["sweep"].resume
    if again and config.mode == "train":
        with read_write(config):
            config.checkpoint.resume = AUTO
    if again or config.checkpoint.resume == AUTO:
        from runner.sweep.sweep_resume import finished_result

        if (result := finished_result(folder, job_overrides())) is not None:
            print(f"{result.outcome} before", flush=True)
            return result
    took = config.mode == "evaluate" or config.checkpoint.resume is not None
    spec = resolve(config, later=took)
    composed = OmegaConf.to_container(config)
    assert isinstance(composed, dict)
    where = replace(job_origin(sweeping), composed={str(k): v for k, v in composed.items()})
    torchrun.publish_start(folder)
    with rare_garbage_collection():
        import torch._dynamo  # noqa: F401 - torch.optim does, when it is first used

        from runner.modes.run import run
        from runner.sweep.advisor.trials import print_one_line_result
    if trial:
        return print_one_line_result(lambda console: run(spec, folder, where, console))
    return run(spec, folder, where)


def _is_trial() -> bool:
    return HydraConfig.get().sweeper.get("_target_") == ADVISE


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Context around large imports, which leave no garbage that is old: going through all objects
    again and again costs a fifth of the time that importing torch takes."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _doctor(argv: Sequence[str]) -> int:
    from runner.cli.doctor import doctor

    return doctor(argv)


def _ui(argv: Sequence[str]) -> int:
    from runner.cli.ui import ui

    return ui(argv)


def _report(argv: Sequence[str]) -> int:
    from runner.sweep.report.rebuild import rebuild_report

    return rebuild_report(argv)


def _sync(argv: Sequence[str]) -> int:
    from runner.cli.sync import sync

    return sync(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": _doctor,
    "report": _report,
    "sync": _sync,
    "ui": _ui,
}
