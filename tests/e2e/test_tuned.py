"""What makes a job faster or smaller, as the command line runs it; it must compute the same."""

from pathlib import Path

import psutil
import pytest
import torch
from run_folders import read_json
from torch import nn

GPT = (
    "accelerator=cpu model=gpt model.layers=2 model.heads=1 model.width=16 model.dropout=0.1 "
    "data=synthetic_tokens data.count=60 data.context=8 train.batch_size=16 train.epochs=2 "
    "tracking=none"
).split()
COMPILED = ("model.dropout=0", "train.compile=regional")


def run(main, name, *args):
    """Its result and its last weights."""
    main(*GPT, f"hydra.run.dir={name}", *args).check_ok()
    (saved,) = Path(name).glob("checkpoints/step-*.pt")
    model = torch.load(saved, weights_only=True)["model"]
    return read_json(Path(name) / "result.json"), model


@pytest.fixture
def plain(main):
    return run(main, "plain")


def kinds(name):
    rows = read_json(Path(name) / "dtypes.json")["data"]
    return [row[:2] for row in rows]


def loss_in(name):
    return read_json(Path(name) / "result.json")["metrics"]["val/loss"]


def check_compiled(main):
    """Check that the run in the folder compiled did what a run that is not compiled does."""
    wanted, weights = run(main, "plain", "model.dropout=0")
    assert loss_in("compiled") == pytest.approx(wanted["metrics"]["val/loss"], abs=1e-4)
    (saved,) = Path("compiled").glob("checkpoints/step-*.pt")
    assert list(torch.load(saved, weights_only=True)["model"]) == list(weights)
    assert kinds("compiled") == kinds("plain")
    assert "rounding between fused" not in Path("plain/dtypes.json").read_text()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own while it compiles
def test_compiled_blocks(main, monkeypatch):
    """Without inductor, whose C++ takes a minute to compile; the next test has it."""
    compile_, compiled = nn.Module.compile, []

    def traced(self, mode=None, options=None, **more):
        compiled.append(type(self).__name__)
        compile_(self, backend="eager", **more)

    monkeypatch.setattr(nn.Module, "compile", traced)
    run(main, "compiled", *COMPILED)
    torch.compiler.reset()
    assert compiled == ["Block", "Block"]
    check_compiled(main)
    typed = "mode=evaluate checkpoint=compiled accelerator=cpu tracking=none train.batch_size=16"
    done = main(*typed.split(), "train.compile=regional", "hydra.run.dir=again")
    torch.compiler.reset()
    assert (done.rc, len(compiled)) == (0, 4), done.stderr
    assert loss_in("again") == pytest.approx(loss_in("compiled"), abs=1e-5)


@pytest.fixture
def compiled(cli):
    """A run with compiled blocks, in a process of its own: torch warns while it compiles, which is
    no error there."""
    cli(*GPT, *COMPILED, "hydra.run.dir=compiled").check_ok()


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.usefixtures("compiled")
def test_blocks_compiled_by_inductor(main):
    check_compiled(main)


def test_the_rounding_of_compiled_code_is_named_everywhere(main, monkeypatch):
    """In the first lines, in dtypes.json, in the result and in the report.

    training/test_compile_rounding.py shows what it computes; nothing is compiled here.
    """
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    typed = "-m precision=bf16-true train.compile_rounding=eager,fused hydra/launcher=basic"
    main(*GPT, *COMPILED, *typed.split(), "hydra.sweep.dir=swept").check_ok()
    roundings = ("eager", "fused")
    for job, rounding in enumerate(roundings):
        folder = Path("swept") / str(job)
        assert read_json(folder / "result.json")["fused_rounding"] == rounding
        log = (folder / "log.txt").read_text()
        assert f"rounding between fused operations: {rounding}" in log
        table = read_json(folder / "dtypes.json")
        assert table["columns"][-1] == "rounding between fused operations"
        held = {row[0]: row[-1] for row in table["data"]}
        assert held["blocks.0"] == held["blocks.1.expand"] == rounding
        assert held["(model)"] == held["head"] == "not compiled"
    report = " ".join(Path("swept/report.md").read_text().split())
    assert "Rounding between fused operations" in report
    names = [f"{rounding}: bf16-true train.compile_rounding={rounding}" for rounding in roundings]
    assert "; ".join(names) in report


@pytest.mark.parametrize("key", ["activation_checkpointing", "data_on_device"])
def test_a_key_that_changes_no_bit(main, plain, key):
    result, weights = run(main, "changed", f"train.{key}=true")
    assert result["metrics"] == plain[0]["metrics"]
    assert list(weights) == list(plain[1])
    assert all(torch.equal(weights[name], plain[1][name]) for name in weights)
    assert kinds("changed") == kinds("plain")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_no_loading_process_outlives_its_run(own):
    """They stay from epoch to epoch, for training and evaluation, and end with the run."""
    before = set(psutil.Process().children(recursive=True))
    typed = ("data=mine", "train.num_workers=2", "train.epochs=2", "train.max_steps=null")
    for more in (["hydra.run.dir=first"], ["mode=evaluate", "checkpoint=first"]):
        own(*typed, *more).check_ok()
        assert set(psutil.Process().children(recursive=True)) <= before
