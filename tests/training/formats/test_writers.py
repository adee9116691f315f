"""Checkpoints that a thread writes while the loop runs, on real disks."""

import time
from threading import current_thread
from types import SimpleNamespace

import pytest
import torch

from runner.core.base.errors import CheckpointError
from runner.core.record import checkpoint_file
from runner.tracking import locate
from runner.training.formats.writers import AsyncCheckpointWriter


def content(step, size=1000):
    tensor = torch.full((size,), float(step))
    blank = {key: kind() for kind, keys in checkpoint_file._KEYS.items() for key in keys}
    own = {"format": checkpoint_file.FORMAT, "step": step, "model": {"a": tensor, "tied": tensor}}
    return {**blank, **own}


def test_a_checkpoint_holds_the_state_at_the_time_of_the_call(tmp_path):
    saver, state = AsyncCheckpointWriter(tmp_path, 9, print), content(1, 3_000_000)
    saver.save(state)
    state["model"]["a"].fill_(7.0)  # the loop continues
    saver.save({**state, "step": 2})
    saver.finish()
    for step, value in ((1, 1.0), (2, 7.0)):
        found = checkpoint_file.load(checkpoint_file.checkpoint_path(tmp_path, step))["model"]
        assert bool((found["a"] == value).all())
        assert bool((found["tied"] == value).all())


def test_tensors_that_only_an_update_changes_are_copied_in_the_thread(tmp_path, monkeypatch):
    copies, copy = [], torch.Tensor.copy_

    def copied(kept, value, **more):
        copies.append(current_thread().name)
        time.sleep(0.2)
        return copy(kept, value, **more)

    saver, state = AsyncCheckpointWriter(tmp_path, 9, print), content(1)
    state["model"]["statistics"] = torch.zeros(3)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    saver.save(state, changed_by_update=[state["model"]["a"]])
    assert copies[0] == "MainThread"  # a forward may change the statistics at once
    saver.wait_for_copy()
    assert copies[1:] == ["checkpoint"]
    state["model"]["a"].fill_(7.0)
    saver.finish()
    found = checkpoint_file.load(checkpoint_file.checkpoint_path(tmp_path, 1))["model"]
    assert bool((found["a"] == 1.0).all())


def test_on_a_full_disk_the_last_checkpoint_stays_and_training_continues(small):
    said = []
    saver = AsyncCheckpointWriter(small, 1, said.append)
    saver.save(content(1))
    saver.save(content(2, 2_000_000))  # 8 MB
    saver.save(content(3))
    saver.finish()
    (warning,) = said
    assert "could not be written" in warning
    assert "step-00000001.pt. Training continues." in warning
    assert [path.name for path in small.iterdir()] == ["step-00000003.pt"]
    with pytest.raises(CheckpointError, match=r"last whole one is .*step-00000003\.pt"):
        saver.finish(content(4, 2_000_000))
    assert locate.load_newest(str(small), None, "checkpoint", []).content["step"] == 3


def test_any_error_in_the_thread_is_reported(tmp_path):
    said = []
    saver = AsyncCheckpointWriter(tmp_path, 1, said.append)
    saver.save({**content(1), "odd": lambda: None})
    saver.finish()
    assert len(said) == 1
    assert "there is no earlier one" in said[0]


def test_without_memory_for_a_copy_the_loop_waits_for_the_file(tmp_path, monkeypatch):
    memory = SimpleNamespace(available=1)
    monkeypatch.setattr("runner.training.formats.writers.psutil.virtual_memory", lambda: memory)
    saver = AsyncCheckpointWriter(tmp_path, 1, print)
    saver.save(content(1))
    assert saver._thread is None
    assert checkpoint_file.checkpoint_path(tmp_path, 1).exists()


def test_a_copy_that_fails_is_reported_and_blocks_nothing(tmp_path, monkeypatch):
    def breaks(kept, value, **more):
        raise RuntimeError("no copy")

    said, state = [], content(1)
    saver = AsyncCheckpointWriter(tmp_path, 9, said.append)
    monkeypatch.setattr(torch.Tensor, "copy_", breaks)
    saver.save(state, changed_by_update=[state["model"]["a"]])
    saver.wait_for_copy()
    saver.finish()
    assert "no copy" in said[0]
    assert not list(tmp_path.glob("*.pt"))


def test_the_partial_file_of_a_killed_process_is_removed(tmp_path):
    (tmp_path / "step-00000001.partial").write_bytes(b"half")
    # Several processes write a draft as a folder of shards.
    (tmp_path / "step-00000002.partial").mkdir()
    (tmp_path / "step-00000002.partial" / "shard").write_bytes(b"half")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / "step-00000003.partial").symlink_to(elsewhere)
    AsyncCheckpointWriter(tmp_path, 1, print)
    assert list(tmp_path.iterdir()) == [elsewhere]
    assert list(elsewhere.iterdir()) == [elsewhere / "file"]


def test_a_folder_in_a_checkpoints_place_costs_a_warning(tmp_path):
    said = []
    writer = AsyncCheckpointWriter(tmp_path, 9, said.append)
    (tmp_path / "step-00000001.pt").mkdir()
    writer.save(content(1))
    writer.save(content(2))
    writer.finish()
    assert [text.partition(":")[0] for text in said] == ["warning"]
    assert "(Is a directory)" in said[0]
    # The draft of the first is deleted.
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001.pt", "step-00000002.pt"]
