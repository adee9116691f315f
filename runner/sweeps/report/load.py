"""Load a sweep's jobs with their curves and settings, from its folder or from MLflow alone.

Each process that ran jobs stores a list of their results (jobs-<time>.json) with the parent run, so
that a report made from MLflow also knows the jobs that never became a run there. What a job ran
with is in files of its folder and, for a job that was recorded, in MLflow.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml

from runner.config.annotations import dataclass_fields_from_json
from runner.config.resolve import leaves
from runner.modes.result import RunResult, Status, read_results, shared_settings
from runner.sweeps.manifest import Manifest
from runner.sweeps.report.wording import join_names
from runner.sweeps.sweep_resume import resume_text
from runner.sweeps.verdict.compare import BASELINE, Comparison, compare_with_baselines, group_name
from runner.sweeps.verdict.ranking import Advice, rank_precisions
from runner.sweeps.verdict.settings import AdviseSettings
from runner.sweeps.verdict.statistics import Tolerance
from runner.tracking import history
from runner.tracking.history import Curve
from runner.utils.errors import ConfigError
from runner.utils.files import MAX_CONFIG_BYTES, check_values, read_text, write_json
from runner.utils.formatting import format_percent, shorten_override
from runner.utils.layout import CONFIG, ENVIRONMENT, GIT_KEYS, RESULT, ROUTERS
from runner.utils.other_programs import busy_sentence
from runner.utils.secrets import redact
from runner.utils.terminal import quote_command

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
_STATUS_BY_RUN_STATUS: dict[str, Status] = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
}
MIN_LEARNING_STEPS = 20
"""Recorded losses of a job from which on they say whether it has learned."""
_UNKNOWN_STATUS = "Status unknown: still running, or killed without writing a result."
_IGNORED_OVERRIDE = re.compile(
    r"[+~]*(seed|precision|mode|tracking\b.*|hydra\b.*|data\.root|train\.num_workers)="
)
"""Overrides in which two jobs may differ and still be compared."""
_MACHINE_FACTS = ("python", "platform", "cuda", "threads", *GIT_KEYS)


@dataclass(frozen=True)
class JobSettings:
    """What a job ran with; what is not known of it is missing.

    Attributes:
        config: values of the resolved config by dotted key, as YAML writes them.
        environment: python, platform, cuda, threads, commit and the version of each package.
    """

    config: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, str]:
        """Return the config and the environment together."""
        return {**self.config, **self.environment}

    @classmethod
    def of_texts(cls, config: str, environment: str) -> "JobSettings":
        """Return the settings that the texts of a run's two files hold; damaged ones hold none."""
        facts: Any = {}
        with suppress(ValueError):
            facts = json.loads(environment)
        if not isinstance(facts, dict):
            return cls(flat_config(config))
        known = {name: facts.get(name) for name in _MACHINE_FACTS}
        packages = facts.get("packages")
        if isinstance(packages, dict):
            known |= packages
        texts = {str(name): str(value) for name, value in known.items() if value is not None}
        return cls(flat_config(config), texts)


@dataclass(frozen=True)
class Job:
    """One job: its result, and its metrics over the steps exactly as they were recorded.

    Attributes:
        curves: by metric name, see _CURVE_METRICS; empty for a job that never trained.
        read_settings: reads what the job ran with, which not every report needs.
        router_choices: of a mixture of experts, the experts of each token in the first step, by
            layer.
    """

    result: RunResult
    curves: Mapping[str, Curve] = field(default_factory=dict)
    read_settings: Callable[[], JobSettings] = JobSettings
    router_choices: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepData:
    """A sweep, complete or in part.

    Attributes:
        jobs: in the order in which the command asked for them.
        commands: the commands typed, one per machine or process that took part.
        is_stopped: whether a signal ended it before its last job.
        job_count: how many jobs it has, those that never began included; 0 if unknown.
        advise_settings: of mode=advise; None for a sweep that the user laid out.
        fetch_failures: artifacts of the store that could not be fetched, and why.
        notes: sentences on the jobs of two sweeps, see join_sweeps.
        busy: share of the processors that other programs kept busy, where jobs trained on a CPU.
        swept_precisions: precisions that the command lists.
        folder: of the sweep, if it can be resumed here; else empty.
        tolerance: accepted loss above the baseline's.
    """

    jobs: Sequence[Job]
    commands: Sequence[str] = ()
    sweep_id: str = ""
    is_stopped: bool = False
    job_count: int = 0
    advise_settings: AdviseSettings | None = None
    fetch_failures: Sequence[str] = ()
    notes: Sequence[str] = ()
    busy: float = 0.0
    swept_precisions: Sequence[str] = ()
    folder: str = ""
    tolerance: Tolerance = field(default_factory=Tolerance)

    @property
    def results(self) -> list[RunResult]:
        """Return the result of each job."""
        return [job.result for job in self.jobs]

    @property
    def compared(self) -> list[Comparison]:
        """Return each group of jobs that differ in their seeds alone, against its baseline."""
        return compare_with_baselines(self.results, self.busy, self.tolerance, self.untrained)

    @property
    def resume_command(self) -> str:
        """Return what resumes the sweep here; empty if it cannot be."""
        return resume_text(self.folder) if self.folder else ""

    @property
    def is_unfinished(self) -> bool:
        """Return whether resuming the sweep would run a job.

        That is one that did not begin, was stopped, or failed for another reason than its numbers.
        """
        # A trial of mode=advise that fails is an answer about its precision.
        if self.advise_settings:
            return self.is_stopped
        if self.is_stopped or self.missing_jobs_clause:
            return True
        # A job that diverged would diverge again.
        repeatable = {result.status for result in self.results if not result.diverged}
        return bool(repeatable & {"failed", "stopped"})

    @property
    def advice(self) -> Advice | None:
        """Return the answer of mode=advise, None for any other sweep."""
        if self.advise_settings is None:
            return None
        return rank_precisions(self.results, self.advise_settings, self.untrained)

    @property
    def router_flips(self) -> dict[str, dict[str, float]]:
        """Return by group and layer the share of tokens whose experts are others than in 32-true.

        It is of the first step, on equal weights and batches, and the mean over seeds. Empty for
        models without routers.
        """

        def key(job: Job) -> tuple[object, ...]:
            return job.result.seed, job.result.device, shared_settings(job.result.settings)

        baselines = {key(job): job for job in self.jobs if job.result.precision == BASELINE}
        shares: dict[str, dict[str, list[float]]] = {}
        for job in self.jobs:
            own = baselines.get(key(job), job)
            for layer, chosen in job.router_choices.items():
                base = own.router_choices.get(layer, ())
                if own is not job and len(chosen) == len(base) > 0:
                    of_layer = shares.setdefault(group_name(job.result), {}).setdefault(layer, [])
                    of_layer.append(fmean(a != b for a, b in zip(chosen, base, strict=True)))
        return {
            group: {layer: fmean(values) for layer, values in layers.items()}
            for group, layers in shares.items()
        }

    @property
    def flips_sentence(self) -> str:
        """Return how many tokens routers sent to other experts; empty without routers."""
        flips = {name: fmean(layers.values()) for name, layers in self.router_flips.items()}
        texts = join_names(f"{name} {format_percent(share)}" for name, share in flips.items())
        start = f"Tokens with other experts than in {BASELINE}, in the first step"
        return f"{start}: {texts}." if flips else ""

    @property
    def speed_reservation(self) -> str:
        """Return that other programs were busy, where jobs trained on a CPU; else empty."""
        return busy_sentence(self.busy) if any(job.is_on_cpu for job in self.results) else ""

    @property
    def untrained(self) -> list[RunResult]:
        """Return the results of the jobs that ended with no lower training loss than that of the
        weights that they began with."""
        found = []
        for job in self.jobs:
            curve = job.curves.get("train/loss")
            is_finished = job.result.outcome == "finished"
            if not is_finished or curve is None or curve.shape[-1] < MIN_LEARNING_STEPS:
                continue
            steps, _, losses = curve
            # The first step's loss is of the weights before any update.
            if steps[0] == 1 and losses[-len(losses) // 10 :].mean() >= losses[0]:
                found.append(job.result)
        return found

    @property
    def untrained_sentence(self) -> str:
        """Return which jobs have learned nothing; empty without any."""
        names = [result.label for result in self.untrained]
        start = f"The training loss of {join_names(names)} ended no lower than in the first step"
        return f"{start}: where nothing is learned, precisions do not differ." if names else ""

    @property
    def no_answer(self) -> str:
        """Return that the sweep has no answer before it is resumed; empty if every job ended."""
        statuses = [result.status for result in self.results]
        was_cut = self.is_stopped and "stopped" in statuses
        if self.advise_settings or not (self.missing_jobs_clause or was_cut):
            return ""
        count = str(statuses.count("finished"))
        count += f" of {self.job_count}" if self.job_count else ""
        return f"No answer yet: {count} jobs finished. Resume the sweep."

    @property
    def missing_jobs_clause(self) -> str:
        """Return a clause on the jobs that did not begin; empty if every job began."""
        if self.job_count > len(self.jobs):
            missing = self.job_count - len(self.jobs)
            begun = {result.precision for result in self.results}
            names = [name for name in self.swept_precisions if name not in begun]
            among = f", among them all of {join_names(names)}" if names else ""
            return f"{missing} of the sweep's {self.job_count} jobs had not begun{among}"
        if self.is_stopped and not self.job_count:
            return "the sweep was stopped before its last job"
        return ""


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
            text = read_text(job_folder / ROUTERS)
        settings = partial(read_settings, job_folder)
        jobs.append(Job(result, curves, settings, _router_choices(text)))
    commands = [quote_command(manifest.command)]
    settings = AdviseSettings.read(folder)
    lists = [text.partition("=")[2] for text in manifest.overrides if text.startswith("precision=")]
    return SweepData(
        jobs,
        commands,
        manifest.id,
        is_stopped,
        manifest.jobs,
        settings,
        busy=manifest.busy,
        swept_precisions=lists[-1].split(",") if lists else (),
        folder=str(folder),
        tolerance=Tolerance(manifest.tolerance, manifest.max_gap),
    )


def write_job_facts(folder: Path, data: SweepData, began_ms: int) -> Path:
    """Write the results of the jobs that ran here, for reports made from MLflow; return the path.

    They include the jobs that never became a run there.
    """
    content = {
        "commands": list(data.commands),
        "stopped": data.is_stopped,
        "busy": data.busy,
        "requested_jobs": data.job_count,
        "tolerance": asdict(data.tolerance),
        "request": asdict(data.advise_settings) if data.advise_settings else None,
        "results": [asdict(job.result) for job in data.jobs],
    }
    return write_json(folder / f"jobs-{began_ms}.json", content)


def load_from_store(reader: "Reader", parent: "StoredRun") -> SweepData:
    """Load a sweep from MLflow, on however many machines its jobs ran."""
    contents = [*_stored_lists(reader, parent)]
    runs = {run.run_id: run for run in reader.jobs(parent)}
    run_ids = {run.tags.get("output_dir"): run.run_id for run in runs.values()}
    is_stopped = parent.status == "KILLED"
    results: list[RunResult] = []
    commands: list[str] = []
    job_count = 0
    busy = 0.0
    settings = None
    tolerance = Tolerance()
    for content in contents:
        for values in content.get("results", ()):
            # Entries that cannot be read are skipped.
            with suppress(ValueError):
                result = RunResult.from_json(values)
                # A result without a run id belongs to the run that names its folder.
                run_id = result.run_id or run_ids.get(result.folder)
                results.append(replace(result, run_id=run_id))
        commands += [text for text in content.get("commands", ()) if isinstance(text, str)]
        is_stopped |= bool(content.get("stopped"))
        share = content.get("busy")
        busy = max(busy, share) if isinstance(share, float) else busy
        with suppress(ValueError):
            tolerance = Tolerance(**dataclass_fields_from_json(Tolerance, content.get("tolerance")))
        settings = AdviseSettings.from_json(content.get("request")) or settings
        count = content.get("requested_jobs")
        job_count += count if isinstance(count, int) else 0
    # A process that was killed stored no list: its jobs are known by their runs alone.
    listed_ids = {result.run_id for result in results}
    unlisted = [run for run in runs.values() if run.run_id not in listed_ids]
    results += [result_of_run(reader, run) for run in unlisted]
    if not settings:
        results = with_unique_names(results)
    jobs = []
    for result in results:
        job = Job(result)
        run = runs.get(result.run_id or "")
        if run is not None:
            # The exact history that the run stored, else the store's own points.
            curves = reader.history(run.run_id, _CURVE_METRICS)
            has_routers = any(name.startswith("experts/") for name in run.metrics)
            text = has_routers and reader.artifact_or_notice(run.run_id, ROUTERS)
            settings_reader = partial(stored_settings, reader, run)
            job = Job(result, curves, settings_reader, _router_choices(text or ""))
        jobs.append(job)
    return SweepData(
        jobs,
        commands or [parent.tags.get("command", "")],
        parent.tags.get("sweep_id", ""),
        is_stopped,
        job_count,
        settings,
        tuple(reader.notices),
        busy=busy,
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
    named_settings = {(result.settings, _compared_overrides(result)) for result in known}
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
            group = " ".join([result.precision, *sorted(map(shorten_override, distinct))])
            seed = f" seed={result.seed}" if has_seeds and result.seed is not None else ""
            result = replace(result, group=group, label=f"{group}{seed}")
        renamed.append(result)
    return renamed


def _compared_overrides(result: RunResult) -> frozenset[str]:
    """Return the overrides that two jobs must share to be seeds of one group."""
    return frozenset(text for text in result.overrides if not _IGNORED_OVERRIDE.match(text))


def _stored_lists(reader: "Reader", parent: "StoredRun") -> Iterator[Mapping[str, Any]]:
    """Yield what the processes that ran the jobs stored with the parent run when they ended."""
    for path in sorted(reader.artifacts(parent.run_id, JOB_RESULTS_FOLDER)):
        content = None
        # A damaged list leaves the jobs to their own runs.
        with suppress(ValueError):
            content = json.loads(reader.artifact_or_notice(parent.run_id, path) or b"{}")
        if isinstance(content, dict):
            yield content


def result_of_run(reader: "Reader", run: "StoredRun") -> RunResult:
    """Return the result of a run that no list names: its own file, else its tags and metrics."""
    location: dict[str, Any] = {
        "run_id": run.run_id,
        "experiment_id": run.experiment_id,
        "tracking_uri": redact(reader.uri),
    }
    # A damaged result is as good as none.
    with suppress(ValueError):
        data = reader.artifact_or_notice(run.run_id, RESULT)
        if data:
            return replace(RunResult.from_json(json.loads(data)), **location)
    seed = run.params.get("seed", "")
    known = ("val/iou", "val/accuracy", "val/loss")
    quality = next((key for key in known if key in run.metrics), "")
    direction: Any = "max" if quality in known[:2] else "min"
    if run.tags.get("quality") in run.metrics:  # task.quality names it
        quality = run.tags["quality"]
        direction = run.tags.get("direction", direction)
    skipped = run.metrics.get("loss_scale/skipped_steps")
    # The time of emulated arithmetic says nothing about the precision.
    is_emulated = bool(run.tags.get("emulated"))
    timed = {} if is_emulated else run.metrics
    return RunResult(
        run.tags.get("precision", ""),
        run.name,
        run.tags.get("output_dir", ""),
        _STATUS_BY_RUN_STATUS.get(run.status, "stopped"),
        run.tags.get("error", "") if run.status in _STATUS_BY_RUN_STATUS else _UNKNOWN_STATUS,
        group=re.sub(r" seed=\d+(?= |$)", "", run.name),
        seed=int(seed) if seed.isdecimal() else None,
        model=run.tags.get("model", ""),
        data=run.tags.get("data", ""),
        device=run.tags.get("device_name", ""),
        metrics={key: v for key, v in run.metrics.items() if key.startswith(("val/", "test/"))},
        quality=quality,
        direction=direction,
        train_loss=run.metrics.get("train/loss"),
        loss_scale=run.metrics.get("loss_scale/value"),
        skipped_steps=None if skipped is None else int(skipped),
        weights_mib=run.metrics.get("memory/weights_mib"),
        optimizer_mib=run.metrics.get("memory/optimizer_mib"),
        peak_memory_mib=run.metrics.get("memory/peak_mib"),
        examples_per_second=timed.get(
            "perf/mean_examples_per_second", timed.get("perf/examples_per_second")
        ),
        step_ms=timed.get("perf/mean_step_ms", timed.get("perf/step_ms")),
        kernels="emulated" if is_emulated else "",
        converted=run.tags.get("converted", ""),
        converted_weights=run.tags.get("converted_weights", ""),
        matrix_work=run.tags.get("matrix_work", ""),
        caveats=list(filter(None, [run.tags.get("caveats", "")])),
        fused_rounding=run.tags.get("fused_rounding", ""),
        **location,
    )


def read_settings(folder: Path) -> JobSettings:
    """Return the settings of a run from its folder."""
    texts = []
    for name in (CONFIG, ENVIRONMENT):
        text = ""
        # A file that is missing or cannot be read says nothing.
        with suppress(OSError, ValueError):
            text = read_text(folder / name)
        texts.append(text)
    return JobSettings.of_texts(*texts)


def stored_settings(reader: "Reader", run: "StoredRun") -> JobSettings:
    """Return the settings of a run from MLflow.

    Raises:
        TrackingError: the store does not answer.
    """
    data = [reader.artifact_or_notice(run.run_id, name) or b"" for name in (CONFIG, ENVIRONMENT)]
    return JobSettings.of_texts(*(content.decode(errors="replace") for content in data))


def flat_config(text: str) -> dict[str, str]:
    """Return the values of a config by dotted key."""
    content = None
    with suppress(yaml.YAMLError, RecursionError, ConfigError):
        # Every value as it is written: "1e-3" is no number for YAML, and None has no name there.
        content = check_values(yaml.load(text[:MAX_CONFIG_BYTES], yaml.BaseLoader))
    if not isinstance(content, dict):
        return {}
    return {key: _value_text(value) for key, value in leaves(content)}


def _value_text(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value)
