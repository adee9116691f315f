"""Half precision on CUDA: torch's switches for sums, and bfloat16 on a GPU without its units."""

import pytest
import torch
from torch import nn

from runner.precision import registry
from runner.precision.cuda_half import reduced_precision_sums
from runner.utils.errors import ConfigError, Unavailable

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDE = ("64-true", "32-true", "tf32")
HALF = sorted(set(registry.precision_names()) - set(WIDE))
MATMUL = torch.backends.cuda.matmul


def sums():
    """Whether torch may add the parts of a product in float16 and in bfloat16."""
    return (
        MATMUL.allow_fp16_reduced_precision_reduction,
        MATMUL.allow_bf16_reduced_precision_reduction,
    )


def load(name, **changes):
    """A precision that runs on a CPU, emulated where it must be."""
    emulates = name.startswith(("float8", "transformer-engine")) or name == "tf32"
    return registry.load_precision(name, **changes, **({"emulate": True} if emulates else {}))


@pytest.mark.parametrize("name", registry.precision_names())
def test_every_precision_sums_in_float32_and_restores_torchs_switches(name):
    assert sums() == (True, True)
    with load(name).session(nn.Linear(2, 2), CPU):
        assert sums() == (False, False)
    assert sums() == (True, True)


@pytest.mark.parametrize("name", HALF)
def test_the_key_allows_sums_in_half_precision(name):
    MATMUL.allow_fp16_reduced_precision_reduction = False
    try:
        with load(name, reduced_precision_reduction=True).session(nn.Linear(2, 2), CPU):
            assert sums() == (True, True)
        assert sums() == (False, True)
    finally:
        MATMUL.allow_fp16_reduced_precision_reduction = True


@pytest.mark.parametrize("name", HALF)
def test_a_value_that_is_no_boolean_is_refused(name):
    message = r"precision\.reduced_precision_reduction=2 is not known\. Allowed: true, false\."
    with pytest.raises(ConfigError, match=message):
        load(name, reduced_precision_reduction=2)


@pytest.mark.parametrize("name", WIDE)
def test_a_precision_without_half_products_refuses_the_key(name):
    with pytest.raises(ConfigError, match=r"has no products in half precision\. Leave it out"):
        load(name, reduced_precision_reduction=True)


def fail_inside():
    with reduced_precision_sums(False):
        raise RuntimeError("inside")


def test_the_switches_come_back_after_an_exception():
    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert sums() == (True, True)


@pytest.mark.skipif(
    not hasattr(MATMUL, "allow_fp16_reduced_precision_reduction_split_k"),
    reason="this torch has no switch for split sums",
)
def test_the_switch_for_split_sums_stays_as_it_was():
    MATMUL.allow_fp16_reduced_precision_reduction = (False, False)
    try:
        with reduced_precision_sums(False):
            assert not MATMUL.allow_fp16_reduced_precision_reduction_split_k
        with reduced_precision_sums(True):
            assert sums() == (True, True)
        assert sums() == (False, True)
        assert not MATMUL.allow_fp16_reduced_precision_reduction_split_k
        assert MATMUL.allow_bf16_reduced_precision_reduction_split_k
    finally:
        MATMUL.allow_fp16_reduced_precision_reduction = (True, True)


@pytest.fixture
def turing(monkeypatch):
    """Make torch report a GPU without bfloat16 units: there is none here, and none is used."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")


REFUSED = {
    "bf16-true": r"precision=bf16-true needs .*Type precision=16-true, or precision.emulate=true",
    "bf16-mixed": r"precision=bf16-mixed needs .*Type precision=16-mixed, or precision.emulate=tr",
    "bnb-nf4": r"=bnb-nf4 precision.compute_dtype=bfloat16 needs .*precision.compute_dtype=float16",
    "bnb-int8": r"=bnb-int8 precision.compute_dtype=bfloat16 needs .*compute_dtype=float16",
    "float8-rowwise": r"8\.9 or higher; cuda:0 \(Tesla T4\) has 7\.5\..*precision=16-mixed",
    "transformer-engine": r"8\.9 or higher; cuda:0 \(Tesla T4\) has 7\.5\..*precision=16-mixed",
}


@pytest.mark.parametrize("name", REFUSED)
def test_bfloat16_without_its_units_is_refused_with_what_runs(turing, name):
    if name.startswith("bnb"):
        pytest.importorskip("runner.precision.layers.bnb_library")
    with pytest.raises(Unavailable, match=REFUSED[name]) as error:
        registry.load_precision(name).require(CUDA)
    assert "cuda:0 (Tesla T4) has 7.5" in error.value.what


@pytest.mark.parametrize("name", ["bf16-true", "bf16-mixed"])
def test_bfloat16_without_its_units_runs_marked_as_emulated(turing, name, monkeypatch):
    precision = registry.load_precision(name, emulate=True)
    precision.require(CUDA)
    assert precision.emulated
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(Unavailable, match=r"emulate=true runs on a CPU; this run is on cuda"):
        precision.require(CUDA)
    registry.load_precision(name).require(CUDA)


def test_other_precisions_run_without_bfloat16_units(turing):
    for name in ("32-true", "64-true", "16-true", "16-mixed"):
        registry.load_precision(name).require(CUDA)


@pytest.mark.parametrize("compute", ["float16", "float32"])
def test_packed_weights_run_without_bfloat16_units_in_another_dtype(turing, compute):
    pytest.importorskip("runner.precision.layers.bnb_library")
    registry.load_precision("bnb-nf4", compute_dtype=compute).require(CUDA)
