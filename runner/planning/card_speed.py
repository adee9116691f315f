"""How long a step takes on a card, and how much faster a precision makes it.

A step is the sum of its parts: each product takes the time of its operations at the rate that large
products reach on the card, or of its bytes, whichever is longer; attention, and what other
operators read and write, are added. In a narrower format the products of converted layers take the
format's rate, and the casts of their operands are added.

The constants below are fitted by bench/plan/fit.py to published steps; bench/results/plan.md has
the errors, with each source left out in turn.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

import torch

from runner.core import Precision, tensor_facts
from runner.planning.room import DeviceSpec
from runner.planning.step_cost import Product, StepCost


@dataclass(frozen=True)
class Fit:
    """Constants of the model.

    Attributes:
        product: time of a product within a step over its time at the card's ceiling.
        narrow_product: the same of products in FP8 and FP4, as their widths grow.
        narrow_width: width at which a narrow product takes twice that time.
        rowwise, block, mxfp8: share of the format's rate that a recipe's kernels reach.
        tf32: the same of products in TF32.
        error: of the logarithm of a speed ratio: half the width of its 80 % interval, for each
            time that a step gains or loses over the step's time.
        slowest, fastest: ends of the 80 % interval of a step's time, over the model's.
    """

    product: float = 1.206
    narrow_product: float = 1.096
    narrow_width: float = 346.54
    rowwise: float = 0.787
    block: float = 0.795
    mxfp8: float = 0.858
    tf32: float = 0.737
    error: float = 0.098
    slowest: float = 1.45
    fastest: float = 0.9


FIT = Fit()
ATTENTION_REACH = 0.35
"""Share of the rate of large products that fused attention reaches, forward and backward."""
LAUNCH_SECONDS = 5e-6
"""What launching an operator takes, about, uncompiled."""
LEAST_ERROR = 0.03
"""Half the width of the interval of a ratio where no product changes its format."""


WINOGRAD = (2.25, 4.0)
"""Factors by which libraries multiply less in a 3 x 3 convolution of float32: of tiles of 2 x 2
outputs, which are usual, and of 4 x 4 (Lavin and Gray, arXiv:1509.09308, section 4)."""


@dataclass(frozen=True)
class Recipe:
    """How converted layers compute.

    Attributes:
        number_format: of their products, a key of DeviceSpec.tflops.
        casts: bytes that casts read and write for each element of an input, a weight and an
            output's gradient, over forward and backward.
        rate: attribute of Fit with the share of the rate; empty for all of it.
        products: how many of the three of a layer are in the format.
        needs_compile: whether it has published speeds with torch.compile alone.
    """

    number_format: str
    casts: tuple[float, float, float]
    rate: str = ""
    products: int = 3
    needs_compile: bool = False


# Casts: TransformerEngine reads 16 bits and writes two layouts, with scales of the current tensor
# after a pass for the maximum. torchao: its own account, testing/training/roofline_utils.py,
# without fusion with the operator before.
RECIPES: Mapping[str, Recipe] = {
    "delayed": Recipe("float8", (4, 4, 4)),
    "current": Recipe("float8", (6, 6, 6)),
    "block": Recipe("float8", (4.1, 4.1, 4.1), "block"),
    "mxfp8": Recipe("mxfp8", (6, 6, 6), "mxfp8"),
    "nvfp4": Recipe("float4", (6, 6, 6)),
    "tensorwise": Recipe("float8", (6, 8, 6), "", 3, True),
    "rowwise": Recipe("float8", (8, 10, 8), "rowwise", 3, True),
    "rowwise_with_gw_hp": Recipe("float8", (3, 6, 3), "rowwise", 2, True),
    "mxfp8_rceil": Recipe("mxfp8", (6, 6, 6), "mxfp8", 3, True),
    "mxfp8_rceil_wgrad_with_hp": Recipe("mxfp8", (3, 6, 3), "mxfp8", 2, True),
}
"""By the kind of a recipe of TransformerEngine, or torchao's name of one."""


def recipe_of(precision: Precision) -> Recipe | None:
    """Return how a precision's converted layers compute; None where no published step says so."""
    recipe = getattr(precision, "recipe", None)
    return RECIPES.get(str(recipe.get("kind")) if isinstance(recipe, Mapping) else str(recipe))


@dataclass(frozen=True)
class StepSeconds:
    """The time of an optimizer step on a card, in seconds, by what it is for.

    Attributes:
        products: matrix products and convolutions, at the card's ceiling.
        overhead: what they take longer than that.
        attention: fused attention.
        traffic: what other operators read and write.
        update: the optimizer.
        gain: what products in a narrower format take less.
        casts: of their operands.
        waiting: for other cards.
    """

    products: float
    overhead: float
    attention: float
    traffic: float
    update: float
    gain: float = 0.0
    casts: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        """Return the time of the step."""
        return sum(vars(self).values()) - 2 * self.gain

    def turnover(self, base: float) -> float:
        """Return the time that is gained and lost against a baseline's step, over the own time.

        Args:
            base: the baseline's time, in seconds.
        """
        unconverted = self.total + self.gain - self.casts
        return (abs(self.gain) + self.casts + abs(unconverted - base)) / self.total


def baseline_of(card: DeviceSpec) -> str:
    """Return the precision that speeds on a card are relative to."""
    return "bf16-mixed" if half_format(card) == "bfloat16" else "16-mixed"


def half_format(card: DeviceSpec) -> str:
    """Return the 16-bit format that a card multiplies: bfloat16, or float16 before Ampere."""
    return "bfloat16" if "bfloat16" in card.tflops else "float16"


def has_winograd(product: Product, tf32: bool) -> bool:
    """Return whether a product is a convolution that libraries compute by fewer multiplications."""
    return product.is_3x3 and product.dtype == "float32" and not tf32


def product_rate(card: DeviceSpec, dtype: str, tf32: bool) -> float:
    """Return the operations per second of large products of a dtype.

    Args:
        card: without bfloat16 it computes what would be in it in float16.
        dtype: of the operands; those that the card has no rate of count as float32.
        tf32: products of float32 run in TF32.
    """
    names = {
        "bfloat16": half_format(card),
        "float32": "tf32" if tf32 else "float32",
        "complex128": "float64",
    }
    return card.ceiling(names.get(dtype, dtype)) or card.ceiling("float32")


def step_seconds(
    cost: StepCost, card: DeviceSpec, tf32: bool, is_fused: bool, fit: Fit = FIT
) -> StepSeconds:
    """Return the time of a step as it is traced.

    Args:
        cost: of the step.
        card: has the formats of its products.
        tf32: products of float32 run in TF32.
        is_fused: whether a compiler fuses pointwise operators.
        fit: the constants.
    """
    products = overhead = attention = 0.0
    for one, count in cost.products.items():
        rate = product_rate(card, one.dtype, tf32)
        flops = one.flops / (WINOGRAD[0] if has_winograd(one, tf32) else 1)
        slowed = flops * fit.product / rate
        if tf32 and one.dtype == "float32":
            slowed /= fit.tf32
        best = max(flops / rate, one.bytes / card.copy_rate)
        products += count * best
        overhead += count * max(slowed - best, 0)
    for dtype, flops in cost.attention.items():
        attention += flops / product_rate(card, dtype, tf32)
    return StepSeconds(
        products,
        overhead,
        attention / ATTENTION_REACH,
        cost.traffic[is_fused] / card.copy_rate,
        cost.update / card.copy_rate
        + sum(fit.product * n / product_rate(card, k, tf32) for k, n in cost.update_flops.items()),
    )


def least_seconds(cost: StepCost, card: DeviceSpec, tf32: bool = False) -> float:
    """Return a time that no step is below: its products and attention at the card's ceilings."""
    flops = Counter(cost.attention)
    for one, count in cost.products.items():
        fewer = WINOGRAD[1] if has_winograd(one, tf32) else 1
        flops[one.dtype] += count * one.flops / fewer  # type: ignore[assignment]
    return sum(each / product_rate(card, dtype, tf32) for dtype, each in flops.items())


class RecipeChange(NamedTuple):
    """What a recipe changes in a step, in seconds.

    Attributes:
        gain: what products take less.
        casts: what the casts of their operands take.
        covered: what these products take in 16 bits.
        limit: what they take less at the card's ceiling in the format.
    """

    gain: float
    casts: float
    covered: float
    limit: float


def recipe_change(cost: StepCost, card: DeviceSpec, recipe: Recipe, fit: Fit = FIT) -> RecipeChange:
    """Return what a recipe changes in a step.

    Args:
        cost: of a step in 16 bits, in which the forwards of converted layers are watched.
        card: multiplies in the recipe's format.
        recipe: of the layers.
        fit: the constants.
    """
    wide, narrow = _rates(card, recipe, fit)
    gain = casts = covered = limit = 0.0
    for one, number in cost.products.items():
        if not one.shape:
            continue
        rows, width, outputs = one.shape
        # A forward that is computed again belongs to a backward that is counted already.
        products = 1 if one.is_recomputation else min(recipe.products, 1 + one.gradients)
        narrow_seconds = (1 + fit.narrow_width / min(width, outputs)) * one.flops / narrow
        gain += number * products * (one.flops / wide - narrow_seconds)
        covered += number * products * one.flops / wide
        ceiling = card.ceiling(recipe.number_format)
        limit += number * products * one.flops * (1 / wide - 1 / ceiling)
        of_input, of_weight, of_gradient = recipe.casts
        cast = of_input * rows * width + of_weight * one.weight
        if one.is_recomputation or not one.gradients:
            cast /= 2  # of the forward alone
        else:
            cast += of_gradient * rows * outputs
        casts += number * cast
    return RecipeChange(gain, casts / card.copy_rate, covered, limit)


def narrowest_width(card: DeviceSpec, recipe: Recipe) -> float | None:
    """Return the width of a square layer below which a recipe is slower than 16 bits, for many
    rows; None where it is slower at any width."""
    wide, narrow = _rates(card, recipe, FIT)
    operations = 2 * recipe.products
    casts = (recipe.casts[0] + recipe.casts[2]) / card.copy_rate
    saved = operations * (1 / wide - 1 / narrow)
    return (casts + operations * FIT.narrow_width / narrow) / saved if saved > 0 else None


def _rates(card: DeviceSpec, recipe: Recipe, fit: Fit) -> tuple[float, float]:
    """Return the operations per second of products in 16 bits, and of wide ones in the format."""
    wide, narrow = (card.ceiling(name) for name in (half_format(card), recipe.number_format))
    share = getattr(fit, recipe.rate) if recipe.rate else 1.0
    return wide / fit.product, narrow * share / fit.narrow_product


def product_format(precision: Precision) -> str:
    """Return the format of a precision's products outside of converted layers."""
    if precision.compute is torch.float32 and precision.float32_matmul not in ("", "highest"):
        return "tf32"
    return tensor_facts.dtype_name(precision.compute)


def speed_ratio(base: float, step: StepSeconds, fit: Fit = FIT) -> tuple[float, float, float]:
    """Return the speed of a step over a baseline's: the least, expected and greatest of the 80 %
    interval.

    Args:
        base: the baseline's time, in seconds.
        step: that is compared.
        fit: the constants.
    """
    ratio = base / step.total
    half = LEAST_ERROR + fit.error * step.turnover(base)
    return ratio * exp(-half), ratio, ratio * exp(half)
