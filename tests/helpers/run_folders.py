"""Write a user's files, and find what commands write under outputs/."""

import json
import re
import shutil
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FILES = Path(__file__).parent / "files"
"""Folders of users: tests copy them."""


def read_json(path):
    """Return the content of a JSON file."""
    return json.loads(Path(path).read_text())


def metrics_in(folder):
    """Return the metrics of a run's result."""
    return read_json(folder / "result.json")["metrics"]


def losses_in(folder):
    """Return the losses of the steps that ProcessJournal recorded."""
    rows = map(json.loads, (folder / "steps.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


def write_files(folder, files):
    """Write texts to paths below a folder, and return the folder."""
    for name, text in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write_page(name, folder, *paths):
    """Write the files that a page of docs/ shows below a folder, all or some; return the folder."""
    shown = re.findall(r"```\w+\n# (\S+\.\w+)\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    return write_files(folder, {p: text for p, text in shown if not paths or p in paths})


def copy_files(name, folder):
    """Copy a tree of files/ into a folder, and return the folder."""
    shutil.copytree(
        FILES / name, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    return folder


def write_lab(folder):
    """Write a user's code and configs, lab/, into a folder, and return the folder."""
    return copy_files("lab", folder)


def only_run(folder):
    """Return the folder of the only run below a working directory."""
    (found,) = Path(folder).glob("outputs/runs/*")
    return found


def finished_run(folder):
    """Return the folder of the only run that has a result; refused ones may have folders, too."""
    (found,) = Path(folder).glob("outputs/runs/*/result.json")
    return found.parent


def only_sweep(folder):
    """Return the folder of the only sweep below a working directory."""
    (found,) = Path(folder).glob("outputs/sweeps/*")
    return found


def job_results(folder, sweeps="outputs/sweeps/*"):
    """Return the results of a working directory's sweeps, in the order of the jobs' numbers."""
    paths = Path(folder).glob(f"{sweeps}/*/result.json")
    return [read_json(path) for path in sorted(paths, key=lambda path: int(path.parent.name))]


def cut_run(folder, copy, step):
    """Copy a run's folder as a run would have left it that died after a step; return the copy."""
    shutil.copytree(folder, copy)
    (copy / "result.json").unlink()
    for path in copy.glob("checkpoints/step-*.pt"):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
    return copy
