"""Each precision trains, stops halfway and is resumed: one pair of runs, which all tests ask."""

from functools import cache
from types import SimpleNamespace

import pytest
from precision_models import EMULATED, precisions_on_cpu
from run_folders import cut_run, read_json
from states import check_same_checkpoints

from runner.core.record.checkpoint_file import load
from runner.precision import registry

STEPS, HALF = 4, 2
GPT = (
    "model=gpt model.layers=1 model.heads=1 model.width=32 data=synthetic_tokens data.count=40 "
    "data.context=8 train.batch_size=8 accelerator=cpu tracking=none "
    f"train.max_steps={STEPS} train.eval_every={STEPS} "
    f"checkpoint.every_steps={HALF} checkpoint.keep=9"
).split()
MORE = {
    # AdamW's 1e-8 is 0 in float16.
    "16-true": ["optimizer.eps=1e-4"],
    "transformer-engine-float16": ["optimizer.eps=1e-4"],
    # It overflows, so that the scale differs from step to step.
    "16-mixed": ["precision.loss_scale.init_scale=1e9", "precision.loss_scale.growth_interval=2"],
}
PRODUCT = "blocks.0.expand"
COMPUTES = {
    "64-true": ("Linear", "float64", "float64"),
    "32-true": ("Linear", "float32", "float32"),
    "tf32": ("Linear", "float32", "float32"),
    "bf16-mixed": ("Linear", "float32", "bfloat16"),
    "16-mixed": ("Linear", "float32", "float16"),
    "bf16-true": ("Linear", "bfloat16", "bfloat16"),
    "16-true": ("Linear", "float16", "float16"),
    "bnb-nf4": ("Linear4bit", "float32 uint8", "bfloat16"),
    "bnb-nf4-dq": ("Linear4bit", "float32 uint8", "bfloat16"),
    "bnb-fp4": ("Linear4bit", "float32 uint8", "bfloat16"),
    "bnb-fp4-dq": ("Linear4bit", "float32 uint8", "bfloat16"),
    "bnb-int8": ("Linear8bit", "float32 int8", "bfloat16"),
    "bnb-int8-training": ("Linear8bitTrained", "float32", "bfloat16"),
    "qat-int4": ("FakeQuantizedLinear", "float32", "float32"),
    "qat-int8": ("FakeQuantizedLinear", "float32", "float32"),
    "qat-nvfp4": ("FakeQuantizedLinear", "float32", "float32"),
    "float8-tensorwise": ("Float8Linear", "float32", "float8_e4m3fn"),
    "float8-rowwise": ("Float8Linear", "float32", "float8_e4m3fn"),
    "float8-rowwise-hp": ("Float8Linear", "float32", "float8_e4m3fn"),
    "torchao-mxfp8": ("Mxfp8Linear", "float32", "float8_e4m3fn"),
    "transformer-engine": ("TELinear", "bfloat16", "float32"),
    "transformer-engine-current": ("TELinear", "bfloat16", "float32"),
    "transformer-engine-block": ("TELinear", "bfloat16", "float32"),
    "transformer-engine-mxfp8": ("TELinear", "bfloat16", "float32"),
    "transformer-engine-nvfp4": ("TELinear", "bfloat16", "float32"),
    "transformer-engine-float16": ("TELinear", "float16", "float32"),
}
"""By precision: the class of a converted layer, what it stores, and in what it computes."""
CONVERTING = [name for name, (kind, *_) in COMPUTES.items() if kind != "Linear"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, inside):
    """Return a function that gives the folders of a precision's two runs; each is trained once."""

    @cache
    def train(name):
        home = tmp_path_factory.mktemp(name)
        words = [f"precision={name}", *MORE.get(name, [])]
        if name.startswith(EMULATED):
            words.append("precision.emulate=true")
        with inside(home) as main:
            main(*GPT, *words, "hydra.run.dir=whole").check_ok()
            cut_run(home / "whole", home / "resumed", HALF)
            done = main("checkpoint.resume=resumed").check_ok()
        assert f"resumed at step {HALF} of {STEPS}" in done.stdout
        return SimpleNamespace(whole=home / "whole", resumed=home / "resumed")

    return train


def last_checkpoint(folder):
    return folder / "checkpoints" / f"step-{STEPS:08d}.pt"


def content_of(folder, name):
    return read_json(folder / name)


def test_each_precision_that_trains_has_a_row():
    names = precisions_on_cpu()
    assert {n for n in names if not registry.load_precision(n).trained_in} == COMPUTES.keys()


@pytest.mark.parametrize("name", COMPUTES)
def test_a_precision_trains_in_its_dtypes(trained, name):
    folder = trained(name).whole
    result = content_of(folder, "result.json")
    assert (result["precision"], result["status"], result["steps"]) == (name, "finished", STEPS)
    wanted = content_of(trained("32-true").whole, "result.json")
    assert result["train_loss"] == pytest.approx(wanted["train_loss"], rel=0.01)
    assert result["metrics"] == pytest.approx(wanted["metrics"], rel=0.05)
    assert (result["loss_scale"] is not None) == (name == "16-mixed")
    assert (folder / "loss_scale.png").exists() == (name == "16-mixed")
    table = content_of(folder, "dtypes.json")
    (row,) = [row for row in table["data"] if row[0] == PRODUCT]
    found = dict(zip(table["columns"], row, strict=True))
    assert (found["kind"], found["stores"], found["computes"]) == COMPUTES[name]


@pytest.mark.parametrize("name", CONVERTING)
def test_a_precision_names_what_it_leaves_as_it_was(trained, name):
    rows = content_of(trained(name).whole, "conversion.json")
    converted = {row["module"] for row in rows if row["done"]}
    parts = ("attention.qkv", "attention.projection", "expand", "contract")
    assert converted >= {f"blocks.0.{part}" for part in parts}
    assert all(row["why"] for row in rows if not row["done"])


@pytest.mark.parametrize("name", COMPUTES)
def test_a_resumed_run_ends_bit_by_bit_as_one_that_was_not_stopped(trained, name):
    folders = trained(name)
    check_same_checkpoints(*(load(last_checkpoint(folder)) for folder in vars(folders).values()))


@pytest.mark.parametrize("mode", ["train", "plan"])
@pytest.mark.parametrize("name", ["tf32", "float8-rowwise", "transformer-engine"])
def test_a_precision_that_cannot_run_here_is_refused(quick, name, mode):
    done = quick(f"mode={mode}", "accelerator=cpu", f"precision={name}").check_refused()
    assert done.stderr.startswith(f"error: precision={name} needs an NVIDIA GPU")
