"""A new tool is a folder and a row: it may add keys, a mode, a command, callbacks and messages."""

import os
import re
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

RUN = "model=mlp data=digits accelerator=cpu tracking=none"


@pytest.fixture(scope="module")
def run(tmp_path_factory, root):
    """Return the function that runs a command of a checkout with one folder and one row more."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("runner", "conf", "models"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "tests/helpers/files/new_tool/norms", folder / "runner" / "norms")
    table = folder / "runner" / "rooms.py"
    text = re.sub(r"^ROOMS = \(", "ROOMS = (NORMS, ", table.read_text(), flags=re.MULTILINE)
    imported = "from runner.norms.room import ROOM as NORMS\nfrom runner.precision.room"
    table.write_text(text.replace("from runner.precision.room", imported, 1))

    def call(*words):
        command = [sys.executable, "-m", "runner", *words]
        env = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800
        )
        return done.returncode, done.stdout, done.stderr

    return call


def test_it_measures_a_training(run):
    rc, out, _ = run(*RUN.split(), "train.max_steps=4", "norms.every=2")
    assert rc == 0
    assert "norms begins with a batch of " in out
    assert re.findall(r"step (\d): largest weight 0\.\d+", out) == ["2", "4"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (f"{RUN} norms.every=0", "error: norms.every=0 is too small. Allowed: 1 and up."),
        (f"{RUN} mode=norms", "error: norms: no luck. Type norms.every=2."),
        ("norms 3 x=1", "error: norms does not take x=1. Allowed: a run, top=...; type norms --h"),
    ],
)
def test_its_errors_are_messages(run, words, wanted):
    rc, _, errors = run(*words.split())
    assert rc == 2
    assert errors.startswith(wanted)


def test_its_command_is_called_and_listed(run):
    assert run("norms", "last", "top=2") == (3, "norms of last, {'top': '2'}\n", "")
    assert "norms         how large weights are" in run("--help")[1]
