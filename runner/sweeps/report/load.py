"""Load a sweep's jobs with their curves and settings, from its folder or from MLflow alone.

Each process that ran jobs stores a list of their results (jobs-<time>.json) with the parent run, so
that a report made from MLflow also knows the jobs that never became a run there. What a job ran
with is in files of its folder and, for a job that was recorded, in MLflow.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core import RunResult, files, fmt, layout, run_result, secrets, terminal
from runner.sweeps.manifest import Manifest
from runner.sweeps.report.sweep_data import Job, JobSettings, SweepData
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.statistics import Tolerance
from runner.tracking import history
from runner.tracking.result_table import read_results

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun

JOB_RESULTS_FOLDER = "jobs"
"""Folder of the parent run's artifacts that holds the lists of results."""
_CURVE_METRICS = (
    "train/loss",
    "val/loss",
    "val/accuracy",
    "val/perplexity",
    "val/iou",
    "loss_scale/changes",
    "loss_scale/overflow",
)
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


def load_from_folder(folder: Path, is_stopped: bool = False) -> SweepData:
    """Load a sweep whose jobs ran here."""
    manifest = Manifest.read(folder)
    jobs = []
    for result in read_results(folder):
        # A result names the folder where its job ran; the sweep may have been moved since.
        job_folder = folder / Path(result.folder).name
        curves = history.from_folder(job_folder)
        text = ""
        with suppress(OSError, ValueError):
            text = files.read_text(job_folder / layout.ROUTERS)
        settings = partial(read_settings, job_folder)
        jobs.append(Job(result, curves, settings, _router_choices(text)))
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
    for values in chain.from_iterable(facts.results for facts in stored):
        # Entries that cannot be read are skipped.
        with suppress(ValueError):
            result = RunResult.from_json(values)
            # A result without a run id belongs to the run that names its folder.
            run_id = result.run_id or run_ids.get(result.folder)
            results.append(replace(result, run_id=run_id))
    requests = [AdviseRequest.from_json(facts.request) for facts in stored]
    request = next(filter(None, reversed(requests)), None)
    tolerance = Tolerance()
    for facts in stored:
        with suppress(ValueError):
            tolerance = Tolerance(**files.dataclass_fields_from_json(Tolerance, facts.tolerance))
    # A process that was killed stored no list: its jobs are known by their runs alone.
    listed_ids = {result.run_id for result in results}
    unlisted = [run for run in runs.values() if run.run_id not in listed_ids]
    results += [result_of_run(reader, run) for run in unlisted]
    if not request:
        results = with_unique_names(results)
    jobs = []
    for result in results:
        job = Job(result)
        run = runs.get(result.run_id or "")
        if run is not None:
            # The exact history that the run stored, else the store's own points.
            curves = reader.history(run.run_id, _CURVE_METRICS)
            has_routers = any(name.startswith("experts/") for name in run.metrics)
            text = has_routers and reader.artifact_or_notice(run.run_id, layout.ROUTERS)
            settings_reader = partial(stored_settings, reader, run)
            job = Job(result, curves, settings_reader, _router_choices(text or ""))
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


def _router_choices(text: str | bytes) -> dict[str, Any]:
    """Return what a run's file says of its routers; empty for a missing or damaged one."""
    content = None
    with suppress(ValueError):
        content = json.loads(text)
    return content if isinstance(content, dict) else {}


def with_unique_names(results: Sequence[RunResult]) -> list[RunResult]:
    """Rename the jobs of joined sweeps by all settings that differ, if their names are ambiguous.

    A sweep names its jobs by what it varied itself. In a sweep that others joined, one name may
    then stand for different settings, and different names for the same ones.
    """
    # A result that was made from tags has no overrides and is not renamed.
    known = [result for result in results if result.overrides]
    named_settings = {(tuple(result.settings), _compared_overrides(result)) for result in known}
    names = {name for name, _ in named_settings}
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
        # A damaged list leaves the jobs to their own runs.
        with suppress(ValueError):
            content = json.loads(reader.artifact_or_notice(parent.run_id, path) or b"{}")
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
    for each in fields(RunResult):
        for name in each.metadata.get("stored", "").split():
            if name in run.tags or name in run.metrics:
                values[each.name] = run.tags.get(name, run.metrics.get(name))
    # The time of emulated arithmetic says nothing about the precision.
    if run.tags.get("emulated"):
        values |= {"kernels": "emulated", "examples_per_second": None, "step_ms": None}
    if run.status not in _STATUS_BY_RUN_STATUS:
        values["error"] = _UNKNOWN_STATUS
    known = ("val/iou", "val/accuracy", "val/loss")
    quality = next((key for key in known if key in run.metrics), "")
    direction: Any = "max" if quality in known[:2] else "min"
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
        caveats=list(filter(None, [run.tags.get("caveats", "")])),
        **values,
        **location,
    )


def read_settings(folder: Path) -> JobSettings:
    """Return the settings of a run from its folder."""
    texts = []
    for name in (layout.CONFIG, layout.ENVIRONMENT):
        text = ""
        # A file that is missing or cannot be read says nothing.
        with suppress(OSError, ValueError):
            text = files.read_text(folder / name)
        texts.append(text)
    return JobSettings.of_texts(*texts)


def stored_settings(reader: "Reader", run: "StoredRun") -> JobSettings:
    """Return the settings of a run from MLflow.

    Raises:
        TrackingError: the store does not answer.
    """
    data = [
        reader.artifact_or_notice(run.run_id, name) or b""
        for name in (layout.CONFIG, layout.ENVIRONMENT)
    ]
    return JobSettings.of_texts(*(content.decode(errors="replace") for content in data))
