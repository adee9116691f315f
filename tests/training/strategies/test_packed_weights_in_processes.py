"""strategy=fsdp shards packed weights: two processes tune an adapter as one does, and resume."""

import shutil

import pytest
import torch
from processes import Outcome, close
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import typed

pytestmark = pytest.mark.slow

STEPS = "train.max_steps=4 train.eval_every=2 train.log_every=1 train.batch_size=6"
LORA = "adapter=lora train.clip_norm=0.5 optimizer.lr=0.01"
BNB = "precision.compute_dtype=float32 precision="
FP4 = f"{BNB}bnb-fp4 precision.ignore_modules=['*.h.0.*'] train.activation_checkpointing=true"
CASES = [
    pytest.param((f"{BNB}bnb-nf4-dq", 1e-5), id="nf4-dq"),
    pytest.param((FP4, 1e-5), id="fp4-some", marks=pytest.mark.extended),
    pytest.param(("precision=bnb-int8", 2e-3), id="bnb-int8"),
    pytest.param(("precision=int4", 1e-5), id="int4"),
]
"""What is typed, and by how much losses may differ: products are rounded by rows."""
PACKED = "transformer.h.1.mlp.c_fc.base_layer.weight"


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Return a folder, the overrides of a run, and by how much losses may differ."""
    more, within = request.param
    folder = tmp_path_factory.mktemp("packed")
    return folder, " ".join([*typed("gpt2", folder), STEPS, LORA, more]), within


@pytest.fixture(scope="module")
def two(run_in_processes, case):
    """Outcomes of two processes: a whole run, and one that ends after half of the steps."""
    folder, words, _ = case
    sharded = f"{words} strategy=fsdp checkpoint.safetensors=true"
    return run_in_processes(2, {"whole": sharded, "cut": f"{sharded} train.max_steps=2"}, folder)


@pytest.fixture(scope="module")
def alone(run_in_processes, case, two):
    """Outcome of one process, beside a run of two processes that it continues."""
    folder, words, _ = case
    path = shutil.copytree(folder / "cut", folder / "continued")
    jobs = {"one": words, "rest": f"{words} checkpoint.resume={path}"}
    return run_in_processes(1, jobs, folder)["one"]


def test_two_processes_tune_as_one(case, alone, two):
    many, within = two["whole"], case[2]
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        close(many.values(key), alone.values(key), rtol=within, atol=within)
    check_frozen_parts(many.weights(), alone.weights())


def check_frozen_parts(found, wanted):
    """Check that codes, scales and other frozen weights are the same bit by bit."""
    assert found.keys() == wanted.keys()
    frozen = [key for key in wanted if "lora_" not in key]
    assert any(wanted[key].dtype in (torch.uint8, torch.int8) for key in frozen)
    assert all(torch.equal(found[key], wanted[key]) for key in frozen)


def test_each_process_holds_a_part_of_the_codes(two):
    whole = two["whole"].weights()[PACKED]
    shards = two["whole"].checkpoint().with_suffix(".shards").glob("shard-*.safetensors")
    rows = []
    for path in shards:
        with safe_open(path, "pt") as file:
            rows.append(file.get_slice(f"model/{PACKED}").get_shape()[0])
    assert rows == [len(whole) // 2] * 2


def test_an_export_has_the_codes_and_the_scales(two):
    weights = two["whole"].weights()
    found = load_file(two["whole"].folder / "model.safetensors")
    assert weights.keys() - found.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(found[key], weights[key]) for key in found)


def test_resumed_runs_end_as_those_that_were_not_interrupted(run_in_processes, case, two, alone):
    folder, words, within = case
    resumed = f"{words} strategy=fsdp checkpoint.resume={folder / 'cut'}"
    run_in_processes(2, {"rest-two": resumed}, folder)
    whole = two["whole"]
    close(two["cut"].weights(), whole.weights(), rtol=0, atol=0)
    in_one = Outcome(folder / "continued")
    check_frozen_parts(in_one.weights(), whole.weights())
    assert in_one.values("val/loss")[4] == pytest.approx(whole.values("val/loss")[4], rel=within)
