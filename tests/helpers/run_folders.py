"""Find what commands write under outputs/."""

import json
from pathlib import Path


def only_run(folder):
    """Return the folder of the only run below a working directory."""
    (found,) = Path(folder).glob("outputs/runs/*")
    return found


def job_results(sweep):
    """Return the results of a sweep's jobs by their order of names, as dictionaries."""
    return [json.loads(path.read_text()) for path in sorted(Path(sweep).glob("*/result.json"))]
