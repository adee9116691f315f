"""Run one experiment from Python, and read its result there and in notebooks."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset

from runner.api.composition import check_arguments, check_texts, compose_run
from runner.api.objects import check_objects, given_roles, object_name, object_options, with_objects
from runner.config.python_objects import given_keys, given_objects
from runner.core import (
    ConfigError,
    Invocation,
    RunCallback,
    RunSpec,
    checkpoint_file,
    layout,
    run_result,
    run_spec,
    sessions,
    stop_signals,
    terminal,
    torchrun,
)
from runner.output.console import plain_console, silent_console
from runner.output.lasting_output import lasting_output
from runner.output.notebook_log import folded_log
from runner.sweeps.sweep_resume import final_result
from runner.tracking import history
from runner.tracking.result_table import (
    page_lines,
    print_result,
    result_line,
    result_rows,
    table_rows,
)

if TYPE_CHECKING:
    import pandas

Model = nn.Module | Callable[[], nn.Module]
"""A model, of which every run trains a copy; or a function or class that builds one, called under
the run's seed."""
Data = tuple[Dataset[Any], ...] | Callable[[], Any]
"""Data sets, (train, val) or (train, val, test), as docs/own-code.md describes them; or a function
that returns them."""
Loss = Callable[..., torch.Tensor] | type[nn.Module]
"""A function of (output, target) or a class of one; its value is the training loss."""


class RunResult(run_result.RunResult):
    """The numbers of a run and how it ended, with what the run recorded and the trained weights.

    The class that it derives from lists the attributes.
    """

    @classmethod
    def of(cls, result: run_result.RunResult) -> "RunResult":
        """Return a result with the methods of this class."""
        return cls(**vars(result))

    def history(self) -> "pandas.DataFrame":
        """Return what the run recorded: a row for each step, a column for each metric.

        It is read from the run's folder, or, where the folder is not here, from MLflow. See
        runner.tracking.history.to_frame for the columns.

        Raises:
            ConfigError: neither the folder nor the MLflow run is here.
            TrackingError: the store does not answer.
        """
        if Path(self.folder).is_dir():
            return history.to_frame(history.from_folder(Path(self.folder)))
        if self.run_id is None or self.tracking_uri is None:
            problem = f"{self.folder} is no folder here, and the run in no store that is named here"
            raise ConfigError(f"{problem}. Type runner.load(<its MLflow id>, uri=<its store>).")
        from runner.tracking.reader import Reader  # imports mlflow

        return history.to_frame(Reader(self.tracking_uri).history(self.run_id))

    def table(self) -> "pandas.DataFrame":
        """Return the result as a table of one row; docs/sweeps.md describes the columns."""
        import pandas

        return pandas.DataFrame(table_rows([self]))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trained weights of the run's newest checkpoint, on the CPU, by name.

        load_state_dict of a model like the one that was trained takes them. With train.ema they are
        the averaged ones.

        Raises:
            ConfigError: the run left no checkpoint (checkpoint.final=false), it is damaged, or its
                weights are packed or those of an adapter.
        """
        checkpoints = checkpoint_file.checkpoints_of_run(Path(self.folder))
        if not checkpoints:
            raise ConfigError(f"{self.folder} holds no checkpoint. Type checkpoint.final=true.")
        content = checkpoint_file.load(checkpoints[-1])
        adapter = content["spec"].get("adapter") or {}
        if content.get("layout") or adapter.get("_target_"):
            kind = "those of an adapter" if adapter.get("_target_") else "packed"
            raise ConfigError(
                f"The weights in {self.folder} are {kind}. Type mode=evaluate checkpoint=<folder>."
            )
        # With train.ema the averaged weights are those that the metrics are of.
        average = content.get("average") or {}
        return {**content["model"], **average.get("weights", {})}

    def _repr_html_(self) -> str:
        """Return the result as a notebook shows it."""
        title = terminal.sanitize(f"{self.label}: {self.outcome}")
        rows = []
        for name, text in [*result_rows(self), *page_lines(self)]:
            cells = (html.escape(terminal.sanitize(part)) for part in (name, text))
            rows.append("<tr><th>{}</th><td>{}</td></tr>".format(*cells))
        return f"<table><caption>{html.escape(title)}</caption>{''.join(rows)}</table>"


# One argument for each part that can be an object.
@check_arguments
@lasting_output()
def run(  # noqa: PLR0913
    what: Sequence[str] | RunSpec = (),
    *,
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    model: Model | None = None,
    data: Data | None = None,
    loss: Loss | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    callbacks: Sequence[RunCallback | type[RunCallback]] | None = None,
    quiet: bool = False,
) -> RunResult:
    """Run one experiment, as `python -m runner` does, and return its result.

    Args:
        what: words of a command, as in ["precision=16-mixed", "train.max_steps=100"], or a spec of
            runner.compose.
        out: the run's folder; None for a new one under outputs/runs.
        config_dir: folder of configs of one's own; None for none.
        model: in place of the config group model. A module is copied, so that it stays as it is;
            RunResult.state_dict has the trained weights.
        data: in place of the config group data.
        loss: in place of task.loss.
        optimizer: in place of the config group optimizer: a function of the parameters.
        collate: in place of data.collate: a function of a list of examples.
        callbacks: beside the config group callbacks; see docs/own-callbacks.md. A class is
            called for each run, an object keeps its state from run to run.
        quiet: print no progress and no table.

    Raises:
        ConfigError: the settings or objects cannot run; nothing was trained.
        Unavailable: this machine lacks what the precision or the accelerator needs.
        Diverged: a guard stopped the run, whose numbers are wrong.
        Stopped: a signal (a notebook's interrupt) ended the run, after a checkpoint.
    """
    objects = given_roles(
        model=model, data=data, loss=loss, optimizer=optimizer, collate=collate, callbacks=callbacks
    )
    console = silent_console() if quiet else plain_console()
    # Before the command is composed, for Hydra's state is the process's, too.
    print_line = partial(console.print, markup=False)
    with folded_log() as log, sessions.one_run(print_line), given_objects(objects):
        if isinstance(what, RunSpec):
            if config_dir is not None:
                raise ConfigError("A spec is composed already. Give config_dir to runner.compose.")
            result = _run_given_spec(what, out, objects, console)
        else:
            check_objects(objects, check_texts(what))
            folder = Path(config_dir) if config_dir is not None else None
            with object_options(objects, folder) as own:
                spec, run_folder, invocation = compose_run([*what, *own], config_dir, out)
            invocation = replace(invocation, given=given_keys())
            result = _run_composed(spec, run_folder, invocation, console)
        log.fold_under(result_line(result))
        return RunResult.of(result)


def _run_composed(
    spec: RunSpec, folder: Path, invocation: Invocation, console: Console
) -> run_result.RunResult:
    """Run a composed command; a run with checkpoint.resume=auto that is finished has its result."""
    try:
        if spec.checkpoint.resume is None:
            check_new_folder(folder)
        torchrun.publish(torchrun.START_KEY, folder)
        # All processes find a result.
        if spec.checkpoint.resume == RunSpec.AUTO:
            finished = final_result(folder, invocation.overrides)
            if finished is not None:
                return finished
        return run_spec(
            spec, folder.absolute(), invocation, console, partial(print_result, console)
        )
    except BaseException as error:
        if isinstance(error, stop_signals.Stopped):
            hint = f"Its folder is {folder}; it left no checkpoint."
            if checkpoint_file.checkpoints_of_run(folder):
                hint = f"Resume with: {invocation.resume_text(folder)}"
            error.args = (f"{error} {hint}",)
        torchrun.publish_failure()
        raise


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that holds a run or a sweep, whose files would be mixed with new ones.

    Raises:
        ConfigError: it does.
    """
    for name, kind in ((layout.RESULT, "run"), (layout.MANIFEST, "sweep")):
        if (folder / name).exists() and torchrun.process_rank().is_main:
            raise ConfigError(
                f"out={folder} holds a {kind} already. Give another folder, or resume the {kind}: "
                f"{'checkpoint' if kind == 'run' else 'sweep'}.resume={folder}."
            )


def _run_given_spec(
    spec: RunSpec, out: str | Path | None, objects: Mapping[str, Any], console: Console
) -> run_result.RunResult:
    """Run a spec, with objects in place of its nodes."""
    if torchrun.process_rank().world_size > 1:
        raise ConfigError(
            "runner.run takes a spec in one process only. Under torchrun give the overrides: "
            "runner.run([...])."
        )
    check_objects(objects, ())
    time_name = f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    folder = Path("outputs/runs", time_name) if out is None else Path(out)
    choices = {role: object_name(value) for role, value in objects.items()}
    invocation = Invocation(choices, given=given_keys())
    spec = replace(spec, **with_objects(spec, objects))
    return _run_composed(spec, folder, invocation, console)
