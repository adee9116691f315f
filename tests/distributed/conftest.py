"""Runs of several processes: many of them in one start, which costs seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Outcome

WORKER = Path(__file__).parents[1] / "helpers" / "worker.py"
ROOT = WORKER.parents[2]
PATH = f"{ROOT}:{ROOT / 'tests' / 'helpers'}"


@pytest.fixture(scope="session")
def together():
    """Has jobs {folder: overrides} run by several processes, in turn; outcomes by folder."""

    def run(processes, jobs, folder, timeout=300):
        file = folder / f"jobs-{processes}.json"
        file.write_text(json.dumps({str(folder / name): typed for name, typed in jobs.items()}))
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "HYDRA_"))}
        command = [sys.executable, str(WORKER), str(file), str(processes)]
        done = subprocess.run(
            command,
            cwd=folder,
            text=True,
            timeout=timeout,
            env={**kept, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
            capture_output=True,
        )
        found = {name: Outcome(folder / name) for name in jobs}
        assert done.returncode == 0, done.stderr[-3000:] + "".join(
            one.text(f"failed-{rank}.txt") for one in found.values() for rank in range(processes)
        )
        return found

    return run
