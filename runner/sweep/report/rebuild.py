"""`runner report`: a sweep's report made again, from its folder or from MLflow alone."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.sweep.report.jobs import SweepData
from runner.sweep.report.load import JOBS, load_from_folder, load_from_store
from runner.sweep.report.pages import summary_markdown, write_report
from runner.tracking.mlflow import NOTE_TAG
from runner.tracking.pending import upload_in_background
from runner.tracking.uri import resolve_experiment, resolve_uri, sqlite_path
from runner.utils.errors import ConfigError, RunnerError
from runner.utils.layout import MANIFEST
from runner.utils.secrets import redact
from runner.utils.terminal import print_error, sanitize

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun


def rebuild_report(argv: Sequence[str]) -> int:
    """`runner report [sweep folder, parent run id or sweep id] [tracking.uri=...]`; the newest
    sweep where none is given: of the store or experiment that is, else of outputs/sweeps. What is
    made from MLflow is stored there again, too."""
    try:
        where, uri, experiment = _arguments(argv)
        upload_in_background(Path("outputs"))
        if where is not None and Path(where).exists():
            paths = write_report(load_from_folder(Path(where)), Path(where))
        elif not argv and (newest := _newest_folder()):
            paths = write_report(load_from_folder(newest), newest)
        else:
            paths = _from_store(where, uri, experiment)
    except RunnerError as error:
        print_error(str(error))
        return error.exit_status
    print(sanitize(paths[0].read_text()))
    print("\n".join(str(path) for path in paths))
    return 0


def store_report(
    uri: str, sweep_id: str, folder: Path, jobs: Path | None = None
) -> tuple[list[Path], SweepData]:
    """Make the report of a sweep from MLflow alone and keep it with its parent run, too.

    Args:
        uri: the store.
        sweep_id: of the sweep, or its parent run's id.
        folder: where the files are written.
        jobs: results to add to the parent run first.

    Returns:
        The files written, and what they tell of.

    Raises:
        ConfigError: there is no such sweep.
        TrackingError: the store does not answer.
    """
    from runner.tracking.reader import Reader

    reader = Reader(uri)
    parent = _parent(reader, sweep_id)
    if jobs is not None:
        reader.add(parent.run_id, jobs, JOBS)
    data = load_from_store(reader, parent)
    folder.mkdir(parents=True, exist_ok=True)
    paths = write_report(data, folder)
    for path in paths:
        reader.add(parent.run_id, path)
    reader.tag(parent.run_id, NOTE_TAG, summary_markdown(data))
    return paths, data


def is_joined_by_others(uri: str, run_id: str, own: str) -> bool:
    """Whether this parent run holds results of other processes than the one whose file is `own`.

    Raises:
        TrackingError: the store does not answer.
    """
    from runner.tracking.reader import Reader

    return any(Path(path).name != own for path in Reader(uri).artifacts(run_id, JOBS))


def _from_store(where: str | None, uri: str | None, experiment: str | None) -> list[Path]:
    from runner.tracking.reader import Reader

    uri = resolve_uri(uri, os.environ, Path.cwd())
    if (database := sqlite_path(uri)) and not database.exists():
        missing = f"{where} is no sweep here" if where else "There is no sweep in outputs/sweeps"
        raise ConfigError(
            f"{missing}, and nothing was logged to {redact(uri)} yet. Type report <sweep folder>, "
            "or tracking.uri=... for another store."
        )
    if where is None:
        name = resolve_experiment(experiment, os.environ)
        newest = Reader(uri).newest_sweep(name)
        if newest is None:
            raise ConfigError(
                f"There is no sweep in the experiment {name!r} of {redact(uri)}. Type report "
                "<sweep folder or parent run id>."
            )
        where = newest.run_id
    return store_report(uri, where, _new_folder(where))[0]


def _new_folder(sweep: str) -> Path:
    name = "".join(char if char.isalnum() or char in "-_" else "_" for char in sweep)
    return Path("outputs/reports") / name


def _parent(reader: "Reader", where: str) -> "StoredRun":
    """The parent run that a run's or a sweep's id names; a job's id names its sweep's."""
    run = reader.run(where) if where.isalnum() else None
    if run is not None and run.tags.get("role") == "sweep":
        return run
    sweep_id = run.tags.get("sweep_id", "") if run else where
    plain = "'" not in sweep_id and sweep_id
    found = reader.sweep(sweep_id) if plain else None
    if found is None:
        raise ConfigError(
            f"{where} is no sweep: neither a sweep's folder here, nor a parent run or a sweep id "
            f"in {redact(reader.uri)}. Type report <sweep folder or parent run id>, and "
            "tracking.uri=... for another store."
        )
    return found


def _newest_folder() -> Path | None:
    found = sorted(Path("outputs/sweeps").glob(f"*/{MANIFEST}"))
    return found[-1].parent if found else None


def _arguments(argv: Sequence[str]) -> tuple[str | None, str | None, str | None]:
    given: dict[str, str] = {}
    for text in argv:
        key, mark, value = text.partition("=")
        if mark and key not in ("tracking.uri", "tracking.experiment"):
            raise ConfigError(
                f"report does not take {text}. Allowed: a sweep, tracking.uri=..., "
                "tracking.experiment=..."
            )
        key, value = (key, value) if mark else ("sweep", text)
        if key in given:
            raise ConfigError(f"report takes one sweep, and was given: {' '.join(argv)}.")
        given[key] = value
    return given.get("sweep"), given.get("tracking.uri"), given.get("tracking.experiment")
