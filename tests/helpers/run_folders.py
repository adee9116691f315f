"""Find what commands write under outputs/."""

import json
from pathlib import Path


def only_run(folder):
    """Return the folder of the only run below a working directory."""
    (found,) = Path(folder).glob("outputs/runs/*")
    return found


def finished_run(folder):
    """Return the folder of the only run that has a result; refused ones may have folders, too."""
    (found,) = Path(folder).glob("outputs/runs/*/result.json")
    return found.parent


def job_results(folder, sweeps="outputs/sweeps/*"):
    """Return the results of all jobs of the sweeps below a working directory, as dictionaries."""
    paths = sorted(Path(folder).glob(f"{sweeps}/*/result.json"))
    return [json.loads(path.read_text()) for path in paths]
