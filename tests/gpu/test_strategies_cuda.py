"""strategy=ddp and strategy=fsdp over NCCL, in one process where there is one GPU."""

import os
import subprocess
import sys

import pytest
from run_folders import read_json

pytestmark = [pytest.mark.gpu]
TYPED = (
    "model=gpt data=text train.batch_size=8 train.max_steps=4 train.eval_every=4 "
    "tracking=none optimizer=sgd optimizer.lr=0.1"
).split()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_a_strategy_trains_as_a_single_process_does(tmp_path, root, precision):
    losses = {}
    for kind in ("single", "ddp", "fsdp"):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        folder = tmp_path / kind
        done = subprocess.run(
            [
                sys.executable,
                *([] if kind == "single" else torchrun),
                "-m",
                "runner",
                *TYPED,
                f"precision={precision}",
                f"strategy={kind}",
                f"hydra.run.dir={folder}",
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses[kind] = read_json(folder / "result.json")["metrics"]["val/loss"]
    within = 1e-4 if precision == "32-true" else 1e-2
    assert losses["ddp"] == pytest.approx(losses["single"], rel=within)
    assert losses["fsdp"] == pytest.approx(losses["single"], rel=within)
