import gc

import torch
from torch._subclasses import FakeTensorMode

from runner.diagnostics.memory.tracker import (
    ACTIVATIONS,
    OPTIMIZER,
    WEIGHTS,
    MemoryBreakdown,
    MemoryTracker,
)


def test_what_is_gone_is_not_held():
    ledger = MemoryTracker()
    with ledger:
        kept = torch.ones(1000)
        torch.ones(500)
        torch.ones(1)
    assert [peak.activations for peak in ledger.line] == [4000, 6000, 4004]
    assert kept.sum() == 1000


def test_views_and_the_storage_they_share_count_once():
    ledger = MemoryTracker()
    with ledger:
        whole = torch.ones(1000)
        parts = whole[:500], whole.view(10, 100)
    assert ledger.line[-1] == MemoryBreakdown(activations=4000)
    assert len(parts) == 2


def test_a_storage_has_one_kind_at_a_time():
    state, ledger = torch.ones(10), MemoryTracker()
    ledger.add(ACTIVATIONS, state)
    ledger.add(OPTIMIZER, state[:5])
    with ledger:
        torch.ones(())
    assert ledger.line == [MemoryBreakdown(optimizer=40, activations=4)]


def test_a_backward_makes_temporaries_and_gradients():
    weight, ledger = torch.ones(100, requires_grad=True), MemoryTracker()
    ledger.add(WEIGHTS, weight)
    with ledger.gradients_of([weight]), ledger:
        loss = (weight * weight).exp().sum()
        forward = len(ledger.line)
        loss.backward()
        torch.ones(())
    assert ledger.line[0] == MemoryBreakdown(weights=400, activations=400)
    assert max(peak.temporaries for peak in ledger.line[:forward]) == 0
    assert max(peak.temporaries for peak in ledger.line) >= 400
    assert ledger.line[-1].gradients == 400
    assert weight.grad is not None


def test_the_update_makes_temporaries():
    ledger = MemoryTracker()
    ledger.updates()
    with ledger:
        torch.ones(100)
    assert ledger.line == [MemoryBreakdown(temporaries=400)]


def test_fake_tensors_count_as_real_ones():
    ledger = MemoryTracker()
    with FakeTensorMode(), ledger:
        kept = torch.ones(2**40)
        del kept
        gc.collect()
        torch.ones(1)
    assert [peak.total for peak in ledger.line] == [2**42, 4]
