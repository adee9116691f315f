"""Generate images that can be learned, of any shape and count, without files."""

import math
from collections.abc import Sequence

import torch

from runner.data.splits import Splits, first_for_validation, held_out, require_at_least


def synthetic_images(
    shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    count: int = 2048,
    noise: float = 2.0,
    val_fraction: float = 0.2,
    seed: int = 0,
) -> Splits:
    """Generate images: one random template for each class, plus noise. No files are read.

    Args:
        shape: of one image, [C, H, W].
        classes: number of templates, at least 2; labels are balanced.
        count: training and validation images together, at least 2.
        noise: standard deviation of the noise; that of the templates is 1.
        val_fraction: share for validation, between 0 and 1.
        seed: of the data alone; the run's seed does not change them. The global random state is not
            touched.

    Returns:
        float32 [N, C, H, W] of unit variance and int64 [N].

    Raises:
        ConfigError: a size is too small, or a split would be empty.
    """
    require_at_least("synthetic_images", classes=(classes, 2), count=(count, 2))
    val = held_out(count, val_fraction, "synthetic_images")
    generator = torch.Generator().manual_seed(seed)
    templates = torch.randn(classes, *shape, generator=generator)
    labels = (torch.arange(count) % classes)[torch.randperm(count, generator=generator)]
    images = torch.randn(count, *shape, generator=generator).mul_(noise).add_(templates[labels])
    images.div_(math.sqrt(1 + noise**2))  # to unit variance
    return first_for_validation(images, labels, val)
