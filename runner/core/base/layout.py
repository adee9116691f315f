"""Name the files and folders in the output folders of runs and sweeps.

Users' scripts and earlier runs know these names: they are part of the interface.
"""

from importlib.resources import files
from pathlib import Path

BUILT_IN_CONFIGS = Path(str(files("runner.conf")))
"""Folder of the configs that the package brings along."""

RESULT = "result.json"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
"""Command, versions and machine of a run."""
GIT_KEYS = ("git_commit", "git_dirty")
"""Keys of the commit in ENVIRONMENT, and tags of the run: its hash; whether there were changes."""
SIGNATURE = "signature.json"
"""Signature of CONFIG, made with the user's key (see config/signature.py)."""
LOG = "log.txt"  # what a job of a sweep prints besides its line on the terminal
HISTORY = "history.npz"
METRICS = "metrics.jsonl"
"""Metrics of a run with tracking=none, which has no journal."""
NUMERICS = "numerics.json"
DATA_DIGESTS = "data.txt"  # use, digest and profile of each data set of a run
ROUTERS = "routers.json"
"""Experts of each token in the first step, by layer, of a mixture of experts."""
EXPORTED_MODEL = "model.pt2"
RANK_RECORD = "steps.jsonl"
"""Step records of a process other than rank 0, in that process's folder under ranks/."""
GUARD_FOLDER = "guard"
"""Folder of the batches that a guard saved."""
PRETRAINED_FOLDER = "pretrained"
ADAPTER_FOLDER = "adapter"
SAMPLES = "samples"
"""Folder of the files that hooks write, in the run's folder and among its artifacts."""
CALLBACK_FILES = "callbacks"
"""Folder of the files that callbacks save, in the run's folder and among its artifacts."""
WRITTEN_PLACES = (
    *("checkpoints", "model", "ranks", GUARD_FOLDER, PRETRAINED_FOLDER, ADAPTER_FOLDER, SAMPLES),
    *(CALLBACK_FILES, ".hydra", ".submitit", "multirun.yaml"),
)
"""Subfolders into which a run, a sweep or a library writes, and Hydra's own file of a sweep."""

MANIFEST = "sweep.json"
ADVICE = "advise.json"
VERDICT = "verdict.json"
"""The answer of mode=gate."""
