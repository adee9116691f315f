"""A run with numerics.every, from the command to its files."""

import re

import pytest

from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec
from runner.core.loop.strategy import Single
from runner.diagnostics.numerics import read
from runner.diagnostics.room import ROOM, NumericsSpec
from runner.training.strategies.ddp import DDP
from runner.training.strategies.fsdp import FSDP

pytestmark = pytest.mark.slow

FILES = ("numerics.json", "numerics.html")


@pytest.fixture
def folder(tmp_path):
    return lambda: sorted((tmp_path / "outputs" / "runs").iterdir())[-1]


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the page, whose pictures take most of the time."""
    page = "runner.diagnostics.numerics.numerics_page.write_page"
    monkeypatch.setattr(page, lambda *_: None)


def measured_steps(numerics):
    return [probe.step for probe in numerics.probes]


def losses(done):
    assert done.rc == 0, done.stderr
    # Rows of epoch, step, train/loss, val/loss and the accuracy.
    return re.findall(r"^ +\d+ +\d+ +(\S+) +(\S+) +\S+$", done.stdout, re.M)


def test_a_run_writes_its_measurements(quick, folder):
    done = quick("numerics.every=2", "train.max_steps=5").check_ok()
    found = read(folder())
    assert measured_steps(found) == [2, 4]
    assert (found.every, found.precision, found.compute) == (2, "32-true", "float32")
    assert {m.module for m in found.probes[0].measured} == {"layers.0", "head", "(model)"}
    assert all((folder() / name).stat().st_size for name in FILES)
    page = (folder() / "numerics.html").read_text()
    assert "python -m runner" in page
    assert "UTC · " in page
    assert re.search(r"numerics: see .*numerics\.html\n  [A-Z].*\.\n  bf16-mixed: ", done.stdout)


@pytest.mark.usefixtures("undrawn")
def test_measuring_changes_no_loss_also_where_the_backward_repeats_the_forward(quick, folder):
    typed = ("train.eval_every=1", "model.hidden=[16,16]")
    watched = quick("numerics.every=1", *typed)
    repeated = quick("numerics.every=1", "train.activation_checkpointing=[layers]", *typed)
    plain = quick(*typed)
    assert losses(plain) == losses(watched) == losses(repeated) != []
    assert not any((folder() / name).exists() for name in FILES)
    assert "numerics" not in plain.stdout


def test_a_run_that_is_too_short_says_so(quick, folder):
    quick("numerics.every=4").check_ok("numerics.every=4: no step was measured")
    assert not (folder() / FILES[0]).exists()


@pytest.mark.usefixtures("undrawn")
def test_a_resumed_run_holds_the_snapshots_up_to_its_checkpoint(quick, folder):
    typed = ("numerics.every=2", "checkpoint.every_steps=3", "checkpoint.final=false")
    assert quick(*typed, "train.max_steps=5").rc == 0
    begun, first = folder(), read(folder())
    assert measured_steps(first) == [2, 4]
    done = quick(*typed, "train.max_steps=8", f"checkpoint.resume={begun}")
    assert "resumed at step 3" in done.stdout, done.stderr
    again = read(begun)
    assert measured_steps(again) == [2, 4, 6, 8]
    assert again.probes[:2] == first.probes


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "precision",
    [
        *("16-mixed", "bf16-true", "bnb-nf4", "float8-rowwise"),
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("64-true", "bnb-int8")),
    ],
)
def test_every_kind_of_precision(quick, folder, precision):
    more = {"bnb": ["adapter=lora"], "flo": ["precision.emulate=true"]}.get(precision[:3], [])
    pytest.importorskip({"bnb": "bitsandbytes", "flo": "torchao"}.get(precision[:3], "torch"))
    quick("numerics.every=2", f"precision={precision}", "model.hidden=[64,64]", *more).check_ok()
    found = read(folder())
    kinds = {m.kind for m in found.probes[0].measured}
    assert {"activations", "weights"} <= kinds
    assert (found.probes[0].loss_scale is not None) == (precision == "16-mixed")


@pytest.mark.usefixtures("undrawn")
def test_a_closure_optimizer_and_micro_batches(quick, folder):
    assert quick("numerics.every=2", "optimizer=lbfgs").rc == 0
    assert measured_steps(read(folder())) == [2]
    assert quick("numerics.every=1", "train.accumulate=2").rc == 0
    assert measured_steps(read(folder())) == [1, 2, 3]


def test_a_run_that_cannot_be_measured_is_refused(quick):
    quick("numerics.every=2", "train.compile=true").check_refused(
        "numerics.every=2 measures modules by hooks", "Type train.compile=false."
    )
    quick("numerics.every=0").check_refused("numerics.every=0 is too small")


def test_sharded_tensors_are_refused():
    spec = RunSpec(sections={"numerics": NumericsSpec(every=3)})
    with pytest.raises(ConfigError, match=r"numerics\.every=3 .* strategy=fsdp .*Type strategy=dd"):
        ROOM.check(spec, FSDP())
    ROOM.check(spec, DDP())
    ROOM.check(spec, Single())
    ROOM.check(RunSpec(), FSDP())
