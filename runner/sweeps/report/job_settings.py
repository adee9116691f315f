"""Read what a sweep's jobs ran with: their config, the versions of packages and the commit.

The same files are in a job's folder and, for a job that was recorded, in MLflow.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from runner.sweeps.report.jobs import SweepData
from runner.utils.files import read_text
from runner.utils.layout import CONFIG, ENVIRONMENT, GIT_KEYS

if TYPE_CHECKING:
    from runner.tracking.reader import Reader, StoredRun

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


def settings_in_folder(folder: Path, data: SweepData) -> list[JobSettings]:
    """Return the settings of each job of a sweep, in the order of the jobs, from its folder."""
    return [read_settings(folder / Path(job.result.folder).name) for job in data.jobs]


def settings_in_store(reader: "Reader", parent: "StoredRun", data: SweepData) -> list[JobSettings]:
    """Return the settings of each job of a sweep, in the order of the jobs, from MLflow alone.

    Raises:
        TrackingError: the store does not answer.
    """
    runs = {run.run_id: run for run in reader.jobs(parent)}
    settings = []
    for job in data.jobs:
        run = runs.get(job.result.run_id or "")
        settings.append(stored_settings(reader, run) if run else JobSettings())
    return settings


def read_settings(folder: Path) -> JobSettings:
    """Return the settings of a run from its folder."""
    return JobSettings(
        flat_config(_text(folder / CONFIG)), _flat_environment(_text(folder / ENVIRONMENT))
    )


def stored_settings(reader: "Reader", run: "StoredRun") -> JobSettings:
    """Return the settings of a run from MLflow.

    Raises:
        TrackingError: the store does not answer.
    """
    config = reader.artifact_or_notice(run.run_id, CONFIG) or b""
    environment = reader.artifact_or_notice(run.run_id, ENVIRONMENT) or b""
    return JobSettings(
        flat_config(config.decode(errors="replace")),
        _flat_environment(environment.decode(errors="replace")),
    )


def _text(path: Path) -> str:
    """Return a file's text, empty if it is missing or cannot be read."""
    with suppress(OSError, ValueError):
        return read_text(path)
    return ""


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


def _flat_environment(text: str) -> dict[str, str]:
    """Return the known facts of the machine, and the versions of packages, by name."""
    facts: Any = {}
    with suppress(ValueError):
        facts = json.loads(text)
    if not isinstance(facts, dict):
        return {}
    known = {name: facts.get(name) for name in _MACHINE_FACTS}
    packages = facts.get("packages")
    if isinstance(packages, dict):
        known |= packages
    return {str(name): str(value) for name, value in known.items() if value is not None}
