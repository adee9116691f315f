"""Autocast on a CPU under precision.emulate=true: the casts of every operator are CUDA's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.precision.emulation.cuda_autocast import cuda_casts, listed_operators

HALF = torch.bfloat16
CONVOLUTION = "i, i, v, [1, 1], [0, 0], [1, 1], False, [0, 0], 1"
CALLS = {
    "m": "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus "
    "prod sum nuclear_norm pdist linalg_matrix_sqrth",
    "m, m": "mm matmul linear atan2 linalg_vecdot dist cosine_similarity l1_loss smooth_l1_loss "
    "huber_loss mse_loss kl_div soft_margin_loss binary_cross_entropy_with_logits "
    "pow.Tensor_Tensor hinge_embedding_loss",
    "c, c, 1": "cross",
    "m, m, m": "addmm addcmul addcdiv triplet_margin_loss",
    "m, 1": "pow.Tensor_Scalar cumprod cumsum softmax.int log_softmax.int norm.Scalar prod.dim_int",
    "1.5, m": "pow.Scalar",
    "m, [1]": "sum.dim_IntList logsumexp frobenius_norm.dim",
    "m, 2": "linalg_vector_norm",
    "m, 2, [0, 1]": "linalg_matrix_norm norm.ScalarOpt_dim",
    "m, 'fro', [0, 1]": "linalg_matrix_norm.str_ord",
    "m, [0, 1]": "nuclear_norm.dim",
    "m, 2, 0, 1.0": "renorm",
    "m, m, [1], [0]": "tensordot",
    "m, m, False, False, 1e-8, 1": "poisson_nll_loss",
    "v, v": "dot vdot",
    "v, m, v": "addmv",
    "m, v, v": "addr",
    "m, v": "mv prelu",
    "b, b": "bmm",
    "b, b, b": "baddbmm",
    "m, b, b": "addbmm",
    "b, b, 2.0": "cdist",
    "v, v, b": "bilinear",
    "'ij,jk->ik', [m, m]": "einsum",
    "[m, m]": "chain_matmul linalg_multi_dot",
    "b, b, v": "conv_tbc conv1d conv_transpose1d",
    "i, i, v": "conv2d conv_transpose2d.input",
    "d, d, v": "conv3d conv_transpose3d.input",
    CONVOLUTION: "convolution",
    f"{CONVOLUTION}, False, False, False": "_convolution.deprecated",
    f"{CONVOLUTION}, False, False, False, True": "_convolution",
    "i, i, i": "scaled_dot_product_attention",
    "m, [m, m], g, g, u, u": "lstm_cell",
    "m, m, m, m": "rnn_tanh_cell rnn_relu_cell",
    "m, [4]": "layer_norm rms_norm",
    "m, [4], None, None, 1e-5": "native_layer_norm",
    "i, 2": "group_norm",
    "v, v, v": "margin_ranking_loss",
    "m, m, v": "cosine_embedding_loss",
    "m, k": "nll_loss multi_margin_loss",
    "m, K": "multilabel_margin_loss",
    "i, L": "nll_loss2d",
    "b, [8], False": "upsample_linear1d",
    "b, [8]": "upsample_nearest1d _upsample_nearest_exact1d",
    "i, [8, 8]": "upsample_nearest2d _upsample_nearest_exact2d",
    "i, [8, 8], False": "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d "
    "_upsample_bicubic2d_aa",
    "d, [8, 8, 8]": "upsample_nearest3d _upsample_nearest_exact3d",
    "d, [8, 8, 8], False": "upsample_trilinear3d",
    "i, j, 0, 0, False": "grid_sampler",
    "m, [k], v": "index_put",
    "m, 0, K, m": "scatter_add",
}
"""Operators by their arguments, in which a letter is a tensor."""
SHAPES = {"m": 2, "b": 3, "i": 4, "d": 5, "v": 1}
INDICES = {"k": (4,), "K": (4, 4), "L": (4, 4, 4)}
# Kernels of GPUs, which no tensor on a CPU reaches; a GRU's cell has no kernel for fake tensors.
GPU_ONLY = {
    "gru_cell",
    *("_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose", "_thnn_fused_lstm_cell"),
    *("_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"),
}


def dtypes_of(name: str, arguments: str, dtypes: list[torch.dtype], device: str) -> Any:
    """Return the dtypes that an operator gives, called on tensors of these dtypes in turn."""
    turn = 0

    class Tensors(dict[str, Tensor]):
        def __missing__(self, key: str) -> Tensor:
            nonlocal turn
            if key in INDICES:
                return torch.zeros(INDICES[key], dtype=torch.long, device=device)
            shape = {"c": (4, 3), "u": (16,), "g": (16, 4), "j": (4, 4, 4, 2)}.get(key) or (
                4,
            ) * SHAPES[key]
            turn += 1
            return torch.rand(shape, dtype=dtypes[(turn - 1) % len(dtypes)], device=device)

    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    given = eval(f"[{arguments}]", {}, Tensors())
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    # By hand: torch.autocast("cuda") wants a GPU.
    torch.set_autocast_dtype(device, HALF)
    torch.set_autocast_enabled(device, True)
    try:
        out = operator(*given)
    except (RuntimeError, NotImplementedError) as error:
        return type(error)
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()
    return [t.dtype for t in (out if isinstance(out, tuple) else [out])]


def test_every_operator_of_cudas_list_gives_the_dtypes_of_fake_cuda_tensors() -> None:
    f32 = torch.float32
    calls = {name: arguments for arguments, names in CALLS.items() for name in names.split()}
    assert listed_operators("CUDA") == {*calls, *GPU_ONLY, "binary_cross_entropy"}
    differing = set()
    wrong: list[tuple[str, list[torch.dtype]]] = []
    for name, arguments in calls.items():
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
        assert proven, name
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
