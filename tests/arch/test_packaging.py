"""The wheel: one name in site-packages, complete, and usable next to a user's own packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import read_json

pytestmark = pytest.mark.slow

SUFFIXES = (".json", ".py", ".typed", ".yaml", ".css", ".j2", ".txt")

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(6, classes))
"""
DATA = """
import torch
from torch.utils.data import TensorDataset

def mine(count: int):
    data = TensorDataset(torch.randn(count, 2, 3), torch.arange(count) % 2)
    return data, data
"""


def python(*args, cwd, **env):
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory, root):
    """The folder that a wheel of this checkout is installed into."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves files behind
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("runner", "conf", "models"):
        shutil.copytree(root / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source / name)
    pip = ("-m", "pip", "--disable-pip-version-check")
    words = ("wheel", "--verbose", "--no-deps", "--no-build-isolation", "-w", folder, source)
    assert "would be ignored" not in python(*pip, *words, cwd=folder)  # setuptools of data folders
    (wheel,) = folder.glob("*.whl")
    python(*pip, "install", "--no-deps", "--target", folder / "site", wheel, cwd=folder)
    return folder / "site"


@pytest.fixture
def lab(tmp_path):
    """A user's folder, with packages called like folders of our checkout."""
    files = {
        "models/__init__.py": "",
        "models/net.py": NET,
        "conf/__init__.py": "",
        "lab/data.py": DATA,
        "lab/conf/model/net.yaml": "_target_: models.net.Net\nclasses: ${data.meta.classes}\n",
        "lab/conf/data/mine.yaml": (
            "defaults:\n  - override /task@_global_.task: classification\n\n"
            "_target_: lab.data.mine\ncount: 16\nmeta:\n  input: [2, 3]\n  classes: 2\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_it_adds_one_name(installed):
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} - {"bin"} == {"runner"}


def test_it_is_complete(installed, root):
    def files(folder):
        found = (p for p in folder.rglob("*") if p.suffix in SUFFIXES)
        return {str(p.relative_to(folder)) for p in found if "__pycache__" not in p.parts}

    assert files(installed / "runner" / "conf") == files(root / "conf")
    assert files(installed / "runner" / "models") == files(root / "models")
    own = {name for name in files(installed / "runner") if not name.startswith(("conf/", "models"))}
    assert own == files(root / "runner")


def test_it_runs_beside_a_users_own_packages(installed, lab):
    env = {"PYTHONPATH": str(installed)}
    names = (
        "import runner.conf, runner.models.mlp as mlp; print(runner.conf.__file__, mlp.__file__)"
    )
    for path in python("-c", names, cwd=lab, **env).split():
        assert Path(path).is_relative_to(installed)
    typed = ("model=net", "data=mine", "tracking=none", "precision=bf16-mixed", "train.max_steps=2")
    text = python("-m", "runner", "--config-dir", "lab/conf", *typed, cwd=lab, **env)
    assert "bf16-mixed net mine" in text


def test_make_run_installs_what_runs_need_alone(root, tmp_path):
    def commands(target):
        words = ["make", "--dry-run", "-C", root, target, f"BIN={tmp_path}/.venv/bin"]
        words += ["--what-if=pyproject.toml"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return done.stdout

    assert "[dev]" not in commands("run")
    large, small = (commands("test").partition(" -e .")[part] for part in (0, 2))
    assert "about " in large
    assert "--quiet" not in large
    assert "[dev]" in small


def test_make_run_runs_what_is_typed(tmp_path, root, clean):
    """In this environment: making one anew is the first thing that CI does."""
    words = "model=mlp train.max_steps=2 tracking=none precision=bf16-mixed"
    folder = Path(sys.executable).parent
    command = ["make", "--old-file=.venv/installed", "run", f"BIN={folder}"]
    done = subprocess.run(
        [*command, f"ARGS={words} hydra.run.dir={tmp_path / 'run'}"],
        cwd=root,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bf16-mixed mlp digits" in done.stdout
    assert read_json(tmp_path / "run" / "result.json")["steps"] == 2


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_sources_are_those_of_every_python_that_is_supported(version, root, tmp_path):
    """Compiled where the interpreter is installed: warnings of its compiler are errors."""
    versions = Path(sys.base_prefix).parent.glob(f"{version}*/bin/python{version}")
    for interpreter in filter(None, (*versions, shutil.which(f"python{version}"))):
        if (
            subprocess.run([interpreter, "-c", ""], check=False, capture_output=True).returncode
            == 0
        ):
            break
    else:
        pytest.skip(f"no Python {version} on this machine")
    command = [interpreter, "-W", "error", "-m", "compileall", "-q", "-f", "runner", "models"]
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
