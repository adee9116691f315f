import pytest
import torch
from run_folders import read_json

from runner.training.callbacks.runner_callbacks import Profiler


def call(path, write):
    write(path)


@pytest.fixture
def work():
    return lambda: torch.ones(8, 8) @ torch.ones(8, 8)


def test_the_first_steps_are_profiled(tmp_path, step, work):
    observer = Profiler(tmp_path, last_step=3, write_file=call)
    work()
    observer.on_steps((step(1), step(2)), None)
    assert list(tmp_path.iterdir()) == []
    observer.on_steps((step(3),), None)
    assert "aten::mm" in (tmp_path / "profile.txt").read_text()
    assert read_json(tmp_path / "profile.json")["traceEvents"]
    (tmp_path / "profile.txt").unlink()
    observer.on_steps((step(4),), None)
    observer.close()
    assert not (tmp_path / "profile.txt").exists()


def test_a_run_that_ends_early_writes_the_steps_so_far(tmp_path, work):
    observer = Profiler(tmp_path, last_step=100, write_file=call)
    work()
    observer.close()
    assert "aten::mm" in (tmp_path / "profile.txt").read_text()
