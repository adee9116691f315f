"""Load a sweep from its folder or from MLflow alone, and make its report anew: `runner report`.

Each process that ran jobs stores a list of their results (jobs-<time>.json) with the parent run, so
that a report made from MLflow also knows the jobs that never became a run there. What a job ran
with is in files of its folder and, for a job that was recorded, in MLflow.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core import (
    ConfigError,
    RunResult,
    files,
    fmt,
    journals,
    layout,
    run_result,
    secrets,
    terminal,
)
from runner.output.console import plain_console
from runner.sweeps.manifest import Manifest
from runner.sweeps.report.pages import print_answer, summary_markdown, write_report
from runner.sweeps.report.sweep_data import Job, JobSettings, SweepData, json_mapping
from runner.sweeps.report.wording import join_names
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.compare import BASELINE, FIRST_SWEEP, SECOND_SWEEP, group_name
from runner.sweeps.verdict.statistics import Tolerance
from runner.tracking import history
from runner.tracking.dashboard import sweep_links
from runner.tracking.locate import newest_sweeps
from runner.tracking.result_table import read_results
from runner.tracking.uri import resolve_experiment, resolve_uri, sqlite_path
from runner.tracking.writer_process import upload_in_background

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun

JOB_RESULTS_FOLDER = "jobs"
"""Folder of the parent run's artifacts that holds the lists of results."""
_CURVE_METRICS = ("train/loss", "val/loss", "val/accuracy", "val/perplexity", "val/iou")
_STATUS_BY_RUN_STATUS: dict[str, run_result.Status] = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
}
_UNKNOWN_STATUS = "Status unknown: still running, or killed without writing a result."
_IGNORED_OVERRIDE = re.compile(
    r"[+~]*(seed|precision|mode|tracking\b.*|hydra\b.*|data\.root|train\.num_workers)="
)
"""Overrides in which two jobs may differ and still be compared."""
_IGNORED_KEYS = ("tracking.", "checkpoint.resume", "sweep.")
"""Config keys that say where a job is recorded, and not what it computes."""
_QUALITY_KEYS = ("model.", "task.", "data.", "adapter.", "mode")
"""Config keys that say of what a quality is."""
MAX_DIFFERENCES = 12
"""Settings that the line of differences names."""


def load_from_folder(folder: Path, is_stopped: bool = False) -> SweepData:
    """Load a sweep whose jobs ran here."""
    manifest = Manifest.read(folder)
    jobs = []
    for result in read_results(folder):
        # A result names the folder where its job ran; the sweep may have been moved since.
        job_folder = folder / Path(result.folder).name
        if not Path(result.folder).is_dir():
            result = replace(result, folder=str(job_folder))
        curves = history.from_folder(job_folder)
        routers = json_mapping(_read_text(job_folder, layout.ROUTERS))
        jobs.append(Job(result, curves, partial(read_settings, job_folder), routers))
    commands = [terminal.quote_command(manifest.command)]
    lists = [text.partition("=")[2] for text in manifest.overrides if text.startswith("precision=")]
    return SweepData(
        jobs,
        commands,
        manifest.id,
        is_stopped,
        manifest.jobs,
        AdviseRequest.read(folder),
        busy=manifest.busy,
        swept_precisions=lists[-1].split(",") if lists else (),
        folder=str(folder),
        tolerance=Tolerance(manifest.tolerance, manifest.max_gap),
    )


@dataclass(frozen=True)
class JobFacts:
    """What a process that ran jobs stores with the parent run when it ends.

    Attributes:
        request: fields of AdviseRequest; empty for a sweep of another mode.
        results: fields of RunResult of each job, those that never became a run there included.
    """

    commands: Sequence[str] = ()
    stopped: bool = False
    busy: float = 0.0
    requested_jobs: int = 0
    tolerance: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    results: Sequence[Mapping[str, Any]] = ()


def write_job_facts(folder: Path, data: SweepData, began_ms: int) -> Path:
    """Write what is stored of the jobs that ran here; return the path."""
    facts = JobFacts(
        data.commands,
        data.is_stopped,
        data.busy,
        data.job_count,
        asdict(data.tolerance),
        asdict(data.request) if data.request else {},
        [asdict(job.result) for job in data.jobs],
    )
    return files.write_json(folder / f"jobs-{began_ms}.json", asdict(facts))


def load_from_store(reader: "Reader", parent: "StoredRun") -> SweepData:
    """Load a sweep from MLflow, on however many machines its jobs ran."""
    stored = [*_stored_lists(reader, parent)]
    runs = {run.run_id: run for run in reader.jobs(parent)}
    run_ids = {run.tags.get("output_dir"): run.run_id for run in runs.values()}
    results: list[RunResult] = []
    request = None
    tolerance = Tolerance()
    # Entries that cannot be read are skipped.
    for facts in stored:
        request = AdviseRequest.from_json(facts.request) or request
        with suppress(ValueError):
            tolerance = Tolerance(**files.dataclass_fields_from_json(Tolerance, facts.tolerance))
        for values in facts.results:
            with suppress(ValueError):
                result = RunResult.from_json(values)
                # A result without a run id belongs to the run that names its folder.
                run_id = result.run_id or run_ids.get(result.folder)
                results.append(replace(result, run_id=run_id))
    # A process that was killed stored no list: its jobs are known by their runs alone.
    listed = {result.run_id for result in results}
    results += [result_of_run(reader, run) for key, run in runs.items() if key not in listed]
    if not request:
        results = with_unique_names(results)
    jobs = []
    for result in results:
        job = Job(result)
        run = runs.get(result.run_id or "")
        if run:
            # The exact history that the run stored, else the store's own points.
            curves = reader.history(run.run_id, _CURVE_METRICS)
            has_routers = any(name.startswith("experts/") for name in run.metrics)
            text = has_routers and reader.artifact_or_notice(run.run_id, layout.ROUTERS)
            settings_reader = partial(stored_settings, reader, run)
            job = Job(result, curves, settings_reader, json_mapping(text or ""))
        jobs.append(job)
    commands = [command for facts in stored for command in facts.commands]
    return SweepData(
        jobs,
        commands or [parent.tags.get("command", "")],
        parent.tags.get("sweep_id", ""),
        parent.status == "KILLED" or any(facts.stopped for facts in stored),
        sum(facts.requested_jobs for facts in stored),
        request,
        tuple(reader.notices),
        busy=max((facts.busy for facts in stored), default=0.0),
        tolerance=tolerance,
    )


def with_unique_names(results: Sequence[RunResult]) -> list[RunResult]:
    """Rename the jobs of joined sweeps by all settings that differ, if their names are ambiguous.

    A sweep names its jobs by what it varied itself. In a sweep that others joined, one name may
    then stand for different settings, and different names for the same ones.
    """
    # A result that was made from tags has no overrides and is not renamed.
    known = [result for result in results if result.overrides]
    named_settings = {(tuple(result.settings), _compared_overrides(result)) for result in known}
    names = dict(named_settings)
    settings = {overrides for _, overrides in named_settings}
    # One name for each set of overrides and the other way round: the names are not ambiguous.
    if len(names) == len(settings) == len(named_settings):
        return [*results]

    common = frozenset.intersection(*settings)
    has_seeds = len({result.seed for result in known}) > 1
    renamed = []
    for result in results:
        if result.overrides:
            distinct = _compared_overrides(result) - common
            own = sorted(map(fmt.shorten_override, distinct))
            group = " ".join([result.precision, *own])
            seed = f" seed={result.seed}" if has_seeds and result.seed is not None else ""
            result = replace(result, settings=own, group=group, label=f"{group}{seed}")
        renamed.append(result)
    return renamed


def _compared_overrides(result: RunResult) -> frozenset[str]:
    """Return the overrides that two jobs must share to be seeds of one group."""
    return frozenset(text for text in result.overrides if not _IGNORED_OVERRIDE.match(text))


def _stored_lists(reader: "Reader", parent: "StoredRun") -> Iterator[JobFacts]:
    """Yield what the processes that ran the jobs stored with the parent run when they ended."""
    for path in sorted(reader.artifacts(parent.run_id, JOB_RESULTS_FOLDER)):
        content = json_mapping(reader.artifact_or_notice(parent.run_id, path) or "")
        # A damaged list leaves the jobs to their own runs.
        with suppress(ValueError):
            if not content:
                continue
            yield JobFacts(**files.dataclass_fields_from_json(JobFacts, content))


def result_of_run(reader: "Reader", run: "StoredRun") -> RunResult:
    """Return the result of a run that no list names: its own file, else its tags and metrics."""
    location: dict[str, Any] = {
        "run_id": run.run_id,
        "experiment_id": run.experiment_id,
        "tracking_uri": secrets.redact(reader.uri),
    }
    # A damaged result is as good as none.
    with suppress(ValueError):
        data = reader.artifact_or_notice(run.run_id, layout.RESULT)
        if data:
            return replace(RunResult.from_json(json.loads(data)), **location)
    values: dict[str, Any] = {"folder": "", "precision": ""}
    stored = {**run.metrics, **run.tags}
    for each in fields(RunResult):
        for name in each.metadata.get("stored", "").split():
            if name in stored:
                values[each.name] = stored[name]
    # The time of emulated arithmetic says nothing about the precision.
    if run.tags.get("emulated"):
        values |= {"kernels": "emulated", "examples_per_second": None, "step_ms": None}
    if run.status not in _STATUS_BY_RUN_STATUS:
        values["error"] = _UNKNOWN_STATUS
    known = {"val/iou": "max", "val/accuracy": "max", "val/loss": "min"}
    quality = next((key for key in known if key in run.metrics), "")
    direction: Any = known.get(quality, "min")
    if run.tags.get("quality") in run.metrics:  # task.quality names it
        quality = run.tags["quality"]
        direction = run.tags.get("direction", direction)
    seed = run.params.get("seed", "")
    settings = run.tags.get("settings", "").split()
    skipped = run.metrics.get("loss_scale/skipped_steps")
    return RunResult(
        label=run.name,
        group=" ".join([values["precision"], *settings]),
        settings=settings,
        status=_STATUS_BY_RUN_STATUS.get(run.status, "stopped"),
        seed=int(seed) if seed.isdecimal() else None,
        metrics={key: v for key, v in run.metrics.items() if key.startswith(("val/", "test/"))},
        quality=quality,
        direction=direction,
        skipped_steps=None if skipped is None else int(skipped),
        caveats=[run.tags["caveats"]] if run.tags.get("caveats") else [],
        **values,
        **location,
    )


def read_settings(folder: Path) -> JobSettings:
    """Return the settings of a run from its folder."""
    return JobSettings.of_texts(
        _read_text(folder, layout.CONFIG), _read_text(folder, layout.ENVIRONMENT)
    )


def _read_text(folder: Path, name: str) -> str:
    """Return the text of a file; a file that is missing or cannot be read says nothing."""
    with suppress(OSError, ValueError):
        return files.read_text(folder / name)
    return ""


def stored_settings(reader: "Reader", run: "StoredRun") -> JobSettings:
    """Return the settings of a run from MLflow.

    Raises:
        TrackingError: the store does not answer.
    """
    names = (layout.CONFIG, layout.ENVIRONMENT)
    contents = (reader.artifact_or_notice(run.run_id, name) or b"" for name in names)
    return JobSettings.of_texts(*(content.decode(errors="replace") for content in contents))


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


def rebuild_report(sweeps: Sequence[str], typed: Mapping[str, str]) -> int:
    """Run `runner report [sweep [sweep]] [tracking.uri=...] [--out <folder>]`.

    A sweep is a folder, a parent run's id or a sweep's id. Without one, the newest: of the store or
    experiment if one is given, else of outputs/sweeps. A report made from MLflow is stored there,
    too. The report of two sweeps is written to files alone.

    Args:
        sweeps: two at most.
        typed: values of the options, by their keys.

    Returns:
        The exit status.

    Raises:
        ConfigError: there is no such sweep, or the folder takes no files.
        TrackingError: the store does not answer.
    """
    out = typed.get("--out")
    folder = Path(out) if out else None
    upload_in_background(Path("outputs"))
    try:
        report = _report_two if len(sweeps) == 2 else _report_one
        paths, data = report(sweeps, typed, folder)
    except OSError as error:
        raise ConfigError(
            f"The report cannot be written: {error.filename or out}: "
            f"{files.os_error_reason(error)}. "
            "Type --out <folder> with a folder that takes files."
        ) from error
    console = plain_console()
    print_answer(console, data)
    console.print("\n".join(["", *map(str, paths)]), soft_wrap=True)
    return 0


def _report_one(
    sweeps: Sequence[str], typed: Mapping[str, str], out: Path | None
) -> tuple[list[Path], SweepData]:
    """Write the report of one sweep; return the paths and the sweep."""
    sweep = next(iter(sweeps), None)
    folder = Path(sweep) if sweep and files.path_exists(sweep) else None
    if sweep is None and not any(key.startswith("tracking.") for key in typed):
        folder = next(iter(newest_sweeps()), None)
    if folder:
        data = load_from_folder(folder)
        return write_report(data, out or folder), data
    reader = existing_store(sweep, typed)
    if sweep is None:
        name = resolve_experiment(typed.get("tracking.experiment"))
        newest = reader.newest_sweep(name)
        if not newest:
            raise ConfigError(
                f"There is no sweep in the experiment {name!r} of {secrets.redact(reader.uri)}. "
                "Type report <sweep folder or parent run id>."
            )
        sweep = newest.run_id
    return store_report(reader, sweep, out or report_folder(sweep))


def _report_two(
    sweeps: Sequence[str], typed: Mapping[str, str], out: Path | None
) -> tuple[list[Path], SweepData]:
    """Write the report over the jobs of two sweeps; return the paths and the jobs."""
    first, second = (load_sweep(sweep, typed) for sweep in sweeps)
    if first.data.sweep_id and first.data.sweep_id == second.data.sweep_id:
        raise ConfigError(
            f"{first.name} and {second.name} are the same sweep. Type report <A> <B> with two "
            "sweeps."
        )
    name = "-and-".join(Path(sweep).name for sweep in sweeps)
    data = join_sweeps(first, second)
    return write_report(data, out or report_folder(name)), data


def load_sweep(sweep: str, typed: Mapping[str, str]) -> LoadedSweep:
    """Return a sweep of a folder or of the store."""
    if files.path_exists(sweep):
        began_ms = Manifest.read(Path(sweep)).began_ms
        return LoadedSweep(sweep, _date(began_ms), load_from_folder(Path(sweep)))
    reader = existing_store(sweep, typed)
    parent = find_parent_run(reader, sweep)
    return LoadedSweep(sweep, _date(parent.started_ms), load_from_store(reader, parent))


def _date(unix_ms: int) -> str:
    """Return date and minute of a Unix time in milliseconds; empty for 0, which is unknown."""
    return f"{datetime.fromtimestamp(unix_ms / 1000):%Y-%m-%d %H:%M}" if unix_ms else ""


def store_report(
    reader: "Reader", sweep_id: str, folder: Path, jobs: Path | None = None
) -> tuple[list[Path], SweepData]:
    """Make the report of a sweep from MLflow alone and store it with the sweep's parent run.

    Args:
        reader: of the store.
        sweep_id: id of the sweep, of its parent run or of one of its jobs.
        folder: where the files are written.
        jobs: file of results to add to the parent run first, see write_job_facts().

    Returns:
        The files written, and the sweep.

    Raises:
        ConfigError: there is no such sweep.
        TrackingError: the store does not answer.
    """
    parent = find_parent_run(reader, sweep_id)
    if jobs:
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


def is_joined_by_others(reader: "Reader", run_id: str, own: str) -> bool:
    """Return whether a parent run holds results of other processes than that of the file `own`.

    Raises:
        TrackingError: the store does not answer.
    """
    return any(Path(path).name != own for path in reader.artifacts(run_id, JOB_RESULTS_FOLDER))


def existing_store(sweep: str | None, typed: Mapping[str, str]) -> "Reader":
    """Return a reader of the store that holds the sweep.

    Raises:
        ConfigError: the store is a database that does not exist.
    """
    # Imports MLflow, which takes a second: not for reports from a folder.
    from runner.tracking.reader import Reader

    uri = resolve_uri(typed.get("tracking.uri"))
    database = sqlite_path(uri)
    # Opening a database that does not exist would create it.
    if database and not database.exists():
        missing = f"{sweep} is no sweep here" if sweep else "There is no sweep in outputs/sweeps"
        raise ConfigError(
            f"{missing}, and nothing was logged to {secrets.redact(uri)} yet. Type report "
            "<sweep folder>, or tracking.uri=... for another store."
        )
    return Reader(uri)


def report_folder(sweep: str) -> Path:
    """Return the folder of a report made from MLflow; the sweep's name may hold any character."""
    return Path("outputs/reports") / re.sub(r"[^\w-]", "_", sweep)


def find_parent_run(reader: "Reader", name: str) -> "StoredRun":
    """Return the parent run of a sweep, named by its own id, a job's run id or the sweep's id."""
    # Run ids are letters and digits; another name cannot be looked up as one.
    run = reader.run(name) if name.isalnum() else None
    if run and run.tags.get("role") == "sweep":
        return run
    sweep_id = run.tags.get("sweep_id", "") if run else name
    # The id becomes part of a filter of MLflow's, in which a quote ends the text.
    parent = reader.sweep(sweep_id) if sweep_id and "'" not in sweep_id else None
    if not parent:
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
    a, b = first.data, second.data
    return SweepData(
        jobs,
        [*a.commands, *b.commands],
        is_stopped=a.is_stopped or b.is_stopped,
        job_count=max(a.job_count, len(a.jobs)) + max(b.job_count, len(b.jobs)),
        fetch_failures=[*a.fetch_failures, *b.fetch_failures],
        notes=[
            f"{'; '.join(names)}. Both are compared with {BASELINE} of A.",
            *_difference_notes(first, second),
        ],
        busy=max(a.busy, b.busy),
        tolerance=a.tolerance,
    )


def _difference_notes(first: LoadedSweep, second: LoadedSweep) -> Iterator[str]:
    """Yield what the jobs of A and B ran with, where it differs, in one line, and a reservation."""
    pair = (first.data.jobs, second.data.jobs)
    names, other_names = ({group_name(job.result) for job in jobs} for jobs in pair)
    # The jobs whose groups both sweeps have; all if they share none.
    shared = names & other_names or names | other_names
    values, others = (
        _known_values(job for job in jobs if group_name(job.result) in shared) for jobs in pair
    )
    if not values or not others:
        yield "What differs between A and B is not known: the jobs of one have no config.yaml."
        return
    differences = []
    quality_keys = []
    for key in {**values, **others}:
        own, other = (", ".join(sorted(each.get(key, ()))) for each in (values, others))
        if own != other and not key.startswith(_IGNORED_KEYS):
            differences.append(f"{key} ({own or 'none'}, {other or 'none'})")
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


def _known_values(jobs: Iterable[Job]) -> dict[str, set[str]]:
    """Return the values that jobs ran with, by key; empty where no job has a config."""
    values: dict[str, set[str]] = {}
    for settings in (job.read_settings() for job in jobs):
        known = {**settings.config, **settings.environment} if settings.config else {}
        for key, value in known.items():
            values.setdefault(key, set()).update({value} - {""})
    return values
