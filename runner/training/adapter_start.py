"""Start values of LoRA's additions that are computed from the weights: PiSSA, OLoRA and LoftQ.

peft has them, too, but not for every layer here: its PiSSA refuses float64, its OLoRA takes a
Conv1D's weight for a transposed one, its LoftQ needs a GPU, and with 16-bit additions its sums
differ by the rounding of the additions. The formulas are peft's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from runner.precision.layers.conv1d import (
    is_packed,
    is_transposed,
    unpacked_matrix,
    weight_matrix,
)
from runner.utils.errors import ConfigError

INITS = ("default", "gaussian", "pissa", "pissa_niter_16", "olora", "loftq")
CHANGES_BASE = ("pissa", "pissa_niter_16", "olora")
"""Values of adapter.init that take the additions' start out of the base weights."""
ADAPTER = "default"
"""peft's name of the only adapter of a model."""
_ITERATIONS = 16
"""Power iterations of the randomised decomposition of pissa_niter_16.

Source: peft, LoraConfig.init_lora_weights, which finds it equivalent to the exact one in training.
"""


def check_rank(init: str, rank: int, name: str, matrix: Tensor) -> None:
    """Raise ConfigError where a weight [out, in] has fewer singular vectors than the rank."""
    out_features, in_features = matrix.shape
    most = min(matrix.shape)
    if rank > most:
        raise ConfigError(
            f"adapter.init={init} takes {rank} singular vectors (adapter.rank) of each weight, and "
            f"that of {name}, {in_features} -> {out_features}, has {most}. Type adapter.rank="
            f"{most}, adapter.modules=[<wider layers>] or adapter.init=default."
        )


def register_start(layer: Any) -> None:
    """Give a layer of peft frozen parameters for the start values of its addition.

    The base weights lack what the additions start with, so a folder of peft that fits the original
    weights needs it: W + s B A - s B0 A0. They are in checkpoints for that.

    Args:
        layer: changed in place: start_A [rank, in] and start_B [out, rank], in the addition's
            dtype, of zeros.
    """
    # Parameters and not buffers, which strategy=ddp would send in every forward.
    for part, source in (("start_A", layer.lora_A), ("start_B", layer.lora_B)):
        zeros = torch.zeros_like(source[ADAPTER].weight)
        layer.register_parameter(part, nn.Parameter(zeros, requires_grad=False))


@torch.no_grad()
def start_from_base(layer: Any, init: str) -> None:
    """Move a low-rank part of a layer's weight into its addition, in place.

    Source: PiSSA (the largest singular values), arXiv:2404.02948; OLoRA (the first columns of a QR
    decomposition), arXiv:2406.01775.

    Args:
        layer: of peft, with the parameters of register_start; its weight is not packed.
        init: one of CHANGES_BASE.
    """
    base = layer.get_base_layer()
    matrix = weight_matrix(base).detach()
    if matrix.is_meta:
        return
    wide = _widened(matrix)
    scale = layer.scaling[ADAPTER]
    down, up = _factors_of_base(wide, init, layer.r[ADAPTER], scale)
    _set_addition(layer, down, up)
    layer.start_A.copy_(layer.lora_A[ADAPTER].weight)
    layer.start_B.copy_(layer.lora_B[ADAPTER].weight)
    # Of the rounded additions, so that the sum differs from the weight by one rounding only.
    rest = wide - scale * layer.start_B.to(wide) @ layer.start_A.to(wide)
    base.weight.copy_(rest.t() if is_transposed(base) else rest)


@torch.no_grad()
def start_from_packing_error(layer: Any, plain: Tensor) -> None:
    """Let an addition start as the best one for what the packing has rounded away, in place.

    It is LoftQ with one iteration, which leaves the packed weights as they are.

    Source: Li et al., LoftQ, arXiv:2310.08659, algorithm 1 with T = 1.

    Args:
        layer: of peft, around a packed layer.
        plain: its weight before it was packed, [out, in], on any device.
    """
    packed = _widened(unpacked_matrix(layer.get_base_layer()))
    error = plain.to(packed) - packed
    _set_addition(layer, *_top_factors(error, layer.r[ADAPTER], layer.scaling[ADAPTER]))


def _widened(matrix: Tensor) -> Tensor:
    """Return a weight in float32, or in float64 if it is."""
    return matrix if matrix.dtype is torch.float64 else matrix.float()


def _factors_of_base(matrix: Tensor, init: str, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return the start of lora_A [rank, in] and of lora_B [out, rank]."""
    if init == "olora":
        q, r = torch.linalg.qr(matrix)
        return r[:rank], q[:, :rank]
    if init == "pissa":
        return _top_factors(matrix, rank, scale)
    left, values, right = torch.svd_lowrank(matrix, rank, niter=_ITERATIONS)
    roots = (values / scale).sqrt()
    return roots[:, None] * right.t(), left * roots


def _top_factors(matrix: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank] so that scale * B @ A is the nearest of that rank."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    roots = (values[:rank] / scale).sqrt()
    return roots[:, None] * right[:rank], left[:, :rank] * roots


def _set_addition(layer: Any, down: Tensor, up: Tensor) -> None:
    layer.lora_A[ADAPTER].weight.copy_(down)
    layer.lora_B[ADAPTER].weight.copy_(up)


def check_dora(name: str, layer: nn.Module) -> None:
    """Raise ConfigError for a layer that cannot be trained by DoRA.

    Args:
        name: its dotted name.
        layer: before peft wraps it.
    """
    if any(kind.__module__.startswith("transformer_engine.") for kind in type(layer).__mro__):
        raise ConfigError(
            f"adapter.use_dora=true: peft has no DoRA for TransformerEngine's layers, of which "
            f"{name} is one. Type adapter.use_dora=false, or another precision, for example "
            "precision=float8-rowwise or precision=bf16-true."
        )
    if is_packed(layer):
        raise ConfigError(
            f"adapter.use_dora=true reads the rows of each weight in every forward, and that of "
            f"{name} is packed into codes, which would be unpacked each time. Type "
            "adapter.use_dora=false, or a precision that packs no weights, for example "
            "precision=bf16-true."
        )
    weight = weight_matrix(layer).detach()
    if not weight.is_meta and not weight.any(dim=1).all():
        raise ConfigError(
            f"adapter.use_dora=true divides by the norms of a weight's rows, and {name} has rows "
            "of zeros. Leave it out by adapter.modules=[<other layers>] (adapter.train="
            f"[{name}] trains it in full), or type adapter.use_dora=false."
        )


@torch.no_grad()
def start_magnitudes(layer: Any) -> None:
    """Set DoRA's magnitudes to the norms of the rows of weight and addition, in place.

    Args:
        layer: of peft, with the start values of its addition; its weight is not packed.
    """
    weight = weight_matrix(layer.get_base_layer()).detach()
    if weight.is_meta:
        return
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    addition = layer.scaling[ADAPTER] * (up @ down).to(weight)
    magnitudes = layer.lora_magnitude_vector[ADAPTER].weight
    magnitudes.copy_(torch.linalg.norm(weight + addition, dim=1))
