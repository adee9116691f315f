"""Make a sweep's report again, from its folder or from MLflow alone: the command `report`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.checkpoint.locate import newest_sweeps
from runner.config.commands import REPORT
from runner.config.overrides import path_exists
from runner.sweeps.report.jobs import SweepData
from runner.sweeps.report.load import JOB_RESULTS_FOLDER, load_from_folder, load_from_store
from runner.sweeps.report.pages import summary_markdown, write_report
from runner.tracking.mlflow import NOTE_TAG
from runner.tracking.pending import upload_in_background
from runner.tracking.uri import resolve_experiment, resolve_uri, sqlite_path
from runner.utils.errors import ConfigError
from runner.utils.secrets import redact
from runner.utils.terminal import sanitize

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun


def rebuild_report(argv: Sequence[str]) -> int:
    """Run `runner report [sweep folder, parent run id or sweep id] [tracking.uri=...]`.

    Without a sweep, the newest one: of the store or experiment if one is given, else of
    outputs/sweeps. A report made from MLflow is stored there, too.

    Args:
        argv: the words after `report`.

    Returns:
        The exit status.

    Raises:
        ConfigError: an argument that it does not take, or there is no such sweep.
        TrackingError: the store does not answer.
    """
    arguments = REPORT.parse(argv)
    sweep = arguments.words[0] if arguments.words else None
    upload_in_background(Path("outputs"))
    folder = _sweep_folder(sweep) if argv else next(iter(newest_sweeps()), None)
    if folder is not None:
        paths = write_report(load_from_folder(folder), folder)
    else:
        paths = _report_from_store(sweep, arguments.values)
    print(sanitize(paths[0].read_text()))
    print("\n".join(str(path) for path in paths))
    return 0


def store_report(
    uri: str, sweep_id: str, folder: Path, jobs: Path | None = None
) -> tuple[list[Path], SweepData]:
    """Make the report of a sweep from MLflow alone and store it with the sweep's parent run.

    Args:
        uri: the store.
        sweep_id: id of the sweep, of its parent run or of one of its jobs.
        folder: where the files are written.
        jobs: file of results to add to the parent run first, see write_job_facts().

    Returns:
        The files written, and the sweep.

    Raises:
        ConfigError: there is no such sweep.
        TrackingError: the store does not answer.
    """
    # Imports MLflow, which takes a second: not for reports from a folder.
    from runner.tracking.reader import Reader

    reader = Reader(uri)
    parent = _find_parent_run(reader, sweep_id)
    if jobs is not None:
        reader.log_artifact(parent.run_id, jobs, JOB_RESULTS_FOLDER)
    data = load_from_store(reader, parent)
    folder.mkdir(parents=True, exist_ok=True)
    paths = write_report(data, folder)
    for path in paths:
        reader.log_artifact(parent.run_id, path)
    reader.set_tag(parent.run_id, NOTE_TAG, summary_markdown(data))
    return paths, data


def is_joined_by_others(uri: str, run_id: str, own: str) -> bool:
    """Return whether a parent run holds results of other processes than that of the file `own`.

    Raises:
        TrackingError: the store does not answer.
    """
    from runner.tracking.reader import Reader

    return any(Path(path).name != own for path in Reader(uri).artifacts(run_id, JOB_RESULTS_FOLDER))


def _report_from_store(sweep: str | None, typed: Mapping[str, str]) -> list[Path]:
    uri = resolve_uri(typed.get("tracking.uri"), os.environ, Path.cwd())
    database = sqlite_path(uri)
    # Opening a database that does not exist would create it.
    if database and not database.exists():
        missing = "There is no sweep in outputs/sweeps"
        if sweep:
            missing = f"{sweep} is no sweep here"
        raise ConfigError(
            f"{missing}, and nothing was logged to {redact(uri)} yet. Type report <sweep folder>, "
            "or tracking.uri=... for another store."
        )
    if sweep is None:
        sweep = _newest_sweep(uri, typed.get("tracking.experiment"))
    return store_report(uri, sweep, report_folder(sweep))[0]


def _newest_sweep(uri: str, experiment: str | None) -> str:
    """Return the id of the newest parent run in an experiment of the store."""
    from runner.tracking.reader import Reader

    name = resolve_experiment(experiment, os.environ)
    newest = Reader(uri).newest_sweep(name)
    if newest is None:
        raise ConfigError(
            f"There is no sweep in the experiment {name!r} of {redact(uri)}. Type report "
            "<sweep folder or parent run id>."
        )
    return newest.run_id


def report_folder(sweep: str) -> Path:
    """Return the folder of a report made from MLflow; the sweep's name may hold any character."""
    name = "".join(char if char.isalnum() or char in "-_" else "_" for char in sweep)
    return Path("outputs/reports") / name


def _find_parent_run(reader: "Reader", name: str) -> "StoredRun":
    """Return the parent run of a sweep, named by its own id, a job's run id or the sweep's id."""
    # Run ids are letters and digits; another name cannot be looked up as one.
    run = reader.run(name) if name.isalnum() else None
    if run is not None and run.tags.get("role") == "sweep":
        return run
    sweep_id = run.tags.get("sweep_id", "") if run else name
    # The id becomes part of a filter of MLflow's, in which a quote ends the text.
    is_searchable = bool(sweep_id) and "'" not in sweep_id
    parent = reader.sweep(sweep_id) if is_searchable else None
    if parent is None:
        raise ConfigError(
            f"{name} is no sweep: neither a sweep's folder here, nor a parent run or a sweep id "
            f"in {redact(reader.uri)}. Type report <sweep folder or parent run id>, and "
            "tracking.uri=... for another store."
        )
    return parent


def _sweep_folder(sweep: str | None) -> Path | None:
    """Return the folder that was typed, None if the word names no folder here."""
    if sweep is None or not path_exists(sweep):
        return None
    return Path(sweep)
