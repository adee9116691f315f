"""Every published claim holds here, and does not with a wrong bound or a broken kernel."""

import re
from dataclasses import replace

import pytest
import torch

from bench import common
from bench.claims import __main__ as command
from bench.claims import measurements
from bench.claims.catalogue import CLAIMS
from bench.claims.claim import Bound, check_claim
from runner.precision.emulation import te_emulation
from runner.precision.emulation.formats import E2M1, BlockQuantizer, power_of_two_scale
from runner.precision.layers.bnb_linear import dequantize_4bit
from runner.precision.registry import load_precision
from runner.precision.weight_updates import Kahan, Nearest

BY_NAME = {claim.name: claim for claim in CLAIMS}


@pytest.fixture(scope="module")
def results():
    return {claim.name: check_claim(claim) for claim in CLAIMS}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_claim_holds(name, results):
    result = results[name]
    assert result.problems == ()
    assert result.claim.bounds.keys() <= result.values.keys()


def bf16_only(name):
    return load_precision(name.replace("16-true", "bf16-true") if name == "16-true" else name)


# By claim: the object that holds a kernel, its name there, and what takes its place.
BROKEN = {
    "lost-updates": (torch, "ones", lambda size, dtype: torch.full(size, 1.0)),
    "stalled-weights": (Kahan, "store", Nearest.store),
    "stopped-sums": (measurements, "FLOAT_1_6_9", replace(measurements.FLOAT_1_6_9, mantissa=10)),
    "fp8-range": (
        measurements,
        "round_to_format",
        lambda x, fmt: x.clamp(-fmt.largest, fmt.largest),
    ),
    "double-quantization": (measurements, "load_precision", lambda name: load_precision("bnb-nf4")),
    "nf4-error": (
        measurements,
        "unpack_4bit",
        lambda packed, state, dtype: dequantize_4bit(packed, state) * 0.9,
    ),
    "int8-outliers": (measurements, "OUTLIER_THRESHOLD", 0.0),
    "nvfp4-error": (
        measurements,
        "Nvfp4Quantizer",
        lambda shape: BlockQuantizer(E2M1, power_of_two_scale, shape),
    ),
    "hopper-sums": (te_emulation, "FRACTION_BITS", 22),
    "log-probabilities": (measurements, "load_precision", bf16_only),
    "loss-scale": (measurements, "LOSS_SCALE", 1.0),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_broken_kernel_makes_the_claim_fail(name, monkeypatch):
    claim = BY_NAME[name]
    holder, attribute, replacement = BROKEN[name]
    monkeypatch.setattr(holder, attribute, replacement)
    result = check_claim(claim)
    assert not result.holds
    # By its numbers, not by an error of the fault itself.
    assert not [each for each in result.problems if "nothing was measured" in each]


def test_a_kernel_that_raises_makes_the_claim_fail():
    def measure():
        raise RuntimeError("no kernel\nfor this CPU")

    result = check_claim(replace(CLAIMS[0], measure=measure))
    assert result.problems == ("nothing was measured: RuntimeError: no kernel",)
    assert result.values == {}


def test_a_check_leaves_the_process_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    drawn = []
    claim = replace(CLAIMS[0], measure=lambda: drawn.append(torch.rand(())) or {})
    check_claim(replace(claim, bounds={}))
    check_claim(replace(claim, bounds={}))
    assert drawn[0] == drawn[1]
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("bound", "text", "inside", "outside"),
    [
        (Bound(2, 2), "2", [2.0], [1.9, 2.1, float("nan")]),
        (Bound(least=4), "at least 4", [4.0, float("inf")], [3.9, float("nan")]),
        (Bound(greatest=0.5), "at most 0.5", [0.5, -1.0], [0.6, float("nan")]),
        (Bound(6, 10.5), "6 to 10.5", [6.0, 10.5], [5.9, 10.6]),
    ],
)
def test_bounds(bound, text, inside, outside):
    assert str(bound) == text
    assert all(map(bound.holds, inside))
    assert not any(map(bound.holds, outside))


def test_every_claim_names_its_source():
    assert len(BY_NAME) == len(CLAIMS)
    for claim in CLAIMS:
        assert re.fullmatch("[a-z0-9-]+", claim.name)
        assert re.search(r"arXiv:\d{4}\.\d{5}", claim.source)
        assert claim.checked
        assert claim.statement.endswith(".")
        assert claim.bounds


QUICK = ["lost-updates", "fp8-range"]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Where the command writes its table."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path / "claims.md"


def test_the_command_prints_a_line_for_each_claim(page, capsys):
    assert command.main(QUICK) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in QUICK]
    assert "2048; bfloat16 256 " in lines[0]
    assert " float16 2048, bfloat16 256 (" in lines[0]
    assert not page.exists()


def test_the_command_says_which_claim_does_not_hold(page, capsys, monkeypatch):
    wrong = replace(
        CLAIMS[0],
        measure=lambda: {"float16": 1024.0, "bfloat16": 256.0},
        bounds={"float16": Bound(2048, 2048), "bfloat16": Bound(least=0)},
    )
    monkeypatch.setattr(command, "CLAIMS", (wrong, CLAIMS[3]))
    monkeypatch.setattr(common, "own_command", lambda: "python -m bench.claims")
    assert command.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAILED  lost-updates")
    assert lines[1].strip() == "float16 is 1024, and has to be 2048"
    assert lines[2].startswith("ok ")
    text = page.read_text()
    assert "| float16 2048, bfloat16 at least 0 | **no**: float16 is 1024, and has to be" in text
    assert "arXiv:2209.05433" in text


def test_the_list_measures_nothing(page, capsys):
    assert command.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BY_NAME)
    assert not page.exists()


def test_a_claim_that_does_not_exist_is_refused(page, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["hopper"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "there is no claim hopper. Allowed: lost-updates, " in error
