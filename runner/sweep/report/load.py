"""The jobs of a sweep: from its folder, or from MLflow alone."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.modes.result import RunResult, read_results
from runner.sweep.advisor.settings import AdviseSettings
from runner.sweep.manifest import Manifest
from runner.sweep.report.jobs import Job, SweepData
from runner.tracking import history
from runner.tracking.history import Curve
from runner.utils.formatting import shorten_override
from runner.utils.layout import HISTORY, RESULT
from runner.utils.secrets import redact, redact_values
from runner.utils.terminal import quote_command

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun

JOBS = "jobs"
_CURVES = (
    "train/loss",
    "val/loss",
    "val/accuracy",
    "val/perplexity",
    "loss_scale/changes",
    "loss_scale/overflow",
)
_STATUS: dict[str, Literal["finished", "failed", "stopped"]] = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
}


def load_from_folder(folder: Path, stopped: bool = False) -> SweepData:
    """A sweep whose jobs ran here."""
    manifest = Manifest.read(folder)
    # A result names the folder where its job ran, from which the sweep's may have been moved.
    jobs = [Job(r, history.from_folder(folder / Path(r.folder).name)) for r in read_results(folder)]
    told = [quote_command(manifest.command)]
    return SweepData(jobs, told, manifest.id, stopped, manifest.jobs, AdviseSettings.read(folder))


def write_job_facts(folder: Path, data: SweepData, began_ms: int) -> Path:
    """The results of the jobs that ran here, for reports that are made from MLflow: also of those
    that never became a run there."""
    path = folder / f"jobs-{began_ms}.json"
    content = {
        "commands": list(data.commands),
        "stopped": data.stopped,
        "asked": data.asked,
        "question": asdict(data.question) if data.question else None,
        "results": [asdict(job.result) for job in data.jobs],
    }
    path.write_text(json.dumps(redact_values(content), indent=2) + "\n")
    return path


def load_from_store(reader: "Reader", parent: "StoredRun") -> SweepData:
    """A sweep as MLflow knows it, on however many machines its jobs ran."""
    told, commands, stopped, asked, question = _told(reader, parent)
    runs = {run.run_id: run for run in reader.jobs(parent)}
    folders = {run.tags.get("output_dir"): run.run_id for run in runs.values()}
    told = [replace(r, run_id=r.run_id or folders.get(r.folder)) for r in told]
    listed = {result.run_id for result in told}
    results = [*told, *(_result(reader, r) for r in runs.values() if r.run_id not in listed)]
    jobs = [
        Job(result, _curves(reader, runs.get(result.run_id or "")))
        for result in (results if question else with_unique_names(results))
    ]
    commands = commands or [parent.tags.get("command", "")]
    return SweepData(jobs, commands, parent.tags.get("sweep_id", ""), stopped, asked, question)


_BESIDE = re.compile(
    r"[+~]*(seed|precision|mode|tracking\b.*|hydra\b.*|data\.root|train\.num_workers)="
)
"""Overrides that two jobs may differ in and be compared all the same."""


def with_unique_names(results: Sequence[RunResult]) -> list[RunResult]:
    """A sweep names its jobs by what it varied itself. Where it was joined by others, equal names
    may then mean different settings, and different names equal ones: they are named anew by
    everything that differs."""
    typed = {id(r): frozenset(t for t in r.overrides if not _BESIDE.match(t)) for r in results}
    known = [r for r in results if r.overrides]
    meant = {(r.settings, typed[id(r)]) for r in known}
    if len({name for name, _ in meant}) == len({texts for _, texts in meant}) == len(meant):
        return [*results]
    common = frozenset.intersection(*(typed[id(r)] for r in known))
    seeds = len({r.seed for r in known}) > 1

    def named(r: RunResult) -> RunResult:
        own = sorted(map(shorten_override, typed[id(r)] - common))
        seed = [f"seed={r.seed}"] if seeds and r.seed is not None else []
        group, label = " ".join([r.precision, *own]), " ".join([r.precision, *own, *seed])
        return replace(r, group=group, label=label)

    return [named(r) if r.overrides else r for r in results]


def _told(
    reader: "Reader", parent: "StoredRun"
) -> tuple[list[RunResult], list[str], bool, int, AdviseSettings | None]:
    """What the processes that ran the jobs left with the parent run when they ended."""
    results, commands, stopped, asked = [], [], parent.status == "KILLED", 0
    question = None
    for path in sorted(reader.artifacts(parent.run_id, JOBS)):
        content = None
        with suppress(ValueError):
            content = json.loads(reader.artifact(parent.run_id, path) or b"{}")
        if not isinstance(content, dict):
            continue
        for values in content.get("results", ()):
            with suppress(ValueError):
                results.append(RunResult.of(values))
        commands += [text for text in content.get("commands", ()) if isinstance(text, str)]
        stopped |= bool(content.get("stopped"))
        question = AdviseSettings.of(content.get("question")) or question
        asked += number if isinstance(number := content.get("asked"), int) else 0
    return results, commands, stopped, asked, question


def _result(reader: "Reader", run: "StoredRun") -> RunResult:
    """A run that no list names: its own result, else what its tags and last metrics say."""
    where: dict[str, Any] = {
        "run_id": run.run_id,
        "experiment_id": run.experiment_id,
        "tracking_uri": redact(reader.uri),
    }
    with suppress(ValueError):  # damaged
        if data := reader.artifact(run.run_id, RESULT):
            return replace(RunResult.of(json.loads(data)), **where)
    values: dict[str, Any] = {
        "metrics": {k: v for k, v in run.metrics.items() if k.startswith("val/")},
        "quality": next((k for k in ("val/accuracy", "val/loss") if k in run.metrics), ""),
        "train_loss": run.metrics.get("train/loss"),
        "loss_scale": run.metrics.get("loss_scale/value"),
        "weights_mib": run.metrics.get("memory/weights_mib"),
        "optimizer_mib": run.metrics.get("memory/optimizer_mib"),
        "peak_memory_mib": run.metrics.get("memory/peak_mib"),
        "examples_per_second": run.metrics.get("perf/examples_per_second"),
        "step_ms": run.metrics.get("perf/step_ms"),
        "converted": run.tags.get("converted", ""),
    }
    if run.tags.get("emulated"):
        values |= {"examples_per_second": None, "step_ms": None, "kernels": "emulated"}
    if (skipped := run.metrics.get("loss_scale/skipped_steps")) is not None:
        values["skipped_steps"] = int(skipped)
    values["direction"] = "max" if values["quality"] == "val/accuracy" else "min"
    seed = run.params.get("seed", "")
    still = "It has not ended: it still runs, or died without a word."
    return RunResult(
        run.tags.get("precision", ""),
        run.name,
        run.tags.get("output_dir", ""),
        _STATUS.get(run.status, "stopped"),
        run.tags.get("error", "") if run.status in _STATUS else still,
        group=re.sub(r" seed=\d+(?= |$)", "", run.name),
        seed=int(seed) if seed.isdecimal() else None,
        model=run.tags.get("model", ""),
        data=run.tags.get("data", ""),
        device=run.tags.get("device_name", ""),
        **values,
        **where,
    )


def _curves(reader: "Reader", run: "StoredRun | None") -> dict[str, Curve]:
    """The exact history that the run left, else what the store's own points say."""
    if run is None:
        return {}
    with suppress(ValueError):  # damaged
        if data := reader.artifact(run.run_id, HISTORY):
            return history.read_history(data)
    return {name: reader.curve(run.run_id, name) for name in _CURVES if name in run.metrics}
