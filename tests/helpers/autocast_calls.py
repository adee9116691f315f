"""A call of each operator of CUDA's list of autocast, and the dtypes that it gives."""

from typing import Any

import torch
from torch import Tensor

HALF = torch.bfloat16
CONVOLUTION = "i, i, v, [1, 1], [0, 0], [1, 1], False, [0, 0], 1"
_CALLS = {
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
CALLS = {
    name: arguments
    for arguments, names in _CALLS.items()
    for name in names.split()
    if hasattr(torch.ops.aten, name.partition(".")[0])
}
"""The arguments of each operator that this torch has; a letter is a tensor."""
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
