import gc

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from bench.memory_plan import peak_allocation
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


# What kernels take inside themselves, against the allocator.
def convolution(dtype):
    image, weight = torch.randn(4, 64, 16, 16, dtype=dtype), torch.randn(128, 64, 3, 3, dtype=dtype)
    return lambda: F.conv2d(image, weight, padding=1)


def convolution_backward(dtype):
    image, weight = torch.randn(4, 64, 16, 16, dtype=dtype), torch.randn(128, 64, 3, 3, dtype=dtype)
    grad = torch.randn(4, 128, 16, 16, dtype=dtype)
    again = torch.ops.aten.convolution_backward
    return lambda: again(
        grad, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )


def into(dtype):
    narrow, wide = torch.randn(512, 512, dtype=dtype), torch.randn(512, 1)
    return lambda: narrow.mul_(wide)


def promoted(dtype):
    narrow, wide = torch.randn(512, 512, dtype=dtype), torch.randn(512, 1)
    return lambda: narrow + wide


def norms(dtype):
    grads = [torch.randn(256, 256, dtype=dtype), torch.randn(512, 512, dtype=dtype)]
    return lambda: torch._foreach_norm(grads, 2.0, dtype=torch.float32)


@pytest.mark.parametrize(
    ("made", "dtype", "within"),
    [
        (convolution, torch.float32, 0.01),
        (convolution, torch.float64, 0.01),
        # oneDNN reorders for AMX in memory of its own.
        (convolution, torch.bfloat16, 0.35 if torch.cpu._is_amx_tile_supported() else 0.01),
        (convolution_backward, torch.float32, 0.01),
        (convolution_backward, torch.float64, 0.01),
        (convolution_backward, torch.bfloat16, 0.15),
        (into, torch.bfloat16, 0.01),
        (into, torch.float32, 0.01),
        (promoted, torch.bfloat16, 0.01),
        (norms, torch.bfloat16, 0.01),
    ],
)
def test_an_operator_takes_what_the_allocator_gives(made, dtype, within):
    run, tracker = made(dtype), MemoryTracker()
    taken = peak_allocation(run)
    inputs = [cell.cell_contents for cell in run.__closure__ or ()]
    held = [t for t in inputs if isinstance(t, Tensor)]
    tracker.add(0, *held, *(t for group in inputs if isinstance(group, list) for t in group))
    with tracker:
        run()
    assert max(sum(peak[1:]) for peak in tracker.timeline) == pytest.approx(
        taken, rel=within, abs=64
    )
