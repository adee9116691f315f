import os
from pathlib import Path

import pytest
import torch
from states import CPU
from torch import nn

from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.core.record import checkpoint_file
from runner.core.record.checkpoint_file import LoadedCheckpoint
from runner.precision.registry import load_precision
from runner.tracking import locate
from runner.training.model import load_weights
from runner.training.state_dict import checkpoint_state_dict
from runner.training.tasks.classification import Classification


def save(folder, state, spec, keep):
    return checkpoint_file.save(folder, checkpoint_state_dict(state, spec), keep)


@pytest.fixture
def state():
    torch.manual_seed(0)
    model, precision = nn.Linear(3, 2), load_precision("16-mixed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    driven = ScheduledOptimizer(optimizer, schedule)
    made = TrainState(model, precision, Classification(), precision.scale(CPU), [driven], CPU)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    made.step, made.epoch, made.skipped = 7, 2, 1
    return made


@pytest.fixture
def saved(state, tmp_path):
    return save(tmp_path / "checkpoints", state, RunSpec(seed=5), keep=2)


def test_a_checkpoint_holds_everything_that_training_changes(state, saved):
    content = checkpoint_file.load(saved)
    assert saved.name == "step-00000007.pt"
    assert (content["step"], content["epoch"], content["skipped_steps"]) == (7, 2, 1)
    assert content["precision"] == "16-mixed"
    assert content["spec"]["seed"] == 5
    assert content["loss_scale"] == {"scale": 65536.0, "applied_in_a_row": 0}
    assert torch.equal(content["model"]["weight"], state.model.weight)
    moments = content["optimizers"][0]["state"][0]["exp_avg"]
    assert torch.equal(moments, next(iter(state.optimizers[0].optimizer.state.values()))["exp_avg"])
    assert content["schedulers"][0]["last_epoch"] == 1


def test_only_the_newest_checkpoints_stay(state, saved):
    for state.step in (8, 9, 10):
        save(saved.parent, state, RunSpec(), keep=2)
    names = sorted(path.name for path in saved.parent.iterdir())
    assert names == ["step-00000009.pt", "step-00000010.pt"]


def test_a_checkpoint_is_on_disk_before_its_name_and_before_the_last_goes(
    state, saved, monkeypatch
):
    order = []
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def sync(file):
        order.append(f"sync {Path(f'/proc/self/fd/{file}').readlink().name}")
        fsync(file)

    def rename(path, target):
        order.append(f"rename {path.name} to {target.name}")
        return replace(path, target)

    def delete(path):
        order.append(f"delete {path.name}")
        unlink(path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    monkeypatch.setattr(Path, "unlink", delete)
    state.step = 8
    save(saved.parent, state, RunSpec(), keep=1)
    assert order == [
        "sync step-00000008.partial",
        "rename step-00000008.partial to step-00000008.pt",
        "sync checkpoints",
        "delete step-00000007.pt",
    ]


def test_a_disk_that_fills_up_does_not_damage_the_checkpoint_before(state, saved, monkeypatch):
    def full(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    state.step = 8
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        save(saved.parent, state, RunSpec(), keep=1)
    assert locate.find_checkpoint(str(saved.parent)) == saved
    assert checkpoint_file.load(saved)["step"] == 7


def test_a_compiled_model_is_saved_under_its_plain_names(state, tmp_path):
    state.model = torch.compile(state.model)
    path = save(tmp_path, state, RunSpec(), keep=1)
    assert set(checkpoint_file.load(path)["model"]) == {"weight", "bias"}


def test_find_checkpoint_takes_a_file_a_run_or_its_folder_of_checkpoints(state, saved, tmp_path):
    state.step = 12
    newest = save(saved.parent, state, RunSpec(), keep=2)
    assert locate.find_checkpoint(str(saved)) == saved
    assert locate.find_checkpoint(str(tmp_path)) == newest
    assert locate.find_checkpoint(str(saved.parent)) == newest


@pytest.mark.parametrize("where", ["/no/such.pt", "./nothing", "empty"])
def test_the_error_of_find_checkpoint_says_what_it_takes(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no checkpoint is there. Give a .pt file, the folder"):
        locate.find_checkpoint(where)


def test_an_unknown_run_id_does_not_make_a_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="neither a file, a folder nor the id of a run in sqlite"):
        locate.find_checkpoint("0123abcd")
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_file_is_refused(saved):
    saved.write_bytes(saved.read_bytes()[:100])
    with pytest.raises(ConfigError, match=f"checkpoint={saved} is no checkpoint .* cut short"):
        checkpoint_file.load(saved)


def test_a_flipped_bit_is_found(saved):
    content = bytearray(saved.read_bytes())
    weights = checkpoint_file.load(saved)["model"]["weight"].numpy().tobytes()
    content[content.index(weights)] ^= 1
    saved.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is damaged: .* has changed on disk"):
        checkpoint_file.load(saved)


@pytest.mark.parametrize("content", [{"weight": torch.ones(1)}, [1, 2]])
def test_a_file_that_this_runner_did_not_write_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match="was not written by this runner"):
        checkpoint_file.load(tmp_path / "other.pt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"format": 1, "observers": {}}, "of version 1"),
        ({"format": 99}, "of version 99"),
        ({"format": [torch.ones(2)]}, "of version [tensor"),
        ({"state_dict": {}}, "without a version"),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_in_one_message(tmp_path, content, words):
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(ConfigError) as caught:
        checkpoint_file.load(path)
    message = str(caught.value)
    assert message.startswith(f"checkpoint={path} is a checkpoint {words}")
    assert message.endswith(
        f"; this program reads version {checkpoint_file.FORMAT}. Give a checkpoint of "
        "this version of precision-runner, or use the version that wrote it."
    )


@pytest.mark.parametrize("bypassed", [["a"], {"a": 1}, {1: "why"}])
def test_bypassed_layers_must_be_names_with_reasons(saved, bypassed):
    # Read into memory: what load() maps would vanish where the file is written anew.
    content = torch.load(saved, weights_only=True)
    torch.save({**content, "bypassed": bypassed}, saved)
    with pytest.raises(ConfigError, match=r"its bypassed (are no names|is no dict)"):
        checkpoint_file.load(saved)


class Evil:
    def __reduce__(self):
        return print, ("code that runs",)


def test_no_code_of_a_file_is_run(tmp_path, capsys):
    torch.save({"format": checkpoint_file.FORMAT, "model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        checkpoint_file.load(tmp_path / "evil.pt")
    assert capsys.readouterr().out == ""


def test_weights_take_the_models_dtype(saved):
    model = nn.Linear(3, 2).half()
    load_weights(model, LoadedCheckpoint(saved, checkpoint_file.load(saved)))
    assert model.weight.dtype is torch.float16
    assert torch.equal(model.weight, checkpoint_file.load(saved)["model"]["weight"].half())


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.Linear(3, 2, bias=False), nn.Identity()])
def test_weights_of_another_model_are_refused(saved, model):
    with pytest.raises(ConfigError, match=r"does not fit the model: .+ Take the checkpoint's own"):
        load_weights(model, LoadedCheckpoint(saved, checkpoint_file.load(saved)))
