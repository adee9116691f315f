"""Half precision on CUDA: torch's switches for sums, and bfloat16 on a GPU without its units."""

import pytest
import torch
from torch import nn

from runner.precision import registry
from runner.precision.cuda_half import reduced_precision_sums

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
