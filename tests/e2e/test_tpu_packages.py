"""The packages for TPUs themselves, in environments of their own; everything but torch comes from
this one. torch_xla really trains, on the CPU through PJRT; torch_tpu finds no device here and must
say so. 4 GiB of packages and some minutes; RUNNER_TORCH_XLA and RUNNER_TORCH_TPU name a Python that
has them already. `python -m pytest -m soak tests/e2e/test_tpu_packages.py`
"""

import json
import os
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.soak
XLA = ("torch==2.9.*", "torchvision==0.24.*", "torch_xla==2.9.0")
NET = '''
from torch import nn


class Net(nn.Module):
    """A hidden layer with dropout, whose numbers come from the device."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.3))
        self.middle, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.middle(self.body(x)).relu())
'''
OWN = ("model=mlp", "model._target_=net.Net", "~model.input_shape", "~model.hidden")


def made(folder, *packages, first):
    """A Python with these packages; `first` says whether they go before this environment's own."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    install = [python, "-m", "pip", "install", "--quiet", *packages]
    if first:
        subprocess.run(install, check=True, timeout=1800)
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if not first:
        subprocess.run(install, check=True, timeout=1800)
    return str(python)


@pytest.fixture(scope="module")
def with_xla(tmp_path_factory):
    given = os.environ.get("RUNNER_TORCH_XLA")
    return given or made(tmp_path_factory.mktemp("xla"), *XLA, first=True)


@pytest.fixture(scope="module")
def with_tpu(tmp_path_factory):
    given = os.environ.get("RUNNER_TORCH_TPU")
    return given or made(tmp_path_factory.mktemp("tpu"), "torch_tpu==0.2.0", first=False)


@pytest.fixture
def typed(tmp_path, clean):
    """`python -m runner <args>` by that Python, in a folder that holds a model with dropout."""
    (tmp_path / "net.py").write_text(NET)

    def run(python, *args, **env):
        return subprocess.run(
            [python, "-W", "ignore", "-m", "runner", *args],
            cwd=tmp_path,
            env={**clean, **env},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_torch_xla_trains_as_the_cpu_does(with_xla, typed, main, tmp_path, precision):
    same = (f"precision={precision}", "model=mlp", "train.max_steps=23", "tracking=none")
    on_tpu, on_cpu = tmp_path / "tpu", tmp_path / "cpu"
    done = typed(with_xla, "accelerator=tpu", *same, f"hydra.run.dir={on_tpu}", PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stdout + done.stderr
    assert main("accelerator=cpu", *same, f"hydra.run.dir={on_cpu}").rc == 0
    assert result(on_tpu)["device"] == "CPU, not a TPU (torch_xla 2.9.0)"
    assert result(on_tpu)["precision"] == precision
    there, here = (result(folder)["metrics"]["val/loss"] for folder in (on_tpu, on_cpu))
    assert there == pytest.approx(here, rel=1e-4 if precision == "32-true" else 0.05)
    saved = torch.load(tmp_path / "tpu/checkpoints/step-00000023.pt")
    assert {w.device.type for w in saved["model"].values()} == {"cpu"}


def test_float16_is_refused_or_recorded_as_what_ran(with_xla, typed, tmp_path):
    run = ("accelerator=tpu", "precision=16-mixed", "model=mlp", "train.max_steps=3")
    done = typed(with_xla, *run, "tracking=none", PJRT_DEVICE="CPU")
    assert (done.returncode, "Type precision=bf16-mixed" in done.stderr) == (2, True), done.stderr
    store = f"sqlite:///{tmp_path}/mlflow.db"
    more = ("precision.allow_substitute=true", f"tracking.uri={store}", f"hydra.run.dir={tmp_path}")
    done = typed(with_xla, *run, *more, PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path)["precision"] == "bf16-mixed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's own, of SQLAlchemy
        from mlflow import MlflowClient

        recorded = MlflowClient(store).get_run(result(tmp_path)["run_id"]).data
    assert recorded.tags["precision"] == "bf16-mixed"
    assert recorded.params["precision.name"] == "16-mixed"
    assert recorded.params["precision.allow_substitute"] == "True"


def test_an_interrupted_run_ends_like_an_uninterrupted_one(with_xla, typed, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run = (
        "accelerator=tpu",
        "precision=bf16-mixed",
        *OWN,
        "train.max_steps=8",
        "tracking=none",
        "checkpoint.every_steps=4",
        "checkpoint.keep=9",
    )
    for folder in (whole, cut):
        done = typed(with_xla, *run, f"hydra.run.dir={folder}", PJRT_DEVICE="CPU")
        assert done.returncode == 0, done.stderr
    (cut / "result.json").unlink()
    (cut / "checkpoints/step-00000008.pt").unlink()
    done = typed(with_xla, f"checkpoint.resume={cut}", PJRT_DEVICE="CPU")
    assert "resumed at step 4 of 8" in done.stdout, done.stderr
    one, other = (torch.load(f / "checkpoints/step-00000008.pt") for f in (whole, cut))
    assert one["model"].keys() == other["model"].keys()
    for name, weight in one["model"].items():
        assert torch.equal(weight, other["model"][name]), name
    assert torch.equal(one["rng"]["xla"], other["rng"]["xla"])


def test_torch_xla_without_a_tpu_says_so(with_xla, typed):
    done = typed(with_xla, "accelerator=tpu", "tracking=none")
    assert done.returncode == 2
    assert "torch_xla 2.9.0 finds no TPU. Type accelerator=cpu." in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_tpu_without_a_tpu_says_so(with_tpu, typed):
    done = typed(with_tpu, "accelerator=tpu", "tracking=none")
    assert done.returncode == 2
    assert "torch_tpu 0.2.0 finds no TPU. Type accelerator=cpu." in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_lists_what_a_tpu_has(with_xla, typed):
    done = typed(with_xla, "doctor", PJRT_DEVICE="CPU", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("accelerator=tpu: CPU, not a TPU (torch_xla 2.9.0)")[2]
    cells = [line.split() for line in table.partition("accelerator=cpu:")[0].splitlines()]
    runs = [words[1] for words in cells if words[3:4] == ["yes"]]
    assert runs == ["32-true", "bf16-mixed", "bf16-true"]
