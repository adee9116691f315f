"""Torch's switches for the sums of half precision products on CUDA."""

import pytest
import torch
from precision_models import CPU, load_precision
from torch import nn

from runner.precision import registry

ONE_OF_EACH_CLASS = ("bf16-true", "16-mixed", "bnb-nf4", "float8-rowwise", "transformer-engine")
MATMUL = torch.backends.cuda.matmul


def sums():
    """Whether torch may add the parts of a product in float16 and in bfloat16."""
    return (
        MATMUL.allow_fp16_reduced_precision_reduction,
        MATMUL.allow_bf16_reduced_precision_reduction,
    )


@pytest.mark.parametrize("name", registry.precision_names())
def test_every_precision_sums_in_float32_and_restores_torchs_switches(name):
    assert sums() == (True, True)
    with load_precision(name).session(nn.Linear(2, 2), CPU):
        assert sums() == (False, False)
    assert sums() == (True, True)


@pytest.mark.parametrize("name", ONE_OF_EACH_CLASS)
def test_the_key_allows_sums_in_half_precision(name):
    MATMUL.allow_fp16_reduced_precision_reduction = False
    try:
        with load_precision(name, reduced_precision_reduction=True).session(nn.Linear(2, 2), CPU):
            assert sums() == (True, True)
        assert sums() == (False, True)
    finally:
        MATMUL.allow_fp16_reduced_precision_reduction = True


def sums_session(allowed):
    precision = load_precision("bf16-true", reduced_precision_reduction=allowed)
    return precision.session(nn.Linear(2, 2), CPU)


@pytest.mark.skipif(
    not hasattr(MATMUL, "allow_fp16_reduced_precision_reduction_split_k"),
    reason="this torch has no switch for split sums",
)
def test_the_switch_for_split_sums_stays_as_it_was():
    MATMUL.allow_fp16_reduced_precision_reduction = (False, False)
    try:
        with sums_session(False):
            assert not MATMUL.allow_fp16_reduced_precision_reduction_split_k
        with sums_session(True):
            assert sums() == (True, True)
        assert sums() == (False, True)
        assert not MATMUL.allow_fp16_reduced_precision_reduction_split_k
        assert MATMUL.allow_bf16_reduced_precision_reduction_split_k
    finally:
        MATMUL.allow_fp16_reduced_precision_reduction = (True, True)
