"""TransformerEngine's recipes: the keys of each, its devices, and the library's object.

The library ignores keys that it does not know, takes omitted ones from the environment,
and cannot be imported without its compiled part. So the schema is here, and every key is passed.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from runner.core import Unavailable
from runner.precision import devices, options

INSTALL_REMEDY = 'Type pip install "precision-runner[transformer-engine]".'

Accumulation = Literal["float32", "hopper"]
"""How emulated products are summed: in float32, or in the 14 bits of Hopper's tensor cores."""
HOPPER_KINDS = ("delayed", "current", "block")


@dataclass(frozen=True)
class RecipeKey:
    """A key of a recipe.

    Attributes:
        default: its value where the config leaves it out.
        is_allowed: returns whether a value is allowed.
        allowed: the allowed values, for messages.
    """

    default: Any
    is_allowed: Callable[[Any], bool]
    allowed: str


def _one_of(*values: Any) -> RecipeKey:
    """Return a key that takes one of these values, the first by default."""
    # JSON spells null, true and false as YAML does.
    allowed = ", ".join(json.dumps(value).strip('"') for value in values)

    def is_allowed(given: Any) -> bool:
        # With its type: in Python 1 equals true.
        return any(given == value and type(given) is type(value) for value in values)

    return RecipeKey(values[0], is_allowed, allowed)


def _integer(default: int, minimum: int) -> RecipeKey:
    allowed = f"a whole number from {minimum}"
    # By its type, because a bool is an int to isinstance.
    return RecipeKey(default, lambda v: type(v) is int and v >= minimum, allowed)


_SWITCH = _one_of(False, True)
_BACKWARD_OVERRIDE = _one_of(None, "high_precision", "dequantized")


@dataclass(frozen=True)
class RecipeKind:
    """A kind of recipe.

    Attributes:
        recipe: class in transformer_engine.common.recipe.
        keys: its keys in the config.
        multiple: of widths and of flattened rows, so that none of a layer's three products fails.
        check_name: name of the library's own test of the device, in transformer_engine.pytorch.
        min_capability: the lowest compute capability on which it runs.
        capability_limit: the lowest compute capability on which it no longer runs; None for none.
        min_cuda: the lowest version of CUDA that PyTorch may be built with.
    """

    recipe: str
    keys: Mapping[str, RecipeKey]
    multiple: int
    check_name: str
    min_capability: tuple[int, int]
    capability_limit: tuple[int, int] | None = None
    min_cuda: tuple[int, int] = (12, 1)


# Multiples. The library asserts input features by 16, rows and output features by 8
# (pytorch/utils.py, assert_dim_for_fp8_exec), but only for the forward: the backward's products
# contract over output features and over rows, and cuBLASLt needs multiples of 16 in the dimension
# that they contract over (common/gemm/cublaslt_gemm.cu). MXFP8 scales blocks of 32 in both
# directions. NVFP4's blocks are 16, and 16 bytes hold 32 of its values.
KINDS: Mapping[str, RecipeKind] = {
    "delayed": RecipeKind(
        "DelayedScaling",
        {
            "format": _one_of("HYBRID", "E4M3"),
            "margin": _integer(0, 0),
            "amax_history_len": _integer(1024, 1),
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
            "use_power_2_scales": _SWITCH,
            "backward_override": _BACKWARD_OVERRIDE,
        },
        16,
        "is_fp8_available",
        (8, 9),
    ),
    "block": RecipeKind(
        "Float8BlockScaling",
        {
            "format": _one_of("E4M3", "HYBRID"),
            "use_f32_scales": _SWITCH,
            "x_block_scaling_dim": _one_of(1, 2),
            "w_block_scaling_dim": _one_of(2, 1),
            "grad_block_scaling_dim": _one_of(1, 2),
            "backward_override": _BACKWARD_OVERRIDE,
        },
        16,
        "is_fp8_block_scaling_available",
        (9, 0),
        min_cuda=(12, 9),
    ),
    "mxfp8": RecipeKind(
        "MXFP8BlockScaling",
        {
            "format": _one_of("E4M3", "HYBRID"),
            "enable_2d_quantization": _SWITCH,
            "backward_override": _BACKWARD_OVERRIDE,
        },
        32,
        "is_mxfp8_available",
        (10, 0),
        capability_limit=(12, 0),
    ),
    "nvfp4": RecipeKind(
        "NVFP4BlockScaling",
        {
            "disable_rht": _SWITCH,
            "disable_stochastic_rounding": _SWITCH,
            "disable_2d_quantization": _SWITCH,
            "backward_override": _BACKWARD_OVERRIDE,
        },
        32,
        "is_nvfp4_available",
        (10, 0),
    ),
}


def recipe_problems(name: str, recipe: object, weights: str) -> list[str]:
    """Return a sentence for each problem of a recipe.

    Args:
        name: of the precision.
        recipe: value of precision.recipe.
        weights: dtype of the weights.
    """
    if not isinstance(recipe, Mapping):
        return [f"precision.recipe={recipe} has no keys. Type precision.recipe.kind=<kind>."]
    built_in = {kind: f"transformer-engine-{kind}" for kind in KINDS}
    # Two precisions have this recipe.
    is_float16 = name == "transformer-engine-float16"
    built_in["delayed"] = name if is_float16 else "transformer-engine"
    kind_name = str(recipe.get("kind"))
    # The keys of another recipe than the name's are no problems of their own.
    problems = options.name_problems(name, "recipe.kind", kind_name, built_in)
    problems = problems or options.choice_problems("recipe.kind", kind_name, KINDS)
    if problems:
        return problems
    kind = KINDS[kind_name]
    given = {key: value for key, value in recipe.items() if key != "kind"}
    for key, value in given.items():
        setting = f"precision.recipe.{key}={value}"
        if key not in kind.keys:
            allowed = ", ".join(kind.keys)
            problems.append(
                f"{setting}: the recipe {kind_name} has no such key. Allowed: {allowed}."
            )
        elif not kind.keys[key].is_allowed(value):
            problems.append(f"{setting} is not known. Allowed: {kind.keys[key].allowed}.")
    values = complete_recipe(recipe)
    square = [key for key in kind.keys if key.endswith("block_scaling_dim") and values[key] == 2]
    if len(square) > 1:
        problems.append(
            f"precision.recipe: {' and '.join(square)} are 2, and a product of two tensors in "
            f"square blocks does not exist. Type precision.recipe.{square[0]}=1."
        )
    if kind_name == "nvfp4" and weights == "float16":
        problems.append(
            "precision.weights=float16: NVFP4's products cannot come out in float16. "
            "Type precision.weights=bfloat16."
        )
    return problems


def accumulate_problems(accumulate: object, recipe: object, emulate: object) -> list[str]:
    """Return the problem of precision.accumulate for a recipe; an empty list for none.

    Args:
        accumulate: the key's value.
        recipe: whose own problems recipe_problems returns.
        emulate: precision.emulate; the hardware sums as it does, whatever is asked for.
    """
    key = f"precision.accumulate={accumulate}"
    problems = options.choice_problems("accumulate", accumulate, get_args(Accumulation))
    if problems or accumulate == "float32":
        return problems
    if emulate is not True:
        return [
            f"{key} is for emulated products: hardware sums in its own way. Allowed without "
            "precision.emulate=true: float32. Type precision.emulate=true, too."
        ]
    kind = recipe.get("kind") if isinstance(recipe, Mapping) else None
    if kind in [*KINDS] and kind not in HOPPER_KINDS:
        return [
            f"{key}: Hopper has no products of the recipe {kind}. Allowed: recipes "
            f"{', '.join(HOPPER_KINDS)}. Type precision=transformer-engine-block."
        ]
    return []


def import_library() -> Any:
    """Import transformer_engine.pytorch and return it.

    torch must be imported before it, as it is above: the library finds CUDA's libraries through it.

    Raises:
        ImportError: it is missing, or does not fit this installation.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (OSError, RuntimeError, AssertionError) as error:
        # A part of it or a shared object is missing.
        raise ImportError(f"{type(error).__name__}: {error}") from error


def complete_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with its kind and all its keys, at the default where it leaves one out."""
    defaults = {key: entry.default for key, entry in KINDS[recipe["kind"]].keys.items()}
    return defaults | dict(recipe)


def build_recipe(recipe: Mapping[str, Any]) -> Any:
    """Return the library's recipe object. Every key is given, so that the environment sets none."""
    values = complete_recipe(recipe)
    kind = KINDS[values.pop("kind")]
    library = importlib.import_module("transformer_engine.common.recipe")
    if "format" in values:
        values["fp8_format"] = library.Format[values.pop("format")]
    built = getattr(library, kind.recipe)(**values)
    power_2 = values.get("use_power_2_scales", not values.get("use_f32_scales", True))
    if {"use_power_2_scales", "use_f32_scales"} & set(values):
        # Class attributes that the library fills from the environment, whatever the constructor
        # is given, and that its quantizers read instead of the key.
        for part in ("fwd_inp", "fwd_weight", "bwd_grad"):
            setattr(built, f"fp8_quant_{part}", library.QParams(power_2_scale=power_2))
    return built


def require_recipe(name: str, kind: RecipeKind, device: torch.device) -> None:
    """Raise Unavailable where a recipe of this kind cannot run.

    The device is checked first, then the package, then the library's own test.

    Args:
        name: of the precision, for messages.
        kind: of its recipe.
        device: on which it should run.
    """
    remedy = devices.emulation_remedy(f"{devices.native_half_prefix(device)}-mixed")
    devices.require_capability(name, device, kind.min_capability, remedy, kind.capability_limit)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if cuda < kind.min_cuda:
        raise Unavailable(
            f"precision={name} needs CUDA {devices.dotted(kind.min_cuda)} or newer; this PyTorch "
            f"was built with {torch.version.cuda or 'none'}.",
            remedy,
        )
    try:
        te = import_library()
    except ImportError as error:
        why = f"it cannot be imported: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            why = f"{error.name} is not installed."
        raise Unavailable(
            f"precision={name} needs TransformerEngine: {why}", INSTALL_REMEDY
        ) from error
    runs, reason = getattr(te, kind.check_name)(return_reason=True)
    if not runs:
        raise Unavailable(f"precision={name}: TransformerEngine refuses {device}: {reason}", remedy)
