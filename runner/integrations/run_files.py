"""Write the files of a run that another trainer trains, under the names of the runner's own."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from runner.config.invocation import Invocation
from runner.integrations.precision_label import StepDtypes, numeric_switches
from runner.integrations.training_source import TrainingSource
from runner.modes import run_metadata
from runner.utils.files import write_json, write_text
from runner.utils.layout import CONFIG, ENVIRONMENT
from runner.utils.secrets import redact_values


def process_command() -> list[str]:
    """Return the words of this process's command."""
    # A notebook's kernel and `python -c` have no script that could be typed again.
    return ["python", *sys.argv] if sys.argv and Path(sys.argv[0]).is_file() else ["python"]


def run_config(source: TrainingSource, dtypes: StepDtypes) -> dict[str, Any]:
    """Return the config of a run as plain containers without secrets."""
    content = {
        "trainer": source.version_text,
        "precision": dtypes.label,
        "asked": {"precision": source.request.label, "setting": source.request.setting},
        "model": type(source.model).__name__,
        "optimizer": type(source.optimizer).__name__,
        "seed": source.seed,
        "planned_steps": source.planned_steps,
        "arguments": source.arguments,
    }
    # The trainers' settings hold enums, paths and objects, which are written as their text.
    plain = json.loads(json.dumps(content, default=str))
    return redact_values(plain)


def write_run_files(folder: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Write config.yaml and environment.json into a run's folder, and yield their paths.

    Raises:
        OSError: a file cannot be written.
    """
    yield write_text(folder / CONFIG, yaml.safe_dump(dict(config), sort_keys=False))
    facts = run_metadata.environment_facts(Invocation())
    facts["command"] = process_command()
    facts["packages"][config["trainer"].partition(" ")[0]] = config["trainer"].partition(" ")[2]
    facts["switches"] = numeric_switches()
    yield write_json(folder / ENVIRONMENT, facts)
