"""Run sweeps and mode=advise from Python."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runner.api.composition import check_texts, separate_hydra
from runner.api.objects import check_objects, given_roles, object_options
from runner.api.results import RunResult
from runner.api.runs import Data, Loss, Model, check_new_folder
from runner.config.overrides import check_config_dir, rewrite_arguments
from runner.config.python_objects import given_objects
from runner.config.resolve import register_schema
from runner.core import ConfigError, RunCallback, RunnerError, fmt, stop_signals
from runner.output.lasting_output import lasting_output
from runner.output.markup import notebook_frame
from runner.output.notebook_log import folded_log
from runner.sweeps.hydra_job import call_hydra, expand_resumed_sweep
from runner.sweeps.report.load import load_from_folder
from runner.sweeps.report.pages import advice_html
from runner.sweeps.report.sweep_data import SweepData
from runner.sweeps.sweep import Sweep, finish_sweep
from runner.sweeps.sweep_resume import resume_command
from runner.sweeps.verdict.ranking import Advice
from runner.tracking.history import to_frame
from runner.tracking.result_table import table_rows

if TYPE_CHECKING:
    import pandas

_MAIN_MODULE = "__main__."


@dataclass(frozen=True)
class SweepResult:
    """A sweep that has ended, or as much of it as ran.

    Attributes:
        folder: holds its report (report.html, report.md, report.png).
        data: its jobs with their curves.
        exit_status: of the command: 0 when every job finished, 1 when any failed, 2 when none
            failed and this machine lacks what some need.
    """

    folder: Path
    data: SweepData = field(repr=False)
    exit_status: int = 0

    @property
    def runs(self) -> list[RunResult]:
        """Return the results of the jobs, in the order in which the command asked for them."""
        return [RunResult.of(result) for result in self.data.results]

    @property
    def conclusion(self) -> str:
        """Return what the comparison of the jobs says, as the command prints it."""
        return self.data.answer.text

    def table(self) -> "pandas.DataFrame":
        """Return a table with a row for each job; docs/sweeps.md describes its columns."""
        import pandas

        return pandas.DataFrame(table_rows(self.data.results))

    def history(self) -> "pandas.DataFrame":
        """Return what the jobs recorded: a row for each step of each job.

        Returns:
            The index is (`label`, `step`); the columns are those of RunResult.history.
        """
        import pandas

        labels = [f"{job.result.label}" for job in self.data.jobs]
        frames = [to_frame(job.curves) for job in self.data.jobs]
        return pandas.concat(frames, keys=labels, names=["label"])

    def _repr_html_(self) -> str:
        """Return the report as a notebook shows it."""
        page = self.folder / "report.html"
        if not page.is_file():
            return f"<p>{html.escape(repr(self))}</p>"
        return notebook_frame(page.read_text())


class _InterruptingSignals(stop_signals.SignalHandler):
    """Context in which a signal raises Interrupted, so that the sweep is ended in order."""

    def handle_signal(self, number: int) -> None:
        """Raise Interrupted."""
        raise stop_signals.Interrupted(number)


# One argument for each part that can be an object.
def sweep(  # noqa: PLR0913
    overrides: Sequence[str],
    *,
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    model: Model | None = None,
    data: Data | None = None,
    loss: Loss | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    callbacks: Sequence[RunCallback | type[RunCallback]] | None = None,
) -> SweepResult:
    """Run a sweep, as `python -m runner -m` does, and return its jobs.

    Without objects each job runs in a process of its own. With objects, and with targets of the
    module __main__, the jobs run one after another in this process.

    Args:
        overrides: words of a command, as in ["precision=32-true,bf16-mixed", "seed=0,1,2"].
        out: the sweep's folder; None for a new one under outputs/sweeps.
        config_dir: folder of configs of one's own; None for none.
        model: in place of the config group model; see runner.run.
        data: in place of the config group data; see runner.run.
        loss: in place of task.loss; see runner.run.
        optimizer: in place of the config group optimizer; see runner.run.
        collate: in place of data.collate; see runner.run.
        callbacks: beside the config group callbacks; every job gets a copy of each.

    Returns:
        The result, also where jobs failed; see SweepResult.exit_status.

    Raises:
        ConfigError: the command cannot run; nothing was trained.
        Unavailable: this machine lacks what all jobs need.
        KeyboardInterrupt: a signal stopped the sweep; what ran is in its folder.
    """
    objects = given_roles(
        model=model, data=data, loss=loss, optimizer=optimizer, collate=collate, callbacks=callbacks
    )
    return _run_sweep(check_texts(overrides), objects, config_dir, out)


def advise(
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    model: Model | None = None,
    data: Data | None = None,
    loss: Loss | None = None,
) -> Advice:
    """Measure the precisions on a configuration, as `python -m runner mode=advise` does.

    Args:
        overrides: words of a command, as in ["model=resnet", "advise.budget=5m"].
        out: the folder of the trials; None for a new one under outputs/sweeps.
        config_dir: folder of configs of one's own; None for none.
        model: in place of the config group model; see runner.run.
        data: in place of the config group data; see runner.run.
        loss: in place of task.loss; see runner.run.

    Returns:
        The verdict on each precision, and the recommended one.

    Raises:
        ConfigError: the command cannot run, or no trial of 32-true finished.
        KeyboardInterrupt: a signal stopped the trials.
    """
    objects = given_roles(model=model, data=data, loss=loss)
    words = [word for word in check_texts(overrides) if word != "mode=advise"]
    result = _run_sweep([*words, "mode=advise"], objects, config_dir, out)
    if result.data.advice is None:
        raise ConfigError(f"The trials in {result.folder} gave no advice.")
    return replace(result.data.advice, page=advice_html(result.data))


@lasting_output()
def _run_sweep(
    words: Sequence[str],
    objects: Mapping[str, Any],
    config_dir: str | Path | None,
    out: str | Path | None,
) -> SweepResult:
    """Run the jobs of a command, and end the sweep however they ended."""
    check_objects(objects, words)
    configs = check_config_dir(config_dir)
    resumes = any(word.startswith("sweep.resume=") for word in words)
    if resumes and (out is not None or config_dir is not None):
        raise ConfigError(
            "A resumed sweep has its folder and its configs: leave out= and config_dir= out."
        )
    if out is not None:
        check_new_folder(Path(out))
    options = object_options(objects, configs)
    register_schema()
    # The end of the sweep, too, shows commands that name the objects.
    with (
        folded_log() as log,
        given_objects(objects, has_several_runs=True),
        separate_hydra(),
        options as own,
    ):
        result = _run_command(_sweep_command(words, own, configs, out))
        log.fold_under(result.conclusion)
        return result


def _run_command(argv: Sequence[str]) -> SweepResult:
    """Run the jobs of a command as Hydra takes it, and end the sweep however they ended."""
    status = 0
    folder = None
    try:
        with _InterruptingSignals():
            call_hydra(argv)
    except RunnerError as error:
        status = error.exit_status
        raise
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) else stop_signals.interrupt_status(stop)
        status = code if isinstance(code, int) else 1
        if status > 128:
            hint = ""
            if Sweep.current:
                hint = f"Resume with: {resume_command(Sweep.current.folder)}"
            raise stop_signals.Interrupted(status - 128, hint) from None
    except BaseException:
        status = 1
        raise
    finally:
        if Sweep.current is not None:
            folder = Sweep.current.folder
        status = finish_sweep(status)
    if folder is None:
        raise ConfigError("The command ran no sweep.")
    return SweepResult(folder, load_from_folder(folder), status)


def _sweep_command(
    words: Sequence[str], own: Sequence[str], folder: Path | None, out: str | Path | None
) -> Sequence[str]:
    """Return the words of a sweep's command, as Hydra takes them.

    Args:
        words: that were typed.
        own: those for the objects.
        folder: of configs of one's own.
        out: the sweep's folder.
    """
    flags = ["--multirun"] if folder is None else ["--multirun", "--config-dir", str(folder)]
    if any(word.startswith("sweep.resume=") for word in words):
        # The command of the sweep that is resumed has the other words.
        return rewrite_arguments(expand_resumed_sweep([*words, *flags]))
    argv = [*words, *own]
    # Other processes have neither the objects nor the classes of this program's own module.
    paths = folder.rglob("*.yaml") if folder is not None else ()
    names_main = any(f"={_MAIN_MODULE}" in word for word in words)
    names_main = names_main or any(_MAIN_MODULE in p.read_text(errors="replace") for p in paths)
    if own or names_main:
        argv.append("hydra/launcher=basic")
    if out is not None:
        argv.append(f"hydra.sweep.dir={fmt.quote_value(str(out))}")
    return rewrite_arguments([*argv, *flags])
