"""strategy=fsdp shards packed weights: two processes tune an adapter as one does, and resume."""

import shutil

import pytest
import torch
from processes import Outcome, close
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import typed

pytestmark = pytest.mark.slow

STEPS = ("train.max_steps=4", "train.eval_every=2", "train.log_every=1", "train.batch_size=6")
LORA = ("adapter=lora", "train.clip_norm=0.5", "optimizer.lr=0.01")
CASES = {
    "nf4-dq": (("precision=bnb-nf4-dq", "precision.compute_dtype=float32"), 1e-5),
    "fp4-some": (
        (
            "precision=bnb-fp4",
            "precision.compute_dtype=float32",
            "precision.ignore_modules=['*.h.0.*']",
            "train.activation_checkpointing=true",
        ),
        1e-5,
    ),
    "bnb-int8": (("precision=bnb-int8",), 2e-3),
    "int4": (("precision=int4",), 1e-5),
}
"""What is typed, and by how much losses may differ: products are rounded by rows."""
PACKED = "transformer.h.1.mlp.c_fc.base_layer.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def words(folder):
    common = (*typed("gpt2", folder), *STEPS, *LORA)
    return {name: [*common, *more] for name, (more, _) in CASES.items()}


@pytest.fixture(scope="module")
def two(run_in_processes, folder, words):
    jobs = {}
    for name, typed_words in words.items():
        sharded = [*typed_words, "strategy=fsdp", "checkpoint.safetensors=true"]
        jobs[name] = sharded
        jobs[f"cut-{name}"] = [*sharded, "train.max_steps=2"]
    return run_in_processes(2, jobs, folder)


@pytest.fixture(scope="module")
def alone(run_in_processes, folder, words, two):
    """Outcomes of one process: whole runs, and those that continue runs of two processes."""
    jobs = {}
    for name, typed_words in words.items():
        path = shutil.copytree(folder / f"cut-{name}", folder / f"continued-{name}")
        jobs[f"one-{name}"] = typed_words
        jobs[f"rest-{name}"] = [*typed_words, f"checkpoint.resume={path}"]
    return run_in_processes(1, jobs, folder)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_tune_as_one(alone, two, name):
    one, many, within = alone[f"one-{name}"], two[name], CASES[name][1]
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        close(many.values(key), one.values(key), rtol=within, atol=within)
    check_frozen_parts(many.weights(), one.weights())


def check_frozen_parts(found, wanted):
    """Check that codes, scales and other frozen weights are the same bit by bit."""
    assert found.keys() == wanted.keys()
    frozen = [key for key in wanted if "lora_" not in key]
    assert any(wanted[key].dtype in (torch.uint8, torch.int8) for key in frozen)
    assert all(torch.equal(found[key], wanted[key]) for key in frozen)


@pytest.mark.parametrize("name", CASES)
def test_each_process_holds_a_part_of_the_codes(two, name):
    whole = two[name].weights()[PACKED]
    shards = sorted(two[name].checkpoint().with_suffix(".shards").glob("shard-*.safetensors"))
    assert len(shards) == 2
    for path in shards:
        with safe_open(path, "pt") as file:
            assert file.get_slice(f"model/{PACKED}").get_shape()[0] * 2 == len(whole)


@pytest.mark.parametrize("name", CASES)
def test_an_export_has_the_codes_and_the_scales(two, name):
    weights = two[name].weights()
    found = load_file(two[name].folder / "model.safetensors")
    assert weights.keys() - found.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(found[key], weights[key]) for key in found)


def test_resumed_runs_end_as_those_that_were_not_interrupted(
    run_in_processes, folder, words, two, alone
):
    jobs = {}
    for name, typed_words in words.items():
        how = ["strategy=fsdp", f"checkpoint.resume={folder / f'cut-{name}'}"]
        jobs[f"rest-two-{name}"] = [*typed_words, *how]
    run_in_processes(2, jobs, folder)
    for name, (_, within) in CASES.items():
        whole = two[name].weights()
        resumed = Outcome(folder / f"cut-{name}").weights()
        assert all(torch.equal(resumed[key], whole[key]) for key in whole)
        in_one = Outcome(folder / f"continued-{name}")
        check_frozen_parts(in_one.weights(), whole)
        assert in_one.values("val/loss")[4] == pytest.approx(
            two[name].values("val/loss")[4], rel=within
        )
