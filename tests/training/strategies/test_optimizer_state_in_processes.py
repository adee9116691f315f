"""Optimizer state in bfloat16 beside float32 weights, in two processes: the same training as in
one, and a resume bit by bit."""

import pytest
import torch
from processes import IMAGES, MLP, Outcome, close

from runner.core.record.checkpoint_file import shards_folder
from runner.core.record.sharded_tensors import load_full

pytestmark = pytest.mark.slow

KINDS = ("ddp", "fsdp")
TYPED = (
    f"{MLP} {IMAGES} optimizer=adamw optimizer.lr=0.01 optimizer.betas=[0.9,0.95] "
    "optimizer.state_dtype=bfloat16"
)


def typed(kind, more=""):
    return f"{TYPED} strategy={kind} {more}"


@pytest.fixture(scope="module")
def runs(run_in_processes, tmp_path_factory):
    """Runs of six steps in one and in two processes, and runs of three that are resumed."""
    folder = tmp_path_factory.mktemp("state")
    found = run_in_processes(1, {"single": typed("single")}, folder)
    jobs = {}
    for kind in KINDS:
        jobs[kind] = typed(kind)
        jobs[f"{kind}-cut"] = typed(kind, "train.max_steps=3")
    found |= run_in_processes(2, jobs, folder)
    rest = {}
    for kind in KINDS:
        rest[f"{kind}-rest"] = typed(kind, f"checkpoint.resume={folder / f'{kind}-cut'}")
    run_in_processes(2, rest, folder)
    found |= {f"{kind}-cut": Outcome(folder / f"{kind}-cut") for kind in KINDS}
    return found


def moments(outcome):
    """Return the tensors of the optimizer's state, whole, by parameter and key."""
    (optimizer,) = outcome.content()["optimizers"]
    state = load_full(optimizer, shards_folder(outcome.checkpoint()))["state"]
    return {
        (index, key): value
        for index, values in state.items()
        for key, value in values.items()
        if key != "step"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(runs, kind):
    one, many = runs["single"], runs[kind]
    for key in ("train/loss", "val/loss"):
        close(one.values(key), many.values(key), rtol=2e-3, atol=1e-3)
        assert many.values(key) == many.values(key, rank=1)
    assert {value.dtype for value in many.weights().values()} == {torch.float32}
    assert {value.dtype for value in moments(many).values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_as_an_uninterrupted_one(runs, kind):
    whole, cut = runs[kind], runs[f"{kind}-cut"]
    close(whole.weights(), cut.weights(), rtol=0, atol=0)
    close(moments(whole), moments(cut), rtol=0, atol=0)
