"""Write and read a run's config and its signature; collect environment and git metadata.

What a training produces (weights, model, dtype table) is saved by run_artifacts.py.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from runner.config import signature
from runner.config.invocation import Invocation
from runner.config.renamed import with_current_targets
from runner.config.resolve import redacted_dict
from runner.config.schema import RunSpec
from runner.config.signature import is_signed
from runner.utils.files import read_text, write_json, write_text
from runner.utils.layout import CONFIG, SIGNATURE

ENVIRONMENT = "environment.json"
PACKAGES = ("torch", "torchvision", "mlflow", "hydra-core", "omegaconf", "numpy")


def tables_tag(*names: str) -> dict[str, str]:
    """Return the tag that tells MLflow which artifacts of a run are tables."""
    return {"mlflow.loggedArtifacts": json.dumps([{"path": n, "type": "table"} for n in names])}


def write_config(folder: Path, spec: RunSpec, own: bool = True) -> Path:
    """Write the resolved config, complete, and beside it its signature.

    Args:
        folder: of the run.
        spec: of the run.
        own: this user's commands composed all of it; a config from elsewhere is not signed.
    """
    text = OmegaConf.to_yaml(OmegaConf.create(redacted_dict(spec)))
    signed = signature.sign(CONFIG, text) if own else ""
    write_json(folder / SIGNATURE, {"config": signed})
    return write_text(folder / CONFIG, text)


def signed_config(folder: Path) -> dict[str, Any] | None:
    """Return the config of a run's folder if this user's key has signed it, as it is there."""
    try:
        text = read_text(folder / CONFIG)
        signed = json.loads(read_text(folder / SIGNATURE))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(signed, dict) or not is_signed(CONFIG, text, signed.get("config")):
        return None
    content = OmegaConf.to_container(OmegaConf.create(text))
    content = with_current_targets(content)
    return {str(key): value for key, value in content.items()}


def environment_facts(origin: Invocation) -> dict[str, Any]:
    """Return the command, the versions of packages, and the machine."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "command": origin.command,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": versions,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def git_tags(folder: Path) -> dict[str, str]:
    """Return the commit and whether the work tree has changes; empty outside a repository."""

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        dirty = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"git_commit": commit, "git_dirty": str(bool(dirty)).lower()}


def draw_loss_scale(
    path: Path, scales: Sequence[tuple[int, float]], overflows: Sequence[int], last: int
) -> Path:
    """Draw the loss scale over the steps on a log axis, with the skipped steps marked.

    Args:
        path: a .png.
        scales: (step, scale from this step on), one for each change.
        overflows: steps that were skipped because a gradient was not finite.
        last: the run's last step.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    steps = [step for step, _ in scales] + [last]
    values = [scale for _, scale in scales] + [scales[-1][1]]
    axes.step(steps, values, where="post", color="#1f77b4", label="loss scale")
    axes.set_yscale("log", base=2)
    for i, step in enumerate(overflows):
        axes.axvline(step, color="#d62728", lw=0.8, alpha=0.6, label=None if i else "skipped step")
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    axes.set_ylim(min(values) / 2, max(values) * 2)
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)
    return path
