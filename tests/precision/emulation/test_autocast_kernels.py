"""Autocast on a CPU under precision.emulate=true: the casts of every operator are CUDA's."""

import re
from typing import Any

import pytest
import torch
from autocast_calls import CALLS, GPU_ONLY, HALF, dtypes_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.core.base.tensor_facts import TORCH_VERSION
from runner.precision.emulation.autocast_kernels import cuda_casts, listed_operators


def test_every_operator_of_cudas_list_gives_the_dtypes_of_fake_cuda_tensors() -> None:
    f32 = torch.float32
    # Before torch 2.12 some had an overload for named dimensions, too.
    named = {name for name in listed_operators("CUDA") if re.search("(?i)dimname|names_", name)}
    assert listed_operators("CUDA") - named <= {*CALLS, *GPU_ONLY, "binary_cross_entropy"}
    differing = set()
    wrong: list[tuple[str, list[torch.dtype]]] = []
    for name, arguments in CALLS.items():
        proven = 0
        for dtypes in ([HALF], [f32], [HALF, f32], [f32, HALF]):
            with FakeTensorMode(allow_non_fake_inputs=True):
                expected = dtypes_of(name, arguments, dtypes, "cuda")
            if isinstance(expected, type):
                continue
            proven += 1
            with cuda_casts():
                assert dtypes_of(name, arguments, dtypes, "cpu") == expected, (name, dtypes)
            if dtypes_of(name, arguments, dtypes, "cpu") != expected:
                differing.add(name)
        assert proven or TORCH_VERSION < (2, 14), name
    assert not wrong
    # What the CPU's own list computes otherwise.
    assert differing >= {"exp", "rsqrt", "sum", "softmax.int", "layer_norm", "pow.Tensor_Scalar"}


def gradients(function: Any, *leaves: Tensor) -> list[Tensor]:
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result.float().sum(), leaves)]


def under_autocast(function: Any, dtype: torch.dtype = HALF) -> Any:
    def run(*leaves: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return function(*leaves)

    return run


def norm(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    """What CUDA computes: products in half precision, pow and rsqrt in float32."""
    h = x.to(HALF) @ w.to(HALF)
    return h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True))


def test_values_gradients_and_compiled_code_are_those_of_cudas_casts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    leaves = [torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    run = under_autocast(norm)
    native = gradients(run, *leaves)
    expected = gradients(by_hand, *leaves)
    assert not torch.equal(native[0], expected[0])
    compiled = torch.compile(run, backend="aot_eager")
    assert compiled(*leaves).dtype is native[0].dtype
    with cuda_casts():
        for function in (run, compiled):
            for got, wanted in zip(gradients(function, *leaves), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        mapped = torch.func.vmap(run, in_dims=(0, None))(leaves[0], leaves[1])
        assert mapped.dtype is torch.float32
    for function in (run, compiled):
        assert torch.equal(gradients(function, *leaves)[0], native[0])


def test_a_weight_is_cast_once_for_all_its_uses() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    xs = torch.randn(50, 64)

    def reuse(w: Tensor) -> Tensor:
        return torch.stack([torch.mv(w, x) for x in xs])

    def cast_once(w: Tensor) -> Tensor:
        half = w.to(HALF)
        return torch.stack([torch.mv(half, x.to(HALF)) for x in xs])

    with cuda_casts():
        for _ in range(2):
            for got, wanted in zip(
                gradients(under_autocast(reuse), w), gradients(cast_once, w), strict=True
            ):
                assert torch.equal(got, wanted)
            with torch.no_grad():
                w.add_(1.0)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_keep_their_state_in_half_precision_as_cudnn_does(kind: Any) -> None:
    layer = kind(4, 4)
    with cuda_casts(), torch.autocast("cpu", dtype=HALF):
        output, state = layer(torch.randn(3, 2, 4))
        assert nn.functional.avg_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=HALF), 2).dtype is HALF
    states = state if isinstance(state, tuple) else (state,)
    assert {t.dtype for t in (output, *states)} == {HALF}


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    p = torch.full((4,), 0.5)
    refused = pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits")
    with cuda_casts(), torch.autocast("cpu", dtype=HALF), refused:
        nn.functional.binary_cross_entropy(p, p)
