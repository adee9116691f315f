"""Memory that really runs out, and the settings that the message names, in the same limit."""

import re

import pytest

pytestmark = pytest.mark.slow

GREEDY = '''
import resource
from pathlib import Path

import psutil
import torch
from torch import nn

MIB, NOTE = 2**20, Path("taken")


class Greedy(nn.Module):
    """Keeps 4 MiB of activations for each layer and example. The first process notes what it has
    when its first step begins; later ones may have so many MiB more than that.

    Activations of 10 examples are above 32 MiB, which the C library maps and returns one by one:
    smaller ones leave gaps in its heap that differ from run to run.
    """

    def __init__(self, classes: int, mib: int, extra: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2**20))
        self.extra = nn.Parameter(torch.zeros(extra))
        self.head = nn.Linear(64, classes)
        if NOTE.exists():
            limit = int(NOTE.read_text()) + mib * MIB
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def forward(self, x):
        if self.training and not NOTE.exists():
            NOTE.write_text(str(psutil.Process().memory_info().vms))
        y = x.flatten(1)
        wide = y.mean(1, keepdim=True) * self.scale
        for _ in range(8):
            wide = wide.sin()
        return self.head(y) + self.extra[0] + wide.mean(1, keepdim=True)
'''
YAML = "# Mine\n_target_: lab.greedy.Greedy\nclasses: ${data.meta.classes}\nmib: 700\nextra: 1\n"
RUN = (
    "--config-dir lab/conf model=greedy data=mine tracking=none train.max_steps=1 data.count=60"
).split()


@pytest.fixture
def greedy(lab, cli):
    (lab / "lab" / "greedy.py").write_text(GREEDY)
    (lab / "lab" / "conf" / "model" / "greedy.yaml").write_text(YAML)
    assert cli(*RUN, "train.batch_size=2").rc == 0
    return lambda *args: cli(*RUN, *args)


def settings(done):
    """What the message says to type, line by line."""
    assert done.rc == 1, done.stderr
    assert "error: Out of memory in step 1 on " in done.stderr
    found = re.findall(r"^error:   ?(\S.*) \(about ([\d.]+) of ([\d.]+) GiB\)$", done.stderr, re.M)
    for _, needed, whole in found:
        assert float(needed) < float(whole)
    return [words.split() for words, *_ in found]


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_a_setting_that_it_names_trains_in_the_same_limit(greedy, place):
    named = settings(greedy("train.batch_size=30"))
    assert named[0][0].startswith("train.batch_size=")
    done = greedy("train.batch_size=30", *named[place])
    assert done.rc == 0, f"{named}: {done.stderr}"


def test_where_nothing_fits_it_says_so(greedy):
    done = greedy("train.batch_size=2", "model.mib=290", "model.extra=50_000_000")
    assert not settings(done)
    assert "No setting fits: train.batch_size=1 precision=bf16-true optimizer=adamw8bit takes " in (
        done.stderr
    )
