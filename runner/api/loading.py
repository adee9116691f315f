"""Load runs and sweeps that have ended, from their folders or from MLflow."""

from dataclasses import replace
from pathlib import Path

from runner.api.results import RunResult
from runner.api.sweeps import SweepResult
from runner.config.overrides import path_exists
from runner.core import ConfigError, layout, secrets
from runner.sweeps.report.load import (
    find_parent_run,
    load_from_folder,
    load_from_store,
    report_folder,
    result_of_run,
)
from runner.sweeps.report.pages import write_report
from runner.tracking.uri import is_configured_store, resolve_uri, sqlite_path


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
    path = Path(where)
    if not (path_exists(str(where)) and path.is_dir()):
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
            f"{where} holds no {layout.RESULT} of a run and no {layout.MANIFEST} of a sweep. "
            "Give the folder of "
            "a run (outputs/runs/<time>) or of a sweep (outputs/sweeps/<time>)."
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
