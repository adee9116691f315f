"""The environment of the processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def clean_env(**more):
    """Return this process's environment without what steers MLflow or Hydra, and with `more`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "HYDRA_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
