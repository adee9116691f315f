"""Run sweeps and mode=advise from Python, and load runs and sweeps that have ended."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runner.api.composition import check_arguments, check_texts, separate_hydra
from runner.api.objects import check_objects, given_roles, object_options
from runner.api.runs import Data, Loss, Model, RunResult, check_new_folder
from runner.config.overrides import check_config_dir, rewrite_arguments
from runner.config.python_objects import given_objects
from runner.config.resolve import register_schema
from runner.core import (
    ConfigError,
    RunCallback,
    RunnerError,
    files,
    fmt,
    layout,
    secrets,
    stop_signals,
)
from runner.output.lasting_output import lasting_output
from runner.output.markup import notebook_frame
from runner.output.notebook_log import folded_log
from runner.rooms import install_rooms
from runner.sweeps.hydra_job import call_hydra, expand_resumed_sweep
from runner.sweeps.report.load import (
    find_parent_run,
    load_from_folder,
    load_from_store,
    report_folder,
    result_of_run,
)
from runner.sweeps.report.pages import write_report
from runner.sweeps.report.sweep_data import SweepData
from runner.sweeps.sweep import Sweep, finish_sweep
from runner.sweeps.sweep_resume import resume_command
from runner.sweeps.verdict.ranking import Advice
from runner.tracking.history import to_frame
from runner.tracking.result_table import table_rows
from runner.tracking.uri import is_configured_store, resolve_uri, sqlite_path

if TYPE_CHECKING:
    import pandas

_MAIN_MODULE = "__main__."
_ANSWER_KEYS = ("gap", "gap_half_width", "speed_ratio", "equal_loss_speed_ratio", "memory_ratio")
"""Numbers of an answer, see Answer.record."""


@dataclass(frozen=True, repr=False)
class SweepResult:
    """A sweep that has ended, or as much of it as ran.

    Attributes:
        folder: holds its report (report.html, report.md, report.png).
        data: its jobs with their curves.
        exit_status: of the command: 0 when every job finished, 1 when any failed, 2 when none
            failed and this machine lacks what some need.
    """

    folder: Path
    data: SweepData
    exit_status: int = 0

    def __repr__(self) -> str:
        return f"{self.conclusion}\n{self.folder}"

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

    def summary(self) -> "pandas.DataFrame":
        """Return a table with a row for each group of jobs that differ in their seeds alone.

        `gap` (the group's quality minus the baseline's), half the width of its confidence interval,
        the ratios and the verdict are those of the answer in report.json; NaN where the jobs do not
        tell.
        """
        import pandas

        compared = self.data.compared
        if self.data.advice:
            gate = self.data.gate
            rated = [gate.precision] if gate else self.data.advice.verdicts
            compared = [verdict.comparison for verdict in rated]
        record = self.data.answer.record
        # The record has a verdict on each group, in their order.
        verdicts = {tag: text for tag, text in record.tags.items() if tag.startswith("verdict/")}
        rows = []
        for comparison, (tag, verdict) in zip(compared, verdicts.items(), strict=True):
            group = comparison.group
            row: dict[str, Any] = {"precision": group.precision}
            row |= {"settings": " ".join(group.settings), "device": group.device}
            row |= {"quality": group.metric, "verdict": verdict, "seeds": 0}
            if group.quality:
                row["seeds"] = group.quality.n
                row |= {"mean": group.quality.mean, "sd": group.quality.sd}
            for key in _ANSWER_KEYS:
                row[key] = record.metrics.get(tag.replace("verdict", f"answer/{key}", 1))
            if comparison.speed_ratio:
                row["speed_ratio_low"] = comparison.speed_ratio.low
                row["speed_ratio_high"] = comparison.speed_ratio.high
            rows.append(row)
        return pandas.DataFrame(rows)

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
@check_arguments
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


@check_arguments
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
    return replace(result.data.advice, page=result._repr_html_(), text=repr(result))


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
    install_rooms()
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


def load(where: str | Path, uri: str | None = None) -> RunResult | SweepResult:
    """Load a run or a sweep that has ended.

    Args:
        where: folder of a run or of a sweep, MLflow id of a run or of a sweep's parent run, or a
            sweep's id.
        uri: the MLflow store in which ids are looked up; None takes the default one.

    Returns:
        A RunResult of a run, a SweepResult of a sweep.

    Raises:
        ConfigError: there is no such run or sweep.
        TrackingError: the store does not answer.
    """
    path = Path(where).absolute()
    if not (files.path_exists(str(where)) and path.is_dir()):
        return _load_from_store(str(where), resolve_uri(uri))
    if (path / layout.MANIFEST).is_file():
        data = load_from_folder(path)
        jobs = []
        for job in data.jobs:
            # The sweep may have been moved since. Jobs' folders are named by their numbers.
            name = Path(job.result.folder).name
            present = path / name if name.isdecimal() else Path(job.result.folder)
            result = replace(job.result, folder=str(present))
            # A stranger's result may name any store; its history would be asked for there.
            if not is_configured_store(result.tracking_uri or ""):
                result = replace(result, tracking_uri=None)
            jobs.append(replace(job, result=result))
        return SweepResult(path, replace(data, jobs=jobs))
    try:
        # The folder may have been moved since.
        return replace(RunResult.read(path), folder=str(path))
    except (OSError, ValueError) as error:
        if (path / layout.CONFIG).is_file():
            raise ConfigError(
                f"{where} holds a run without a result: it was stopped, or still runs. Resume it "
                f"with checkpoint.resume={where}, or load it by its MLflow id."
            ) from error
        raise ConfigError(
            f"{where} holds no {layout.RESULT} of a run and no {layout.MANIFEST} of a sweep. Give "
            "the folder of a run (outputs/runs/<time>) or of a sweep (outputs/sweeps/<time>)."
        ) from error


def _load_from_store(name: str, uri: str) -> RunResult | SweepResult:
    """Load a run or a sweep by its id.

    Raises:
        ConfigError: the store has none of this id.
    """
    from runner.tracking.reader import Reader  # imports mlflow

    database = sqlite_path(uri)
    unknown = ConfigError(
        f"{name} is no folder here, and no id of a run or a sweep in {secrets.redact(uri)}. Give "
        "uri=<store> for another store."
    )
    if database and not database.exists():
        raise unknown
    reader = Reader(uri)
    # Run ids are letters and digits; another name cannot be looked up as one.
    run = reader.run(name) if name.isalnum() else None
    if run is not None and run.tags.get("role") != "sweep":
        return RunResult.of(result_of_run(reader, run))
    try:
        parent = find_parent_run(reader, name)
    except ConfigError:
        raise unknown from None
    data = load_from_store(reader, parent)
    # The report is written here alone: to load a sweep changes nothing in the store.
    folder = report_folder(name)
    write_report(data, folder)
    return SweepResult(folder, data)
