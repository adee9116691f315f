from types import SimpleNamespace

import pytest
import torch

from runner.diagnostics.memory import limits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("taken", "whole", "available", "free"),
    [(3, 10, 100, 7), (3, 10, 5, 5), (12, 10, 100, 0)],
)
def test_free_is_what_the_limit_and_other_processes_leave(
    monkeypatch, taken, whole, available, free
):
    monkeypatch.setattr(limits, "memory_limit", lambda device: (taken, whole))
    memory = SimpleNamespace(available=available)
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: memory)
    assert limits.free_memory(CPU) == free
