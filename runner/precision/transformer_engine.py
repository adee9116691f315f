"""transformer-engine*: NVIDIA TransformerEngine's FP8 and FP4 products in a half-precision model.

The library's layers replace nn.Linear and nn.LayerNorm. With delayed scaling a forward changes the
scales of later steps, so evaluation, checkpoints and recomputation are treated with care here.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core import ConversionPlan, ConversionReport, Strategy, Unavailable, refuse
from runner.precision import options, te_recipes
from runner.precision.base import FP8_LAYERS, ConvertingPrecision
from runner.precision.casting import DefaultDtype
from runner.precision.conversion import ROOT_NAME, ConversionRules
from runner.precision.emulation import te_emulation
from runner.precision.emulation.formats import E4M3, FOUR_BITS_ROUNDOFF
from runner.precision.layers.backward_checks import refuse_recompute
from runner.precision.layers.te_layers import convert_layers, te_obstacle
from runner.precision.optimizer_eps import check_eps
from runner.precision.weight_updates import UpdateRule, check_update

WEIGHT_DTYPES = ("bfloat16", "float16")
_NO_RECOMPUTE_REASON = (
    "scales by past steps, and each forward updates the scales. Type "
    "precision=transformer-engine-current, or leave it out."
)
# The library's key for the scales and amax histories of each direction.
SCALING_KEYS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


@final
@dataclass(frozen=True, eq=False)
class TransformerEnginePrecision(ConvertingPrecision):
    """TransformerEngine's layers for nn.Linear and nn.LayerNorm, half precision elsewhere.

    Parameters, gradients, optimizer state and buffers are in the weights' dtype; a converted
    layer's products run in FP8 or FP4, scaled as the recipe says.

    Args beside those of ConvertingPrecision:
        weights: bfloat16 or float16.
        recipe: its kind (delayed, current, block, mxfp8, nvfp4) and the keys of that kind; see
            te_recipes.KINDS.
        emulate: round as the recipe does and multiply in float32, on any device. Its speed means
            nothing.
        accumulate: how emulated products are summed; see emulation.te_emulation.
        fuse: one layer for a norm and the linear layer that alone takes its output.
        update_in_eval: an evaluation may move the scales of delayed scaling.
        update: how a step is added to the weights, see runner.precision.weight_updates.

    Raises:
        ConfigError: a value that is not allowed, or a key that the recipe does not have.
    """

    layers_compute_in = "FP8"
    layer_formats = FP8_LAYERS
    # One byte for nvfp4 too, so that all recipes of the library are listed together.
    sort_key = (-1, 0)  # type: ignore[assignment]
    float32_matmul = "highest"
    cpu_float16 = "native"
    weights: str
    recipe: Mapping[str, Any]
    emulate: bool = False
    fuse: bool = False
    update_in_eval: bool = False
    update: UpdateRule = "nearest"  # type: ignore[assignment]
    accumulate: te_recipes.Accumulation = "float32"
    # The forward's contexts, by the default dtype.
    _contexts: dict[torch.dtype, AbstractContextManager[Any]] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        problems = te_recipes.recipe_problems(self.name, self.recipe, self.weights)
        problems += options.choice_problems("weights", self.weights, WEIGHT_DTYPES)
        problems += options.switch_problems(
            emulate=self.emulate,
            fuse=self.fuse,
            update_in_eval=self.update_in_eval,
            reduced_precision_reduction=self.reduced_precision_reduction,
        )
        problems += te_recipes.accumulate_problems(self.accumulate, self.recipe, self.emulate)
        refuse(problems)
        storage = options.DTYPES[self.weights]
        check_update(self.name, self.update, storage)
        recipe = te_recipes.complete_recipe(self.recipe)
        self._derive(storage=storage, compute=storage, recipe=recipe, emulated=self.emulate)
        if recipe["kind"] == "nvfp4":
            roundoffs = (FOUR_BITS_ROUNDOFF, FOUR_BITS_ROUNDOFF)
            self._derive(layers_compute_in="FP4", operand_roundoffs=roundoffs)
        if self._is_delayed:
            self._derive(no_recompute_reason=_NO_RECOMPUTE_REASON)

    @property
    def kind(self) -> te_recipes.RecipeKind:
        """Return the kind of the recipe."""
        return te_recipes.KINDS[self.recipe["kind"]]

    @property
    def capabilities(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Return the lowest compute capability of the recipe, and the lowest above it."""
        return self.kind.min_capability, self.kind.capability_limit

    def require(self, device: torch.device) -> None:
        if not self.emulated:
            te_recipes.require_recipe(self.name, self.kind, device)

    def kernels(self, model: nn.Module, device: torch.device) -> str:
        return ""  # there is no choice

    def require_strategy(self, strategy: Strategy) -> None:
        if self.emulated and self._is_delayed and strategy.rank.world_size > 1:
            raise Unavailable(
                f"precision={self.name} precision.emulate=true runs in one process: what several "
                "share of their scales is not emulated.",
                "Type precision=transformer-engine-current, which scales by its own process's "
                "numbers.",
            )

    @contextmanager
    def session(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        on_hardware = device.type == "cuda" and not self.emulated
        amaxes = _separate_amaxes(model) if on_hardware else nullcontext()
        with super().session(model, device), amaxes:
            yield

    def find_obstacle(self, module: nn.Module) -> str:
        return te_obstacle(module, self.kind.multiple)

    def convert_layers(
        self, model: nn.Module, rules: ConversionRules, device: torch.device
    ) -> ConversionReport:
        report = convert_layers(model, self._library, self.kind.multiple, rules, self.fuse)
        for layer in self._scaled_layers(model).values():
            layer.register_forward_pre_hook(refuse_recompute)
        return report

    def check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # The optimizer's state has the weights' dtype.
        if self.storage is torch.float16:
            check_eps(self.name, optimizers)

    def forward(
        self, device: torch.device, plan: ConversionPlan = ConversionPlan()
    ) -> AbstractContextManager[Any]:
        # Elsewhere the library's products cannot run.
        if device.type != "cuda" and not self.emulated:
            return self._default_dtype(plan)
        dtype = torch.float32 if plan.makes_float32 else self.storage
        if dtype not in self._contexts:
            self._contexts[dtype] = _ScaledForward(self._autocast(), dtype)
        return self._contexts[dtype]

    def backward(
        self, device: torch.device, plan: ConversionPlan = ConversionPlan()
    ) -> AbstractContextManager[Any]:
        # Entering the library's context again would move the scales of delayed scaling; a layer
        # that is recomputed there raises (refuse_recompute).
        return self._default_dtype(plan) if self._is_delayed else self.forward(device, plan)

    @contextmanager
    def eval_context(self, model: nn.Module) -> Iterator[None]:
        # A forward writes amaxes even without gradients, and the next training step would use them.
        layers = [] if self.update_in_eval else list(self._scaled_layers(model).values())
        previous = [layer.get_fp8_meta_tensors() for layer in layers]
        try:
            yield
        finally:
            for layer, tensors in zip(layers, previous, strict=True):
                layer.reset_fp8_meta_tensors(tensors)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return scales and amax histories of delayed scaling, by module; empty for other recipes.
        A layer that never ran has none."""
        state: dict[str, dict[str, Tensor]] = {}
        for name, layer in self._scaled_layers(model).items():
            tensors = layer.get_fp8_meta_tensors()
            if tensors is None:
                continue
            state[name] = {}
            for direction, key in SCALING_KEYS.items():
                scale, amax_history = tensors[key]
                state[name][f"{direction}_scale"] = scale
                state[name][f"{direction}_amax_history"] = amax_history
        return state

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore what state_dict returned, also before a layer's first forward.

        A layer that the state does not have starts with new scales; of a history of another length
        the latest amaxes are restored.
        """
        for name, layer in self._scaled_layers(model).items():
            if name in state:
                self._restore(layer, state[name])
            else:
                layer.reset_fp8_meta_tensors()

    def _restore(self, layer: Any, saved: Mapping[str, Tensor]) -> None:
        if not layer.fp8_meta_tensors_initialized:
            # The library has three forward scales for each product: input, weight, output.
            layer.fp8_meta["num_gemms"] = len(saved["forward_scale"]) // 3
            # With gradients on, leaving the context would update every scale.
            with torch.no_grad(), self._autocast():
                layer.init_fp8_meta_tensors(self._recipe)
        length = self.recipe["amax_history_len"]
        tensors = {}
        for direction, key in SCALING_KEYS.items():
            scale = saved[f"{direction}_scale"]
            # This run's recipe may have another length than the run that wrote the checkpoint.
            amax_history = _resized_history(saved[f"{direction}_amax_history"], length)
            tensors[key] = [scale, amax_history]
        layer.reset_fp8_meta_tensors(tensors)

    def gauges(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the input scaling of each converted layer under delayed scaling; empty for other
        recipes, which store none.

        `fp8/amax/<module>` is the largest absolute value in the last step, `fp8/scale/<module>` the
        factor by which the input is multiplied before it is rounded to FP8.
        """
        gauges: dict[str, Tensor] = {}
        for name, layer in self._scaled_layers(model).items():
            scaling = layer.fp8_meta.get(SCALING_KEYS["forward"])
            if scaling is None:
                continue
            # Column 0 is the input's.
            history = scaling.amax_history[:, 0]
            scale = scaling.scale[0]
            if len(history) > 1:
                amax = history[-1].clone()
            else:
                # The library clears the first row at the end of a step. A history of one row is
                # then empty, and the amax follows from the scale that was made of it.
                amax = E4M3.largest / 2 ** self.recipe["margin"] / scale
            gauges[f"fp8/amax/{name}"] = amax
            gauges[f"fp8/scale/{name}"] = scale.clone()
        return gauges

    @property
    def _is_delayed(self) -> bool:
        return self.recipe["kind"] == "delayed"

    def _scaled_layers(self, model: nn.Module) -> dict[str, Any]:
        """Return the layers with scales of past steps, by dotted name; under delayed scaling alone
        a forward changes state."""
        return _fp8_layers(model) if self._is_delayed else {}

    @property
    def _library(self) -> Any:
        """Return transformer_engine.pytorch, or the emulation with the same functions."""
        return te_emulation if self.emulated else te_recipes.import_library()

    @cached_property
    def _recipe(self) -> Any:
        """Return the recipe as the library, or its emulation, takes it; built once."""
        return self.recipe if self.emulated else te_recipes.build_recipe(self.recipe)

    def _autocast(self) -> AbstractContextManager[Any]:
        # The library has no such parameter.
        options = {"accumulate": self.accumulate} if self.emulated else {}
        return self._library.autocast(recipe=self._recipe, **options)


class _ScaledForward(DefaultDtype):
    """A reusable context that enters the library's autocast and sets the default dtype."""

    __slots__ = ("autocast",)

    def __init__(self, autocast: AbstractContextManager[Any], dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.autocast = autocast

    def __enter__(self) -> None:
        self.autocast.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        # They are left in the reverse order of entering.
        super().__exit__(*error)
        self.autocast.__exit__(*error)


def _fp8_layers(model: nn.Module) -> dict[str, Any]:
    """Return the library's layers with FP8 state, by dotted name."""
    return {
        name or ROOT_NAME: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "fp8_meta", None), dict)
    }


@contextmanager
def _separate_amaxes(model: nn.Module) -> Iterator[None]:
    """Give this model a list of amaxes of its own, and restore the library's after.

    The library's list is process-wide. It grows with every model that ever ran, and each step would
    update the scales of all of them.
    """
    module = importlib.import_module("transformer_engine.pytorch.quantization")
    manager = module.FP8GlobalStateManager
    previous = manager.quantization_state
    manager.reset()
    for layer in _fp8_layers(model).values():
        # The layer's index in an earlier list.
        layer.fp8_meta.pop(manager.get_buffer_info(), None)
    try:
        yield
    finally:
        manager.quantization_state = previous


def _resized_history(history: Tensor, length: int) -> Tensor:
    """Return an amax history [steps, tensors] with another number of steps.

    The first row is the current step; the others are past steps, the latest last.
    """
    current = history[:1]
    # A slice from -0 would keep every past step.
    latest = history[1:][-(length - 1) :] if length > 1 else history[:0]
    missing = length - 1 - len(latest)
    return torch.cat([current, F.pad(latest, (0, 0, missing, 0))])
