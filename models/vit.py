"""A vision transformer for any square image and channel count, on torchvision's encoder.

torchvision starts the head at zero, so an untrained model's logits are exactly zero.
"""

import math
from collections.abc import Sequence

from torch import nn
from torchvision.models import VisionTransformer

_PATCHES = range(16, 197)  # 196 is the 14 x 14 grid of ViT-B/16 on 224 pixels


def vit(  # noqa: PLR0913 - its parameters are the keys of the yaml
    input_shape: Sequence[int],
    classes: int,
    patch_size: int | None = None,
    layers: int = 4,
    heads: int = 4,
    hidden_dim: int = 128,
    mlp_dim: int = 256,
    dropout: float = 0.0,
) -> VisionTransformer:
    """Build a vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) with random weights.

    Args:
        input_shape: [channels, side, side].
        classes: C, the number of logits; the module maps float [B, *input_shape] to [B, C].
        patch_size: side of a patch in pixels, a divisor of the image's side. None: see `patches`.
        layers, heads, hidden_dim, mlp_dim: size of the encoder; heads divides hidden_dim.
        dropout: probability in [0, 1).

    Raises:
        ValueError: the image is not square, or a number does not divide where it must.
    """
    if hidden_dim % heads:
        raise ValueError(f"vit hidden_dim={hidden_dim} is not a multiple of heads={heads}")
    channels, side, patch = _geometry(input_shape, patch_size)
    model = VisionTransformer(
        image_size=side,
        patch_size=patch,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=hidden_dim,
        mlp_dim=mlp_dim,
        dropout=dropout,
        num_classes=classes,
    )
    if channels != 3:
        model.conv_proj = _projection(channels, hidden_dim, patch)
    return model


def _geometry(input_shape: Sequence[int], patch_size: int | None) -> tuple[int, int, int]:
    """Return channels, the image's side and the patch's side."""
    if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
        raise ValueError(f"vit needs square images [channels, n, n], got {list(input_shape)}")
    channels, side, _ = input_shape
    patch = patches(side) if patch_size is None else patch_size
    if patch < 1 or side % patch:
        raise ValueError(f"vit patch_size={patch} does not divide the image's side of {side} px")
    return channels, side, patch


def patches(side: int) -> int:
    """Return a patch size: the smallest divisor of `side` that gives 16 to 196 patches.

    Divisors of 4 pixels or more come first.

    Raises:
        ValueError: no divisor does.
    """
    fitting = [p for p in range(1, side + 1) if side % p == 0 and (side // p) ** 2 in _PATCHES]
    if not fitting:
        raise ValueError(
            f"no patch size cuts {side} x {side} pixels into 16 to 196 patches; "
            "set patch_size to a divisor, or resize the images"
        )
    # Patches of 2 pixels would quadruple the cost on small images.
    return next((p for p in fitting if p >= 4), fitting[-1])


def _projection(channels: int, width: int, patch: int) -> nn.Conv2d:
    """Return the convolution that makes a token of `width` numbers of each patch."""
    conv = nn.Conv2d(channels, width, patch, patch)
    # torchvision's initialisation of conv_proj, with this fan-in.
    nn.init.trunc_normal_(conv.weight, std=math.sqrt(1 / (channels * patch**2)))
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv
