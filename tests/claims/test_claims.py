"""Every published claim holds here, and does not with a wrong bound or a broken kernel."""

import re
from dataclasses import replace

import pytest
import torch

from runner.claims import networks, packed_weights, products, rounding
from runner.claims.catalogue import CLAIMS
from runner.claims.claim import Bound, Measurement, check_claim
from runner.claims.networks import half_log_probabilities
from runner.precision.emulation import hopper
from runner.precision.emulation.formats import E2M1
from runner.precision.emulation.quantizers import BlockQuantizer, power_of_two_scale
from runner.precision.layers import linear_4bit
from runner.precision.registry import load_precision
from runner.precision.weight_updates import Kahan, Nearest
from runner.utils.packages import package_file

BY_NAME = {claim.name: claim for claim in CLAIMS}


@pytest.fixture(scope="module")
def results():
    return {claim.name: check_claim(claim) for claim in CLAIMS}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_claim_holds(name, results):
    result = results[name]
    assert result.problems == ()
    assert result.claim.bounds.keys() <= result.measurement.values.keys()


@pytest.mark.parametrize("name", BY_NAME)
def test_a_wrong_bound_makes_the_claim_fail(name, results):
    measured = results[name].measurement
    claim = replace(BY_NAME[name], measure=lambda: measured)
    for key, bound in claim.bounds.items():
        value = measured.values[key]
        # Just beside the measured value, on the side of the limit that the bound has.
        missed = Bound(value + 1e-9 + abs(value) * 1e-9, bound.greatest)
        if bound.least == -torch.inf:
            missed = Bound(greatest=value - 1e-9 - abs(value) * 1e-9)
        result = check_claim(replace(claim, bounds={**claim.bounds, key: missed}))
        assert len(result.problems) == 1
        assert result.problems[0].startswith(f"{key} is ")
        assert not result.holds


def bf16_only(name):
    return load_precision(name.replace("16-true", "bf16-true") if name == "16-true" else name)


# By claim: the object that holds a kernel, its name there, and what takes its place.
BROKEN = {
    "lost-updates": (torch, "ones", lambda size, dtype: torch.full(size, 1.0)),
    "stalled-weights": (Kahan, "store", Nearest.store),
    "stopped-sums": (
        rounding,
        "FLOAT_1_6_9",
        replace(rounding.FLOAT_1_6_9, mantissa=10),
    ),
    "fp8-range": (rounding, "round_to_format", lambda x, fmt: x.clamp(-fmt.largest, fmt.largest)),
    "double-quantization": (
        packed_weights,
        "load_precision",
        lambda name: load_precision("bnb-nf4"),
    ),
    "nf4-error": (
        linear_4bit,
        "unpack_4bit",
        lambda packed, state, dtype: linear_4bit.dequantize_4bit(packed, state) * 0.9,
    ),
    "int8-outliers": (products, "OUTLIER_THRESHOLD", 0.0),
    "nvfp4-error": (
        packed_weights,
        "Nvfp4Quantizer",
        lambda shape: BlockQuantizer(E2M1, power_of_two_scale, shape),
    ),
    "hopper-sums": (hopper, "FRACTION_BITS", 22),
    "log-probabilities": (networks, "load_precision", bf16_only),
    "loss-scale": (networks, "LOSS_SCALE", 1.0),
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
    assert result.measurement == Measurement({})


def test_a_check_leaves_the_process_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    drawn = []
    claim = replace(CLAIMS[0], measure=lambda: drawn.append(torch.rand(())) or Measurement({}))
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


def test_the_pretrained_network_is_used_where_it_is_installed():
    if not package_file("rxnmapper", "models") or not package_file("chemicals", "Identifiers"):
        pytest.skip("the packages rxnmapper and chemicals, of experiment=molecules, are missing")
    measured = half_log_probabilities()
    assert measured.note == "pretrained ALBERT, 64 molecules"
    assert 6 < measured.values["bfloat16 / float16"] < 10.5
