"""Make the report of a sweep, or of two, from files: the command `report`.

A sweep is read from its folder or from MLflow alone. The jobs of two sweeps, A and B, are joined
for one report that names each job after its sweep.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.commands import REPORT
from runner.config.overrides import path_exists
from runner.core import ConfigError, files, journals, secrets, terminal
from runner.sweeps.manifest import Manifest
from runner.sweeps.report.load import JOB_RESULTS_FOLDER, load_from_folder, load_from_store
from runner.sweeps.report.pages import summary_markdown, write_report
from runner.sweeps.report.sweep_data import JobSettings, SweepData
from runner.sweeps.report.wording import join_names
from runner.sweeps.verdict.compare import BASELINE, FIRST_SWEEP, SECOND_SWEEP, group_name
from runner.tracking.dashboard import sweep_links
from runner.tracking.locate import newest_sweeps
from runner.tracking.uri import resolve_experiment, resolve_uri, sqlite_path
from runner.tracking.writer_process import upload_in_background

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun

_IGNORED_KEYS = ("tracking.", "checkpoint.resume", "sweep.")
"""Config keys that say where a job is recorded, and not what it computes."""
_QUALITY_KEYS = ("model.", "task.", "data.", "adapter.", "mode")
"""Config keys that say of what a quality is."""
MAX_DIFFERENCES = 12
"""Settings that the line of differences names."""


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep as it was asked for.

    Attributes:
        name: folder or id, as it was typed.
        date: when it began; empty if unknown.
    """

    name: str
    date: str
    data: SweepData


def rebuild_report(argv: Sequence[str]) -> int:
    """Run `runner report [sweep [sweep]] [tracking.uri=...] [--out <folder>]`.

    A sweep is a folder, a parent run's id or a sweep's id. Without one, the newest: of the store or
    experiment if one is given, else of outputs/sweeps. A report made from MLflow is stored there,
    too. The report of two sweeps is written to files alone.

    Args:
        argv: the words after `report`.

    Returns:
        The exit status.

    Raises:
        ConfigError: an argument that it does not take, there is no such sweep, or the folder takes
            no files.
        TrackingError: the store does not answer.
    """
    arguments = REPORT.parse(argv)
    out = arguments.values.get("--out")
    upload_in_background(Path("outputs"))
    try:
        if len(arguments.words) == 2:
            paths = _report_two(arguments.words, arguments.values, out)
        else:
            paths = _report_one(next(iter(arguments.words), None), arguments.values, out)
    except OSError as error:
        raise ConfigError(
            f"The report cannot be written: {error.filename or out}: "
            f"{files.os_error_reason(error)}. "
            "Type --out <folder> with a folder that takes files."
        ) from error
    print(terminal.sanitize(paths[0].read_text()))
    print("\n".join(str(path) for path in paths))
    return 0


def _report_one(sweep: str | None, typed: Mapping[str, str], out: str | None) -> list[Path]:
    """Write the report of one sweep; return the paths."""
    folder = Path(sweep) if sweep and path_exists(sweep) else None
    if sweep is None and not any(key.startswith("tracking.") for key in typed):
        folder = next(iter(newest_sweeps()), None)
    if folder is not None:
        return write_report(load_from_folder(folder), Path(out) if out else folder)
    uri = existing_store(sweep, typed)
    if sweep is None:
        from runner.tracking.reader import Reader

        name = resolve_experiment(typed.get("tracking.experiment"))
        newest = Reader(uri).newest_sweep(name)
        if newest is None:
            raise ConfigError(
                f"There is no sweep in the experiment {name!r} of {secrets.redact(uri)}. Type "
                "report "
                "<sweep folder or parent run id>."
            )
        sweep = newest.run_id
    return store_report(uri, sweep, Path(out) if out else report_folder(sweep))[0]


def _report_two(sweeps: Sequence[str], typed: Mapping[str, str], out: str | None) -> list[Path]:
    """Write the report over the jobs of two sweeps; return the paths."""
    first, second = (_load_sweep(sweep, typed) for sweep in sweeps)
    if first.data.sweep_id and first.data.sweep_id == second.data.sweep_id:
        raise ConfigError(
            f"{first.name} and {second.name} are the same sweep. Type report <A> <B> with two "
            "sweeps."
        )
    name = f"{Path(first.name).name}-and-{Path(second.name).name}"
    folder = Path(out) if out else report_folder(name)
    data = join_sweeps(first, second)
    return write_report(data, folder)


def _load_sweep(sweep: str, typed: Mapping[str, str]) -> LoadedSweep:
    """Return a sweep of a folder or of the store."""
    if path_exists(sweep):
        began_ms = Manifest.read(Path(sweep)).began_ms
        return LoadedSweep(sweep, _date(began_ms), load_from_folder(Path(sweep)))
    from runner.tracking.reader import Reader

    reader = Reader(existing_store(sweep, typed))
    parent = find_parent_run(reader, sweep)
    return LoadedSweep(sweep, _date(parent.started_ms), load_from_store(reader, parent))


def _date(unix_ms: int) -> str:
    """Return date and minute of a Unix time in milliseconds; empty for 0, which is unknown."""
    return f"{datetime.fromtimestamp(unix_ms / 1000):%Y-%m-%d %H:%M}" if unix_ms else ""


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
    parent = find_parent_run(reader, sweep_id)
    if jobs is not None:
        reader.log_artifact(parent.run_id, jobs, JOB_RESULTS_FOLDER)
    data = load_from_store(reader, parent)
    paths = write_report(data, folder)
    for path in paths:
        reader.log_artifact(parent.run_id, path)
    record = data.answer.record
    links = sweep_links(parent.experiment_id, parent.run_id, data.sweep_id)
    tags = {**record.tags, journals.NOTE_TAG: summary_markdown(data, links)}
    reader.log_answer(parent, record.metrics, tags, record.steps)
    return paths, data


def is_joined_by_others(uri: str, run_id: str, own: str) -> bool:
    """Return whether a parent run holds results of other processes than that of the file `own`.

    Raises:
        TrackingError: the store does not answer.
    """
    from runner.tracking.reader import Reader

    return any(Path(path).name != own for path in Reader(uri).artifacts(run_id, JOB_RESULTS_FOLDER))


def existing_store(sweep: str | None, typed: Mapping[str, str]) -> str:
    """Return the URI of the store that holds the sweep.

    Raises:
        ConfigError: the store is a database that does not exist.
    """
    uri = resolve_uri(typed.get("tracking.uri"))
    database = sqlite_path(uri)
    # Opening a database that does not exist would create it.
    if database and not database.exists():
        missing = f"{sweep} is no sweep here" if sweep else "There is no sweep in outputs/sweeps"
        raise ConfigError(
            f"{missing}, and nothing was logged to {secrets.redact(uri)} yet. Type report "
            "<sweep folder>, "
            "or tracking.uri=... for another store."
        )
    return uri


def report_folder(sweep: str) -> Path:
    """Return the folder of a report made from MLflow; the sweep's name may hold any character."""
    name = "".join(char if char.isalnum() or char in "-_" else "_" for char in sweep)
    return Path("outputs/reports") / name


def find_parent_run(reader: "Reader", name: str) -> "StoredRun":
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
            f"in {secrets.redact(reader.uri)}. Type report <sweep folder or parent run id>, and "
            "tracking.uri=... for another store."
        )
    return parent


def join_sweeps(first: LoadedSweep, second: LoadedSweep) -> SweepData:
    """Return the jobs of two sweeps as those of one, with a note on what differs between them.

    Raises:
        ConfigError: a sweep has no job.
    """
    jobs = []
    names = []
    for letter, sweep in ((FIRST_SWEEP, first), (SECOND_SWEEP, second)):
        if not sweep.data.jobs:
            raise ConfigError(
                f"{sweep.name} has no job that wrote a result. Type report <A> <B> with two sweeps "
                "that ran."
            )
        for job in sweep.data.jobs:
            overrides = [*job.result.overrides, f"sweep={letter}"]
            result = replace(job.result, sweep=letter, overrides=overrides)
            jobs.append(replace(job, result=result))
        names.append(f"{letter} is {', '.join(filter(None, [sweep.name, sweep.date]))}")
    both = (first.data, second.data)
    return SweepData(
        jobs,
        [command for data in both for command in data.commands],
        is_stopped=any(data.is_stopped for data in both),
        job_count=sum(max(data.job_count, len(data.jobs)) for data in both),
        fetch_failures=[failure for data in both for failure in data.fetch_failures],
        notes=[
            f"{'; '.join(names)}. Both are compared with {BASELINE} of A.",
            *_difference_notes(first, second),
        ],
        busy=max(data.busy for data in both),
        tolerance=first.data.tolerance,
    )


def _difference_notes(first: LoadedSweep, second: LoadedSweep) -> Iterator[str]:
    """Yield what the jobs of A and B ran with, where it differs, in one line, and a reservation."""
    pair = (first.data.jobs, second.data.jobs)
    names, other_names = ({group_name(job.result) for job in jobs} for jobs in pair)
    # The jobs whose groups both sweeps have; all if they share none.
    shared = names & other_names or names | other_names
    settings, others = (
        [job.read_settings() for job in jobs if group_name(job.result) in shared] for jobs in pair
    )
    if not any(each.config for each in settings) or not any(each.config for each in others):
        yield "What differs between A and B is not known: the jobs of one have no config.yaml."
        return
    keys = dict.fromkeys(key for each in (*settings, *others) for key in each.values)
    differences = []
    quality_keys = []
    for key in keys:
        values = _value_texts(key, settings)
        other_values = _value_texts(key, others)
        if values != other_values and not key.startswith(_IGNORED_KEYS):
            differences.append(f"{key} ({values or 'none'}, {other_values or 'none'})")
            quality_keys += [key] if key.startswith(_QUALITY_KEYS) else []
    if not differences:
        yield "No setting, version or commit that A and B recorded differs."
        return
    yield f"What differs (in A, in B): {join_names(differences, MAX_DIFFERENCES)}."
    if quality_keys:
        yield (
            f"The qualities of A and B are of other models, tasks or data "
            f"({join_names(quality_keys)}): their difference is not that of the precisions."
        )


def _value_texts(key: str, settings: Iterable[JobSettings]) -> str:
    """Return the values that jobs have of a key; empty if none has the key."""
    values = {each.values.get(key, "") for each in settings if each.config}
    return ", ".join(sorted(filter(None, values)))
