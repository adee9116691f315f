"""Write what identifies a run: its config, the config's signature, environment and commit.

What a training produces (weights, model, tables, chart) is saved by training_outputs.py.
"""

import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from runner.core.base.files import write_json, write_text
from runner.core.base.layout import CONFIG, GIT_KEYS, SIGNATURE
from runner.core.config import signature
from runner.core.config.invocation import Invocation
from runner.core.config.schema import RunSpec

PACKAGES = ("torch", "torchvision", "mlflow", "hydra-core", "omegaconf", "numpy")
"""Packages whose versions can change a run's numbers or its record."""


def write_config(folder: Path, spec: RunSpec, sign: bool = True) -> Path:
    """Write the complete resolved config, and its signature into a file of its own.

    Args:
        folder: of the run.
        spec: of the run.
        sign: whether this user's commands composed all of the config; one that a stranger's
            checkpoint brought is not signed.

    Returns:
        The path of the config.
    """
    text = spec.to_yaml()
    signed = signature.sign(CONFIG, text) if sign else ""
    write_json(folder / SIGNATURE, {"config": signed})
    return write_text(folder / CONFIG, text)


def environment_facts(invocation: Invocation) -> dict[str, Any]:
    """Return the command, the versions of packages, and the machine."""
    return {
        "command": [invocation.command_text()] if invocation.given else invocation.command,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {package: installed_version(package) for package in PACKAGES},
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def git_tags(folder: Path) -> dict[str, str]:
    """Return the commit and whether the work tree has changes; empty outside a repository."""

    def git(*args: str) -> str:
        # A git that hangs, for example on a network drive, counts as no repository after 10 s.
        answer = subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(GIT_KEYS, (commit, str(bool(changes)).lower()), strict=True))


@cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
