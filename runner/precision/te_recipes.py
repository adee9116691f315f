"""TransformerEngine's recipes: their keys, what each asks of the device, and the library's objects.

The library ignores keys that it does not know, takes what is left out from the environment, and
cannot be imported without its compiled part; so the schema is kept here, and every key is passed.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.precision.cuda_half import nearest_half
from runner.utils import tpu
from runner.utils.errors import Unavailable

NEAREST = (
    "Type precision.emulate=true for its numbers without its speed, or precision={}-mixed, the "
    "nearest that runs here."
)
INSTALL = 'Type pip install "precision-runner[transformer-engine]".'


@dataclass(frozen=True)
class RecipeKey:
    """A key of a recipe: its default, whether a value is allowed, and what is, for messages."""

    default: Any
    holds: Callable[[Any], bool]
    allowed: str


def _one_of(*values: Any) -> RecipeKey:
    """The first is the default. 1 and true are not the same."""
    spelling = {"None": "null", "True": "true", "False": "false"}
    shown = ", ".join(spelling.get(str(value), str(value)) for value in values)
    return RecipeKey(values[0], lambda v: any(v == w and type(v) is type(w) for w in values), shown)


def _whole(default: int, least: int) -> RecipeKey:
    allowed = f"a whole number from {least}"
    return RecipeKey(default, lambda v: type(v) is int and v >= least, allowed)


_OFF = _one_of(False, True)
_BACKWARD = _one_of(None, "high_precision", "dequantized")


@dataclass(frozen=True)
class RecipeKind:
    """A kind of recipe.

    Attributes:
        recipe: class in transformer_engine.common.recipe.
        keys: its keys in the config.
        multiple: of widths and of flattened rows, so that none of a layer's three products fails.
        check: the library's own test of the device, in transformer_engine.pytorch.
        least: compute capability from which it runs.
        below: compute capability from which it does not run any more.
        cuda: least version of CUDA that PyTorch was built with.
    """

    recipe: str
    keys: Mapping[str, RecipeKey]
    multiple: int
    check: str
    least: tuple[int, int]
    below: tuple[int, int] = (99, 0)
    cuda: tuple[int, int] = (12, 1)


# Multiples. The library asserts input features by 16, rows and output features by 8
# (pytorch/utils.py, assert_dim_for_fp8_exec), but that is the forward: the backward's products
# contract over output features and over rows, and cuBLASLt asks 16 of what they contract over
# (common/gemm/cublaslt_gemm.cu). MXFP8 scales blocks of 32 in both directions. NVFP4's blocks are
# 16, and 16 bytes hold 32 of its values.
KINDS: Mapping[str, RecipeKind] = {
    "delayed": RecipeKind(
        "DelayedScaling",
        {
            "format": _one_of("HYBRID", "E4M3"),
            "margin": _whole(0, 0),
            "amax_history_len": _whole(1024, 1),
            "amax_compute_algo": _one_of("max", "most_recent"),
            "reduce_amax": _one_of(True, False),
        },
        16,
        "is_fp8_available",
        (8, 9),
    ),
    "current": RecipeKind(
        "Float8CurrentScaling",
        {
            "format": _one_of("HYBRID", "E4M3"),
            "use_power_2_scales": _OFF,
            "backward_override": _BACKWARD,
        },
        16,
        "is_fp8_available",
        (8, 9),
    ),
    "block": RecipeKind(
        "Float8BlockScaling",
        {
            "format": _one_of("E4M3", "HYBRID"),
            "use_f32_scales": _OFF,
            "x_block_scaling_dim": _one_of(1, 2),
            "w_block_scaling_dim": _one_of(2, 1),
            "grad_block_scaling_dim": _one_of(1, 2),
            "backward_override": _BACKWARD,
        },
        16,
        "is_fp8_block_scaling_available",
        (9, 0),
        cuda=(12, 9),
    ),
    "mxfp8": RecipeKind(
        "MXFP8BlockScaling",
        {
            "format": _one_of("E4M3", "HYBRID"),
            "enable_2d_quantization": _OFF,
            "backward_override": _BACKWARD,
        },
        32,
        "is_mxfp8_available",
        (10, 0),
        below=(12, 0),
    ),
    "nvfp4": RecipeKind(
        "NVFP4BlockScaling",
        {
            "disable_rht": _OFF,
            "disable_stochastic_rounding": _OFF,
            "disable_2d_quantization": _OFF,
            "backward_override": _BACKWARD,
        },
        32,
        "is_nvfp4_available",
        (10, 0),
    ),
}


def unknown_recipe(name: str, recipe: Mapping[str, Any]) -> list[str]:
    """The problem of a recipe under the name of another, whose keys it would not take."""
    names = {kind: f"transformer-engine-{kind}" for kind in KINDS} | {
        "delayed": "transformer-engine"
    }
    kind = str(recipe.get("kind")) if isinstance(recipe, Mapping) else ""
    own = {"transformer-engine-float16": "delayed"} | {n: k for k, n in names.items()}
    if kind not in names or own.get(name, kind) == kind:
        return []
    return [f"precision.recipe.kind={kind} is not what {name} is. Type precision={names[kind]}."]


def recipe_problems(recipe: object, weights: str) -> list[str]:
    """What is wrong with a recipe for weights of a dtype, one sentence each."""
    if not isinstance(recipe, Mapping):
        return [f"precision.recipe={recipe} has no keys. Type precision.recipe.kind=<kind>."]
    name = recipe.get("kind")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return [f"precision.recipe.kind={name} is not known. Allowed: {', '.join(KINDS)}."]
    given = {key: value for key, value in recipe.items() if key != "kind"}
    found = [
        f"precision.recipe.{key}={value}: the recipe {name} has no such key. "
        f"Allowed: {', '.join(kind.keys)}."
        for key, value in given.items()
        if key not in kind.keys
    ]
    found += [
        f"precision.recipe.{key}={value} is not known. Allowed: {kind.keys[key].allowed}."
        for key, value in given.items()
        if key in kind.keys and not kind.keys[key].holds(value)
    ]
    dims = [key for key in kind.keys if key.endswith("block_scaling_dim")]
    square = [key for key in dims if given.get(key, kind.keys[key].default) == 2]
    if len(square) > 1:
        found.append(
            f"precision.recipe: {' and '.join(square)} are 2, and a product of two tensors in "
            f"square blocks does not exist. Type precision.recipe.{square[0]}=1."
        )
    if name == "nvfp4" and weights == "float16":
        found.append(
            "precision.weights=float16: NVFP4's products cannot come out in float16. "
            "Type precision.weights=bfloat16."
        )
    return found


def import_library() -> Any:
    """transformer_engine.pytorch, imported when it is first needed. torch must be imported before
    it, as it is above: the library finds CUDA's libraries through it.

    Raises:
        ImportError: it is missing, or does not fit this installation.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (OSError, RuntimeError, AssertionError) as error:  # a part or a shared object is missing
        raise ImportError(f"{type(error).__name__}: {error}") from error


def complete_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with its kind and all its keys, those that are left out at their defaults."""
    return {k: entry.default for k, entry in KINDS[recipe["kind"]].keys.items()} | dict(recipe)


def build_recipe(recipe: Mapping[str, Any]) -> Any:
    """The library's recipe object, every key given, so that the environment changes none."""
    values = complete_recipe(recipe)
    kind = KINDS[values.pop("kind")]
    made = importlib.import_module("transformer_engine.common.recipe")
    if "format" in values:
        values["fp8_format"] = made.Format[values.pop("format")]
    built = getattr(made, kind.recipe)(**values)
    power_2 = values.get("use_power_2_scales", not values.get("use_f32_scales", True))
    if {"use_power_2_scales", "use_f32_scales"} & set(values):
        # Class attributes that the library fills from the environment, whatever the constructor
        # is given, and that its quantizers read instead of the key.
        for part in ("inp", "weight"):
            setattr(built, f"fp8_quant_fwd_{part}", made.QParams(power_2_scale=power_2))
        built.fp8_quant_bwd_grad = made.QParams(power_2_scale=power_2)
    return built


def require_recipe(name: str, kind: RecipeKind, device: torch.device) -> None:
    """Raise Unavailable where a precision of this kind cannot run: the device is asked first,
    then the package, then the library.

    Args:
        name: the precision's.
        kind: of its recipe.
        device: that it should run on.
    """
    wants = f"precision={name} needs an NVIDIA GPU of compute capability {_range(kind)};"
    nearest = NEAREST.format(nearest_half(device))
    if device.type != "cuda":
        raise Unavailable(f"{wants} this run is on {tpu.accelerator_kind(device)}.", nearest)
    capability = torch.cuda.get_device_capability(device)
    if not kind.least <= capability < kind.below:
        gpu = torch.cuda.get_device_name(device)
        raise Unavailable(f"{wants} {device} ({gpu}) has {_dotted(capability)}.", nearest)
    if _version(torch.version.cuda) < kind.cuda:
        raise Unavailable(
            f"precision={name} needs CUDA {_dotted(kind.cuda)} or newer; this PyTorch was built "
            f"with {torch.version.cuda or 'none'}.",
            nearest,
        )
    try:
        te = import_library()
    except ImportError as error:
        found = isinstance(error, ModuleNotFoundError) and error.name
        why = f"{error.name} is not installed." if found else f"it cannot be imported: {error}"
        raise Unavailable(f"precision={name} needs TransformerEngine: {why}", INSTALL) from error
    runs, reason = getattr(te, kind.check)(return_reason=True)
    if not runs:
        raise Unavailable(
            f"precision={name}: TransformerEngine refuses {device}: {reason}", nearest
        )


def _range(kind: RecipeKind) -> str:
    least = f"{_dotted(kind.least)} or higher"
    return least if kind.below == (99, 0) else f"{least}, below {_dotted(kind.below)}"


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "0").split(".")[:2])
