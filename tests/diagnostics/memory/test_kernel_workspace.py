"""What kernels take inside themselves, against the allocator."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.memory_plan import peak_allocation
from runner.diagnostics.memory.memory_tracker import MemoryTracker


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
        (convolution, torch.bfloat16, 0.01),
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
