"""Read what a sweep's jobs were computed from: config, versions, commit and data.

The same facts are in a job's folder and, for a job that was recorded, in MLflow.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from runner.sweeps.report.jobs import SweepData
from runner.tracking.journal import latest_journal, read_records
from runner.utils.files import read_text
from runner.utils.layout import CONFIG, ENVIRONMENT, GIT_KEYS

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun

_MACHINE_FACTS = ("python", "platform", "cuda", "threads")


@dataclass(frozen=True)
class JobOrigin:
    """What a job was computed from; what is not known of it is missing.

    Attributes:
        config: values of the resolved config by dotted key, as YAML writes them.
        environment: python, platform, cuda, threads and the version of each package.
        commit: of the working directory's repository; empty if there was none.
        has_changes: whether its work tree had changes that no commit holds; None if unknown.
        data: digest of each data set by its use, such as training.
    """

    config: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    has_changes: bool | None = None
    data: Mapping[str, str] = field(default_factory=dict)


def origins_in_folder(folder: Path, data: SweepData) -> list[JobOrigin]:
    """Return the origin of each job of a sweep, in the order of the jobs, from its folder."""
    return [read_origin(folder / Path(job.result.folder).name) for job in data.jobs]


def origins_in_store(reader: "Reader", parent: "StoredRun", data: SweepData) -> list[JobOrigin]:
    """Return the origin of each job of a sweep, in the order of the jobs, from MLflow alone.

    Raises:
        TrackingError: the store does not answer.
    """
    runs = {run.run_id: run for run in reader.jobs(parent)}
    origins = []
    for job in data.jobs:
        run = runs.get(job.result.run_id or "")
        origins.append(stored_origin(reader, run) if run else JobOrigin())
    return origins


def read_origin(folder: Path) -> JobOrigin:
    """Return the origin of a run from its folder."""
    tags, datasets = _journal_facts(folder)
    return _origin(_text(folder / CONFIG), _text(folder / ENVIRONMENT), tags, datasets)


def stored_origin(reader: "Reader", run: "StoredRun") -> JobOrigin:
    """Return the origin of a run from MLflow.

    Raises:
        TrackingError: the store does not answer.
    """
    config = reader.artifact_or_notice(run.run_id, CONFIG) or b""
    environment = reader.artifact_or_notice(run.run_id, ENVIRONMENT) or b""
    return _origin(
        config.decode(errors="replace"),
        environment.decode(errors="replace"),
        run.tags,
        run.data_digests,
    )


def _origin(
    config: str, environment: str, tags: Mapping[str, Any], datasets: Mapping[str, str]
) -> JobOrigin:
    """Return an origin from the texts of two files, a run's tags and its data's digests."""
    facts: Any = {}
    with suppress(ValueError):
        facts = json.loads(environment)
    if not isinstance(facts, dict):
        facts = {}
    # The file has the commit of a run that is in no store, too; older versions wrote tags alone.
    known = {**tags, **facts}
    commit, changes = (str(known.get(key, "")) for key in GIT_KEYS)
    return JobOrigin(
        flat_config(config),
        _flat_environment(facts),
        commit,
        changes == "true" if changes else None,
        datasets,
    )


def _text(path: Path) -> str:
    """Return a file's text, empty if it is missing or cannot be read."""
    with suppress(OSError, ValueError):
        return read_text(path)
    return ""


def _journal_facts(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tags and the data's digests that a run's journal begins with."""
    tags: dict[str, Any] = {}
    digests: dict[str, str] = {}
    path = latest_journal(folder)
    for record, _ in read_records(path) if path else ():
        if record["kind"] == "start" and isinstance(record.get("tags"), dict):
            tags = record["tags"]
        elif record["kind"] == "inputs":
            with suppress(KeyError, TypeError):
                digests = {str(one["context"]): str(one["digest"]) for one in record["datasets"]}
        elif record["kind"] == "metrics":
            # The data are recorded before the first step.
            break
    return tags, digests


def flat_config(text: str) -> dict[str, str]:
    """Return the values of a config by dotted key."""
    content = None
    with suppress(yaml.YAMLError, RecursionError):
        # Every value as it is written: "1e-3" is no number for YAML, and None has no name there.
        content = yaml.load(text, yaml.BaseLoader)
    if not isinstance(content, dict):
        return {}
    return dict(_leaves("", content))


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield each dotted key with its value; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix, _value_text(value)


def _value_text(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value)


def _flat_environment(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the known facts of the machine, and the versions of packages, by name."""
    packages = facts.get("packages")
    found = {name: facts.get(name) for name in _MACHINE_FACTS}
    if isinstance(packages, dict):
        found |= packages
    return {str(name): str(value) for name, value in found.items() if value is not None}
