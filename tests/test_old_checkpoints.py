"""Runs that version 0.1 left behind resume, evaluate and replay in the version that is tested.

tests/data/run_of_0_1 holds what version 0.1 wrote for the command

    python -m runner model=mlp 'model.hidden=[8]' data=digits optimizer=adamw scheduler=cosine
        optimizer.lr=0.05 precision=16-mixed precision.loss_scale.init_scale=1e7
        precision.loss_scale.growth_interval=3 train.max_steps=60 train.batch_size=16
        train.eval_every=2 train.log_every=2 train.early_stop=4 guard.overflow=warn
        guard.overflow_steps=3 checkpoint.best=true seed=1

which received SIGTERM after the evaluation at step 24. The second folder is a run of
precision=transformer-engine precision.emulate=true adapter=lora, stopped at step 10 of 20. In each,
end.json says how version 0.1 itself finished the run, and with which torch and CPU. The files are
never written again: a later version reads them as they are.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from runner import accelerator, checkpoint, train

DATA = Path(__file__).parent / "data"
RUNS = ("run_of_0_1", "run_of_0_1_transformer_engine_emulated")


@pytest.fixture
def old_run(tmp_path):
    """Copy a stored run's folder to a place where a command may write."""

    def copied(name):
        return Path(shutil.copytree(DATA / name, tmp_path / "old"))

    return copied


@pytest.fixture
def courses(monkeypatch):
    """The training courses that a command makes, each right after its restore."""
    seen = []
    restore = train.Course.restore

    def spy(course, saved):
        told = restore(course, saved)
        seen.append({key: observer.state_dict() for key, observer in by_kind(course).items()})
        return told

    monkeypatch.setattr(train.Course, "restore", spy)
    return seen


def by_kind(course):
    return {type(observer).__name__: observer for observer in course.observers}


def sha256_of_weights(path):
    digest = hashlib.sha256()
    for name, weight in torch.load(path, weights_only=True)["model"].items():
        digest.update(name.encode())
        digest.update(weight.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def computes_the_same_bits(end):
    """Whether this machine's torch and CPU are those that computed end.json."""
    return (
        torch.__version__.partition("+")[0] == end["torch"]
        and torch.backends.cpu.get_cpu_capability() == end["capability"]
        and accelerator.cpu_name() == end["cpu"]
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_old_version_resumes_and_ends_as_it_would_have(name, main, old_run):
    folder, end = old_run(name), json.loads((DATA / name / "end.json").read_text())
    done = main(f"checkpoint.resume={folder}", "tracking=none")
    assert done.rc == 0, done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["steps"] == end["steps"]  # where early stopping counts on, in the first run
    assert result["skipped_steps"] == end["skipped_steps"]
    assert result["loss_scale"] == end["loss_scale"]
    assert result["best"] == pytest.approx(end["best"], abs=0.02)
    assert result["metrics"] == pytest.approx(end["metrics"], rel=0.1)
    assert result["train_loss"] == pytest.approx(end["train_loss"], rel=0.05)
    if computes_the_same_bits(end):
        assert result["metrics"] == end["metrics"]
        assert result["train_loss"] == end["train_loss"]
        assert sha256_of_weights(checkpoint.find(str(folder))) == end["sha256_of_weights"]
