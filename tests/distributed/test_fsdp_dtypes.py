"""strategy.param_dtype and strategy.reduce_dtype: what is sent, and what it does to the numbers."""

import json
import shutil

import pytest
import torch
from processes import Outcome
from tiny_models import typed

pytestmark = pytest.mark.slow

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
HF = ("train.max_steps=3", "train.batch_size=6", "train.log_every=1", "precision=bf16-mixed")
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
    "float8": (*GPT, *FLOAT8, "precision.ignore_modules=[blocks.0]"),
    "convolutions": RESNET,
    "used-twice": USED_TWICE,
}
OF_LIBRARIES = {
    "gpt2": (),
    "gpt2-lora": ("adapter=lora", "adapter.dropout=0.2"),
}
"""A model of transformers, and a frozen one with an adapter."""
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
        cases[name] = (*typed(name.removesuffix("-lora"), folder), *HF, *more)
    jobs = {}
    for name, words in cases.items():
        jobs[f"{name}-null"] = [*words, "strategy=fsdp"]
        jobs[f"{name}-compute"] = [*words, "strategy=fsdp", COMPUTE]
    for name, more in (("float32", ["strategy.reduce_dtype=float32"]), ("bfloat16", [BFLOAT16])):
        jobs[f"reduced-{name}"] = [*CASES["bf16-mixed"], "strategy=fsdp", *more]
    jobs["cut"] = [*CASES["accumulated"], "strategy=fsdp", COMPUTE, "train.max_steps=4"]
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
    ("name", "most"), [("convolutions", 0.501), ("bf16-mixed", 0.53), ("accumulated", 0.53)]
)
def test_half_the_bytes_of_cast_weights_are_gathered(runs, name, most):
    """Batch norms, layer norms and the embeddings remain in float32."""
    for rank in (0, 1):
        as_stored, computed = (sent(runs[f"{name}-{key}"], rank) for key in ("null", "compute"))
        assert 0.5 <= computed["gathered"] / as_stored["gathered"] <= most


def test_four_processes_compute_the_same(run_in_processes, folder):
    jobs = {
        "four-null": [*CASES["bf16-mixed"], "strategy=fsdp"],
        "four-compute": [*CASES["bf16-mixed"], "strategy=fsdp", COMPUTE],
    }
    found = run_in_processes(4, jobs, folder)
    check_same(found["four-compute"], found["four-null"])


def test_the_averages_are_the_same(runs):
    as_stored, computed = (runs[f"accumulated-{key}"].averages() for key in ("null", "compute"))
    for key, average in as_stored.items():
        assert torch.equal(computed[key], average)


def test_a_run_says_what_it_gathers_in_which_dtype(runs, folder):
    printed = (folder / "output-0.txt").read_text()
    line = "fsdp gathers weights 25,152 of 28,032 in bfloat16, and adds gradients in float32"
    assert line in printed


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(runs, run_in_processes, folder):
    """Also one that gathers the weights in the other dtype from there on."""
    shutil.copytree(folder / "cut", folder / "cut-null")
    jobs = {
        "rest": [*CASES["accumulated"], "strategy=fsdp", COMPUTE, resumed(folder / "cut")],
        "rest-null": [*CASES["accumulated"], "strategy=fsdp", resumed(folder / "cut-null")],
    }
    run_in_processes(2, jobs, folder)
    whole = runs["accumulated-compute"]
    for name in ("cut", "cut-null"):
        rest = Outcome(folder / name)
        assert rest.values("val/loss")[6] == whole.values("val/loss")[6]
        for found, wanted in (
            (rest.weights(), whole.weights()),
            (rest.averages(), whole.averages()),
        ):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def resumed(path):
    return f"checkpoint.resume={path}"


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
