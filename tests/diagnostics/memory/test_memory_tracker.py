import gc

import torch
from torch._subclasses import FakeTensorMode

from runner.diagnostics.memory.memory_tracker import (
    ACTIVATIONS,
    OPTIMIZER,
    WEIGHTS,
    MemoryBreakdown,
    MemoryTracker,
)


def test_freed_storages_are_not_counted():
    tracker = MemoryTracker()
    with tracker:
        held = torch.ones(1000)
        torch.ones(500)
        torch.ones(1)
    assert [peak.activations for peak in tracker.timeline] == [4000, 6000, 4004]
    assert held.sum() == 1000


def test_views_and_the_storage_they_share_count_once():
    tracker = MemoryTracker()
    with tracker:
        whole = torch.ones(1000)
        parts = whole[:500], whole.view(10, 100)
    assert tracker.timeline[-1] == MemoryBreakdown(activations=4000)
    assert len(parts) == 2


def test_a_storage_has_one_kind_at_a_time():
    state, tracker = torch.ones(10), MemoryTracker()
    tracker.add(ACTIVATIONS, state)
    tracker.add(OPTIMIZER, state[:5])
    with tracker:
        torch.ones(())
    assert tracker.timeline == [MemoryBreakdown(optimizer=40, activations=4)]


def test_a_backward_makes_temporaries_and_gradients():
    weight, tracker = torch.ones(100, requires_grad=True), MemoryTracker()
    tracker.add(WEIGHTS, weight)
    with tracker.gradients_of([weight]), tracker:
        loss = (weight * weight).exp().sum()
        forward = len(tracker.timeline)
        loss.backward()
        torch.ones(())
    assert tracker.timeline[0] == MemoryBreakdown(weights=400, activations=400)
    assert max(peak.temporaries for peak in tracker.timeline[:forward]) == 0
    assert max(peak.temporaries for peak in tracker.timeline) >= 400
    assert tracker.timeline[-1].gradients == 400
    assert weight.grad is not None


def test_the_update_makes_temporaries():
    tracker = MemoryTracker()
    tracker.begin_update()
    with tracker:
        torch.ones(100)
    assert tracker.timeline == [MemoryBreakdown(temporaries=400)]


def test_fake_tensors_count_as_real_ones():
    tracker = MemoryTracker()
    with FakeTensorMode(), tracker:
        held = torch.ones(2**40)
        del held
        gc.collect()
        torch.ones(1)
    assert [peak.total for peak in tracker.timeline] == [2**42, 4]
