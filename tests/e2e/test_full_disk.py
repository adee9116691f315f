"""A real disk that fills up: before a run, while it trains, and right before its end."""

import re
import subprocess

import pytest
from quiet_mlflow import runs_in
from run_folders import only_run, read_json, write_lab

pytestmark = pytest.mark.slow

RUN = (
    "--config-dir lab/conf model=fills data=mine train.batch_size=8 train.log_every=2 "
    "train.max_steps=12 precision=16-mixed"
).split()
FULL = "No space left on device"


@pytest.fixture
def small(small):
    """A folder of a user's on a file system of 2 MiB."""
    return write_lab(small)


@pytest.fixture
def filling(small, cli):
    """The run that fills the disk, on it."""
    return lambda *args: cli(*RUN, "tracking=none", *args, cwd=small)


def check_no_traceback(done):
    """Check that a command printed no traceback and no abort."""
    assert "Traceback" not in done.stderr, done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.parametrize("left", [0, 20_000])
def test_no_run_begins_on_a_full_disk(filling, small, left):
    (small / "fill").write_bytes(
        bytes(2**21 - sum(f.stat().st_blocks * 512 for f in small.rglob("*")) - left)
    )
    done = filling().check_refused()
    check_no_traceback(done)
    (line,) = done.stderr.splitlines()
    assert FULL in line
    assert "hydra.run.dir=<folder>" in line
    assert "train/loss" not in done.stdout


def test_no_run_begins_in_a_read_only_folder(filling, small):
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    done = filling().check_refused()
    (line,) = done.stderr.splitlines()
    assert "Read-only file system. Run in a folder that takes files" in line


@pytest.mark.parametrize(
    ("at", "saved"), [(3, ""), (12, "step-00000010.pt")], ids=["mid-run", "at the end"]
)
def test_a_run_that_can_save_nothing_prints_its_result(filling, small, at, saved):
    given = ["checkpoint.every_steps=5", "checkpoint.safetensors=true", f"model.only='{saved}'"]
    done = filling(f"model.at={at}", *given)
    assert done.rc == 1
    check_no_traceback(done)
    for name in ("dtypes.json", "loss_scale.png", "result.json"):
        assert f"{name} was not written: {FULL}." in done.stdout
    assert re.search(r"│ val/accuracy +│ 0\.", done.stdout)
    assert [path.name for path in small.rglob("step-*.pt")] == ([saved] if saved else [])
    last = f"{saved}." if saved else "there is no earlier one"
    assert f"error: A checkpoint could not be written ({FULL}): " in done.stderr
    assert last in done.stderr
    assert f"model.safetensors was not written: {FULL} (os error 28)." in done.stderr
    assert not list(small.rglob("*.partial"))


def test_a_picture_that_cannot_be_written_costs_a_warning(filling, small):
    filling("model.at=12", "model.left=16384", "checkpoint.final=false").check_ok(
        f"warning: outputs/runs/{only_run(small).name}/loss_scale.png was not written: {FULL}."
    )
    assert read_json(only_run(small) / "result.json")["status"] == "finished"


def test_a_result_that_cannot_be_written_is_no_success(filling):
    done = filling("model.at=12", "checkpoint.final=false")
    assert done.rc == 1
    assert f"result.json was not written: {FULL}. The result is above." in done.stderr
    assert re.search(r"│ val/accuracy +│ 0\.", done.stdout)


def test_the_store_has_the_reason(small, cli, store, reader):
    done = cli(*RUN, f"tracking.uri={store}", "tracking.experiment=full", "model.at=12", cwd=small)
    assert done.rc == 1
    check_no_traceback(done)
    assert f"The model is not in MLflow, its checkpoint has the weights: {FULL}." in done.stdout
    (run,) = runs_in(reader(), "full")
    assert run.info.status == "FAILED"
    assert f"A checkpoint could not be written ({FULL})" in run.data.tags["error"]
    assert run.data.metrics["train/loss"] > 0
