"""Memory that really runs out, and the settings that the message names, in the same limit."""

import re

import pytest

pytestmark = pytest.mark.slow

RUN = (
    "--config-dir lab/conf model=greedy data=mine tracking=none train.max_steps=1 data.count=60"
).split()


@pytest.fixture
def greedy(lab, cli):
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
    greedy("train.batch_size=30", *named[place]).check_ok()


def test_where_nothing_fits_it_says_so(greedy):
    done = greedy("train.batch_size=2", "model.mib=290", "model.extra=50_000_000")
    assert not settings(done)
    assert "No setting fits: train.batch_size=1 precision=bf16-true optimizer=adamw8bit takes " in (
        done.stderr
    )
