"""The formulae of docs/scaling.md: bench/scaling.py computes the numbers of its table."""

import re

import pytest
import torch

from bench.scaling import PRECISIONS, Size, collective_seconds, held_bytes, sent_per_weight
from runner.precision.registry import load_precision

FAR = 10**9  # processes, where (N - 1) / N is 1
ONE_BLOCK = Size(1000, 0)


def documented(root):
    """The cells of the page's table, by precision."""
    cells = {}
    for line in (root / "docs" / "scaling.md").read_text().splitlines():
        columns = [column.strip() for column in line.strip("|").split("|")]
        if len(columns) == 5 and columns[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", columns[0]):
                cells[name] = columns[1:]
    return cells


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_page_shows_what_the_formulae_give(name, root):
    storage = PRECISIONS[name]
    ddp, far, near = (
        held_bytes(strategy, storage, processes, ONE_BLOCK) / ONE_BLOCK.weights
        for strategy, processes in (("ddp", 8), ("fsdp", FAR), ("fsdp", 1))
    )
    sharded = near - far
    fsdp = f"{sharded:.0f} / N" + (f" + {far:.0f}" if round(far) else "")
    sent = [f"{sent_per_weight(strategy, storage, FAR):.0f}" for strategy in ("ddp", "fsdp")]
    assert documented(root)[name] == [f"{ddp:.0f}", fsdp, *sent]


@pytest.mark.parametrize("name", PRECISIONS)
def test_weights_are_stored_in_as_many_bytes_as_the_formulae_say(name):
    converted, _ = load_precision(name).convert(torch.nn.Linear(4, 4))
    assert converted.weight.element_size() == PRECISIONS[name].weight


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_sends_nothing(strategy):
    assert sent_per_weight(strategy, PRECISIONS["32-true"], 1) == 0


def test_collectives_take_their_latency_and_their_bytes():
    sizes = (4096, 16 * 2**20)
    timed = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        timed |= {f"{kind} {size}": 1e-3 + (size - 4096) * 1e-9 for size in sizes}
    small = collective_seconds("ddp", PRECISIONS["32-true"], Size(1000, 0), timed)
    assert small == pytest.approx(1e-3 + 4000e-9)
    large = collective_seconds("ddp", PRECISIONS["32-true"], Size(10**7, 0), timed)
    assert large == pytest.approx(3e-3 + 4e7 * 1e-9)
    sharded = collective_seconds("fsdp", PRECISIONS["32-true"], Size(10**7, 0), timed)
    assert sharded == pytest.approx(15e-3 + 12e7 * 1e-9)
