"""strategy.param_dtype and strategy.reduce_dtype: what is sent, and what it does to the numbers."""

import json
import shutil

import pytest
import torch
from processes import Outcome
from tiny_models import typed

from runner.precision.gathered_weights import gathers_several_dtypes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not gathers_several_dtypes(),
        reason="torch 2.15 is missing, whose FSDP gathers the weights of a unit in several dtypes",
    ),
]

TOKENS = (
    "data=synthetic_tokens",
    "data.count=160",
    "data.context=16",
    "train.batch_size=8",
    "train.max_steps=6",
    "train.eval_every=3",
    "train.log_every=1",
    "optimizer=adamw",
    "optimizer.lr=0.01",
)
GPT = ("model=gpt", "model.layers=2", "model.width=32", "model.heads=2", *TOKENS)
BF16 = (*GPT, "precision=bf16-mixed")
RESNET = (
    "model=resnet",
    "data=synthetic_images",
    "data.shape=[3,8,8]",
    "data.count=60",
    "train.batch_size=8",
    "train.max_steps=2",
    "train.eval_every=2",
    "train.log_every=1",
    "precision=bf16-mixed",
)
USED_TWICE = ("~model", "+model._target_=nets.UsedTwice", *TOKENS, "precision=bf16-mixed")
FLOAT8 = ("precision=float8-tensorwise", "precision.emulate=true")
FLOAT8_WEIGHTS = (*FLOAT8, "precision.weights=bfloat16")
HF = ("train.max_steps=3", "train.batch_size=6", "train.log_every=1")
CASES = {
    "bf16-mixed": (*BF16, "train.clip_norm=0.5"),
    "untied": (
        *BF16,
        "model.tie_weights=false",
        "model.dropout=0.1",
        "strategy.reshard_after_forward=false",
        "train.activation_checkpointing=true",
    ),
    "16-mixed": (*GPT, "precision=16-mixed", "train.clip_norm=0.5"),
    "accumulated": (*BF16, "train.accumulate=3", "train.ema=0.5"),
    "islands": (*BF16, "precision.keep_fp32=[blocks.0,*.contract]"),
    "float8-some": (*GPT, *FLOAT8, "precision.ignore_modules=[blocks.0]"),
    "float8": (*GPT, *FLOAT8, "train.accumulate=3", "train.ema=0.5", "train.clip_norm=0.5"),
    "float8-bfloat16": (*GPT, *FLOAT8_WEIGHTS, "model.tie_weights=false"),
    "convolutions": RESNET,
    "used-twice": USED_TWICE,
}
OF_LIBRARIES = {
    "gpt2": ("precision=bf16-mixed",),
    "gpt2-lora": ("precision=bf16-mixed", "adapter=lora", "adapter.dropout=0.2"),
    "gpt2-float8": FLOAT8,
}
"""A model of transformers, whose linear layers are transposed, and a frozen one with an adapter."""
RESUMED = ("accumulated", "float8")
COMPUTE = "strategy.param_dtype=compute"
BFLOAT16 = "strategy.reduce_dtype=bfloat16"
REFUSED = {
    "32-true": (
        (*GPT, "precision=32-true", COMPUTE),
        "strategy.param_dtype=compute gathers float32 weights in the dtype to which autocast casts "
        "them, and precision=32-true runs without autocast. Allowed here: null. Type "
        "strategy.param_dtype=null, precision=bf16-mixed or precision=16-mixed.",
    ),
    "64-true": (
        (*GPT, "precision=64-true", COMPUTE, BFLOAT16),
        "strategy.param_dtype=compute gathers float32 weights in the dtype to which autocast casts "
        "them, and precision=64-true runs without autocast. Allowed here: null. Type "
        "strategy.param_dtype=null, precision=bf16-mixed or precision=16-mixed.\n"
        "strategy.reduce_dtype=bfloat16 would round the float64 gradients of precision=64-true. "
        "Allowed here: null. Type strategy.reduce_dtype=null.",
    ),
    "rowwise": (
        (*GPT, "precision=float8-rowwise", *FLOAT8_WEIGHTS[1:], COMPUTE),
        "strategy.param_dtype=compute cannot gather the bfloat16 weights of "
        "precision=float8-rowwise in FP8: the backward of a rowwise recipe casts the stored weight "
        "once more, with other scales. Allowed here: null. Type strategy.param_dtype=null or "
        "precision=float8-tensorwise.",
    ),
    "nothing": (
        (*BF16, "precision.keep_fp32=['*']", COMPUTE),
        "strategy.param_dtype=compute: the model has no weight that only linear layers or "
        "convolutions under autocast read, so nothing would be gathered in bfloat16. Type "
        "strategy.param_dtype=null.",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dtypes")


@pytest.fixture(scope="module")
def runs(run_in_processes, folder):
    """Outcomes of two processes, by case and by what was added to it."""
    cases = dict(CASES)
    for name, more in OF_LIBRARIES.items():
        cases[name] = (*typed("gpt2", folder), *HF, *more)
    jobs = {}
    for name, words in cases.items():
        jobs[f"{name}-null"] = [*words, "strategy=fsdp"]
        jobs[f"{name}-compute"] = [*words, "strategy=fsdp", COMPUTE]
    for name, more in (("float32", ["strategy.reduce_dtype=float32"]), ("bfloat16", [BFLOAT16])):
        jobs[f"reduced-{name}"] = [*CASES["bf16-mixed"], "strategy=fsdp", *more]
    for name in RESUMED:
        jobs[f"cut-{name}"] = [*CASES[name], "strategy=fsdp", COMPUTE, "train.max_steps=4"]
    for name, (words, _) in REFUSED.items():
        jobs[f"refused-{name}"] = [*words, "strategy=fsdp"]
    return run_in_processes(2, jobs, folder)


def numbers(run, rank=0):
    """Return the numbers of a run that do not depend on the clock."""
    names = ("train/loss", "train/grad_norm", "val/loss", "loss_scale/value", "loss_scale/overflow")
    found = {name: run.values(name, rank) for name in names}
    assert found["train/grad_norm"]
    return found


def sent(run, rank=0):
    return json.loads(run.text(f"bytes-{rank}.json"))


def check_same(run, other):
    """Check that two runs have the same numbers and weights, bit by bit."""
    for rank in (0, 1):
        assert numbers(run, rank) == numbers(other, rank)
    weights = run.weights()
    for key, weight in other.weights().items():
        assert weights[key].dtype == weight.dtype
        assert torch.equal(weights[key], weight), key


@pytest.mark.parametrize("name", [*CASES, *OF_LIBRARIES])
def test_gathering_in_the_compute_dtype_changes_no_bit(runs, name):
    as_stored, computed = runs[f"{name}-null"], runs[f"{name}-compute"]
    check_same(computed, as_stored)
    assert sent(computed)["gathered"] < sent(as_stored)["gathered"]
    assert sent(computed)["reduced"] == sent(as_stored)["reduced"]
    assert sent(computed)["reductions"] == sent(as_stored)["reductions"]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("convolutions", 0.5, 0.501),
        ("bf16-mixed", 0.5, 0.53),
        ("accumulated", 0.5, 0.53),
        ("float8", 0.25, 0.31),
        ("float8-bfloat16", 0.5, 0.55),
    ],
)
def test_cast_weights_are_gathered_in_one_or_two_bytes(runs, name, least, most):
    """Batch norms, layer norms and the embeddings remain as they are stored."""
    for rank in (0, 1):
        as_stored, computed = (sent(runs[f"{name}-{key}"], rank) for key in ("null", "compute"))
        assert least <= computed["gathered"] / as_stored["gathered"] <= most


@pytest.mark.parametrize(("processes", "name"), [(4, "bf16-mixed"), (3, "float8")])
def test_more_processes_compute_the_same(run_in_processes, tmp_path, processes, name):
    """Three do not divide the FP8 weights."""
    words = [*CASES[name], "strategy=fsdp"]
    found = run_in_processes(processes, {"null": words, "compute": [*words, COMPUTE]}, tmp_path)
    check_same(found["compute"], found["null"])


@pytest.mark.parametrize("name", RESUMED)
def test_the_averages_are_the_same(runs, name):
    as_stored, computed = (runs[f"{name}-{key}"].averages() for key in ("null", "compute"))
    for key, average in as_stored.items():
        assert torch.equal(computed[key], average)


@pytest.mark.parametrize(
    "gathered",
    ["25,152 of 28,032 in bfloat16", "12,288 of 28,032 in FP8 and 12,576 of 28,032 in bfloat16"],
)
def test_a_run_says_what_it_gathers_in_which_dtype(runs, folder, gathered):
    printed = (folder / "output-0.txt").read_text()
    line = f"fsdp gathers weights {gathered}, the others as they are stored; it adds gradients in"
    assert f"{line} float32" in printed


def test_resumed_runs_end_as_those_that_were_not_interrupted(runs, run_in_processes, folder):
    """Also those that gather the weights in the other dtype from there on."""
    jobs = {}
    for name in RESUMED:
        shutil.copytree(folder / f"cut-{name}", folder / f"cut-{name}-null")
        for cut, more in ((f"cut-{name}", [COMPUTE]), (f"cut-{name}-null", [])):
            how = [*more, f"checkpoint.resume={folder / cut}"]
            jobs[f"rest-{cut}"] = [*CASES[name], "strategy=fsdp", *how]
    run_in_processes(2, jobs, folder)
    for name in RESUMED:
        whole = runs[f"{name}-compute"]
        for cut in (f"cut-{name}", f"cut-{name}-null"):
            check_same_end(Outcome(folder / cut), whole)


def check_same_end(rest, whole):
    assert rest.values("val/loss")[6] == whole.values("val/loss")[6]
    for found, wanted in (
        (rest.weights(), whole.weights()),
        (rest.averages(), whole.averages()),
    ):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_reducing_in_float32_is_what_fsdp_does_by_itself(runs):
    check_same(runs["reduced-float32"], runs["bf16-mixed-null"])


def test_reducing_in_bfloat16_halves_the_bytes_and_rounds_the_gradients(runs):
    wide, narrow = runs["bf16-mixed-null"], runs["reduced-bfloat16"]
    assert sent(narrow)["reduced"] * 2 == sent(wide)["reduced"]
    assert sent(narrow)["gathered"] == sent(wide)["gathered"]
    first, other = (run.values("train/grad_norm")[1] for run in (wide, narrow))
    assert first != other
    assert first == pytest.approx(other, rel=1e-2)
    assert {tensor.dtype for tensor in narrow.weights().values()} == {torch.float32}


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_that_mean_nothing_are_refused(runs, name):
    run = runs[f"refused-{name}"]
    assert run.refused == REFUSED[name][1]
    assert "train/loss" not in run.text("steps.jsonl")
