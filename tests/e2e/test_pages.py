"""The commands of README.md and docs/ compose, and run for two steps."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_THE_READER = re.compile(
    r"<|\.\.\.|…|\[overrides|--config-dir|--cfg|http:|\blab[./]|\bFILE\b|outputs/|checkpoint=|=last"
    r"|(path|root|weights|batch|against|launcher)=(?!32-true)|accelerator=|strategy="
)
"""What a command has that only its reader has: names, files, servers, launchers, devices."""
SHRUNK = "train.max_steps=2 train.batch_size=4 tracking=none".split()
LONG = re.compile(
    r"mode=(advise|gate)|experiment=molecules|sweep=(search|every_precision)|compile="
)
"""What takes minutes in any size, and has its own tests."""


def commands():
    """The command lines without what only their reader has, in words and each once."""
    text = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
    lines = re.findall(r"python -m runner ([^#\n`|]*=[^#\n`|]*)", text)
    found = {" ".join(line.split()) for line in lines if not OF_THE_READER.search(line)}
    return sorted(line for line in found if line.count("'") % 2 == 0)


def without_sweep(line):
    """The words of a sweep's first job."""
    words = [word for word in shlex.split(line) if word != "-m"]
    return [re.sub(r"=(?!\[)([^,{]*),.*", r"=\1", word) for word in words]


def test_pages_have_commands():
    assert len(commands()) > 50


@pytest.mark.parametrize("line", commands())
def test_a_command_composes(line, compose):
    words = [word for word in without_sweep(line) if word not in ("mode=advise", "mode=gate")]
    if "," in line and "precision.emulate=true" in words:  # left out for precisions without it
        words.remove("precision.emulate=true")
    compose(*(word for word in words if "=" in word))


@pytest.mark.extended
@pytest.mark.parametrize("line", [line for line in commands() if not LONG.search(line)])
def test_a_command_runs(line, main):
    launcher = [] if "n_jobs" in line else ["hydra/launcher=basic"]
    shorter = [word for word in SHRUNK if word.split("=")[0] not in line]
    done = main(*shlex.split(line), *shorter, *launcher)
    if "needs an NVIDIA GPU" in done.stderr:
        pytest.skip(done.stderr)
    assert done.rc == 0, done.stderr
