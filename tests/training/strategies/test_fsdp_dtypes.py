"""strategy.reduce_dtype: what is sent, and what it does to the numbers."""

import json

import pytest
import torch

pytestmark = pytest.mark.slow

GPT = (
    "model=gpt model.layers=2 model.width=32 model.heads=2 data=synthetic_tokens data.count=160 "
    "data.context=16 train.batch_size=8 train.max_steps=6 train.eval_every=3 train.log_every=1 "
    "optimizer=adamw optimizer.lr=0.01 strategy=fsdp"
)
BF16 = f"{GPT} precision=bf16-mixed train.clip_norm=0.5"
BFLOAT16 = "strategy.reduce_dtype=bfloat16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dtypes")


@pytest.fixture(scope="module")
def runs(run_in_processes, folder):
    """Outcomes of two processes, by the dtype in which gradients are added."""
    jobs = {
        "null": BF16,
        "float32": f"{BF16} strategy.reduce_dtype=float32",
        "bfloat16": f"{BF16} {BFLOAT16}",
        "refused": f"{GPT} precision=64-true {BFLOAT16}",
    }
    return run_in_processes(2, jobs, folder)


def numbers(run, rank):
    """Return the numbers of a run that do not depend on the clock."""
    found = {name: run.values(name, rank) for name in ("train/loss", "train/grad_norm", "val/loss")}
    assert found["train/grad_norm"]
    return found


def sent(run):
    return json.loads(run.text("bytes-0.json"))


def test_reducing_in_float32_is_what_fsdp_does_by_itself(runs):
    for rank in (0, 1):
        assert numbers(runs["float32"], rank) == numbers(runs["null"], rank)
    weights = runs["float32"].weights()
    for key, weight in runs["null"].weights().items():
        assert weights[key].dtype == weight.dtype
        assert torch.equal(weights[key], weight), key


def test_reducing_in_bfloat16_halves_the_bytes_and_rounds_the_gradients(runs):
    wide, narrow = runs["null"], runs["bfloat16"]
    assert sent(narrow)["reduced"] * 2 == sent(wide)["reduced"]
    assert sent(narrow)["gathered"] == sent(wide)["gathered"]
    first, other = (run.values("train/grad_norm")[1] for run in (wide, narrow))
    assert first != other
    assert first == pytest.approx(other, rel=1e-2)
    assert {tensor.dtype for tensor in narrow.weights().values()} == {torch.float32}


def test_a_run_says_in_which_dtype_it_adds_gradients(runs, folder):
    assert runs["bfloat16"].weights()
    printed = (folder / "output-0.txt").read_text()
    assert "fsdp gathers weights as they are stored; it adds gradients in bfloat16" in printed


def test_gradients_in_float64_are_not_rounded(runs):
    run = runs["refused"]
    assert run.refused == (
        "strategy.reduce_dtype=bfloat16 would round the float64 gradients of precision=64-true. "
        "Allowed here: null. Type strategy.reduce_dtype=null."
    )
    assert "train/loss" not in run.text("steps.jsonl")
