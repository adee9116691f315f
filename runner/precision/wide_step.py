"""Let an optimizer of any class compute its steps in float32 over weights or state of 16 bits.

During a step the optimizer's groups hold float32 tensors in place of the parameters; after it they
hold the parameters again. So every class works as it is: it never sees 16-bit weights, and outside
of its step nobody sees the float32 ones. Some weights are stepped at a time where the optimizer's
class allows it, so that there is never a float32 copy of the whole model.

Source: DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.2 (Adam's moments in bfloat16
beside float32 weights).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.core import ConfigError, gradients, tensor_facts
from runner.precision.weight_updates import (
    STORES,
    Nearest,
    SteppedWeights,
    StochasticRounding,
    WeightStore,
    seeded_generators,
)

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Values of optimizer.state_dtype."""

_LOW_BIT_LIBRARIES = ("bitsandbytes", "torchao")
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SHRINKING_LIMIT = 2**-8
"""A bfloat16 number times 1 - x can be rounded back to itself where x is below this."""

CHUNK_ELEMENTS = 2**22
"""Weights that are stepped at a time; float32 copies of them and their gradients take 32 MiB."""

ROUNDED_STEPS = "rounded_steps"
"""Key of an optimizer's first group: the steps whose rounding was drawn, for the next one's seed.
"""

KEPT_KEYS = frozenset(store.state_key for store in STORES.values() if store.state_key)
"""Keys of an optimizer's state that belong to an update rule, not to the optimizer."""


def attach_update(
    optimizer: Optimizer, rule: str, state_dtype: torch.dtype | None = None, seed: int = 0
) -> None:
    """Have an optimizer step as an update rule says, from now on.

    Args:
        optimizer: its `step` is replaced, in this object only.
        rule: one of runner.precision.weight_updates.UPDATE_RULES.
        state_dtype: of the optimizer's state between steps, of elementwise tensors alone, rounded
            to nearest; None for the rule's own: float32 where it keeps float32 weights, else the
            weights' dtype.
        seed: of stochastic rounding.

    Raises:
        ConfigError: the optimizer keeps parameters where the step cannot replace them.
    """
    if rule == Nearest.name and state_dtype is None:
        return
    name = type(optimizer).__name__
    held = _attribute_with_parameters(optimizer)
    if held and any(map(tensor_facts.is_narrow, gradients.parameters_of(optimizer))):
        setting, without = f"precision.update={rule}", "precision.update=nearest"
        if rule == Nearest.name:
            setting, without = "optimizer.state_dtype", "optimizer.state_dtype=null"
        raise ConfigError(
            f"{setting}: {name} keeps parameters in its attribute {held}, where a step cannot "
            f"replace them. Have it read self.param_groups, or type {without}."
        )
    _WideStep(optimizer, STORES[rule](), state_dtype, seed)


def drop_foreign_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """Return a saved state without what update rules other than the optimizer's kept in it.

    Returns:
        The state, and the keys that were dropped.
    """
    foreign = KEPT_KEYS - {getattr(optimizer, "weight_store", WeightStore).state_key}
    dropped = {key for values in saved["state"].values() for key in values if key in foreign}
    if not dropped:
        return saved, dropped
    state = {}
    for index, values in saved["state"].items():
        own = {key: value for key, value in values.items() if key not in dropped}
        # An optimizer takes a state that is not empty for one that it has made.
        if own:
            state[index] = own
    return {**saved, "state": state}, dropped


def kept_dtype(
    optimizer: Optimizer, key: str, value: Tensor, p: Tensor, was_attached: bool
) -> torch.dtype:
    """Return the dtype in which an optimizer keeps a tensor of its state between steps.

    Args:
        optimizer: of this run; with attach_update, or without.
        key: of the tensor in the state.
        value: the tensor, of a checkpoint.
        p: its parameter.
        was_attached: the checkpoint's optimizer stepped by attach_update, so that the dtype may be
            none of the optimizer's class.
    """
    own: Callable[[Tensor], torch.dtype] | None = getattr(optimizer, "kept_dtype", None)
    if not _is_elementwise(key, value, p) or (own is None and not was_attached):
        return value.dtype
    return p.dtype if own is None else own(p)


def _attribute_with_parameters(optimizer: Optimizer) -> str:
    """Return the name of an attribute that holds parameters besides those of torch's own; empty
    for none."""
    ids = {*map(id, gradients.parameters_of(optimizer))}
    for name, value in vars(optimizer).items():
        if name in ("param_groups", "state", "defaults"):
            continue
        parts = value.values() if isinstance(value, dict) else value
        if isinstance(parts, list | tuple) and any(id(part) in ids for part in parts):
            return name
    return ""


class _WideStep:
    """The step of one optimizer under an update rule, which replaces the optimizer's own; see
    attach_update for the arguments."""

    def __init__(
        self, optimizer: Optimizer, store: WeightStore, state_dtype: torch.dtype | None, seed: int
    ) -> None:
        self.optimizer = optimizer
        self.store = store
        self.state_dtype = state_dtype
        self.seed = seed
        self._loaded: dict[str, Any] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

        def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        # Schedules of torch wrap the step again, and take it for a bound method.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        # Neither of the two dtypes that can be typed has float16's narrow range.
        is_wide = state_dtype is not None or store.keeps_wide_state
        was_wide = getattr(optimizer, "wide_state", False)
        optimizer.wide_state = was_wide or is_wide  # type: ignore[attr-defined]
        optimizer.weight_store = store  # type: ignore[attr-defined]
        optimizer.kept_dtype = self._dtype_of_state  # type: ignore[attr-defined]
        optimizer.register_load_state_dict_pre_hook(self._note_loaded)
        optimizer.register_load_state_dict_post_hook(self._restore_dtypes)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._seed_generators()
        groups = self.optimizer.param_groups
        every = [[*group["params"]] for group in groups]
        try:
            for chunk in self._chunks(every):
                with self._widened([p for part in chunk for p in part]) as stand_ins:
                    for group, part in zip(groups, chunk, strict=True):
                        group["params"][:] = [stand_ins.get(p, p) for p in part]
                    type(self.optimizer).step(self.optimizer)  # its own, which was replaced
        finally:
            for group, part in zip(groups, every, strict=True):
                group["params"][:] = part
        return loss

    def _seed_generators(self) -> None:
        """Seed the draws of this step: a resumed run draws what an uninterrupted one does, and
        processes that hold the same weights round them alike."""
        if not isinstance(self.store, StochasticRounding):
            return
        group = self.optimizer.param_groups[0]
        group[ROUNDED_STEPS] = count = group.get(ROUNDED_STEPS, 0) + 1
        step_seed = self.seed * 1_000_003 + count
        self._generators = seeded_generators(gradients.parameters_of(self.optimizer), step_seed)

    def _chunks(self, every: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
        """Yield the parameters of each group that are stepped together."""
        # A class of one's own may count its steps, or compare parameters: it gets them all at once.
        if not type(self.optimizer).__module__.startswith("torch.optim."):
            yield every
            return
        chunk: list[list[Tensor]] = [[] for _ in every]
        elements = 0
        for i, p in ((i, p) for i, params in enumerate(every) for p in params):
            if elements and elements + p.numel() > CHUNK_ELEMENTS:
                yield chunk
                chunk = [[] for _ in every]
                elements = 0
            chunk[i].append(p)
            elements += p.numel()
        yield chunk

    @contextmanager
    def _widened(self, params: Sequence[Tensor]) -> Iterator[dict[Tensor, Tensor]]:
        """Return the context around the step of some parameters; yield what stands for each."""
        state = self.optimizer.state
        trained = [p for p in params if p.grad is not None]
        narrow = [p for p in trained if tensor_facts.is_narrow(p)]
        stand_ins: dict[Tensor, Tensor] = {}
        with torch.no_grad():
            kept = self._take_kept(narrow)
            # This process's part of each, where it is sharded.
            weights = [_local(p) for p in narrow]
            shards = [_local(value) for value in kept.values()]
            wide = self.store.widen(weights, shards) if weights else []
            generator = self._generators.get(weights[0].device) if weights else None
            stepped = SteppedWeights(weights, shards, wide, generator)
            for p, value in zip(narrow, stepped.wide, strict=True):
                stand_ins[p] = _shard_like(value, p)
                stand_ins[p].grad = p.grad.float()  # type: ignore[union-attr]
            for _, values, key, value in self._elementwise_state(trained):
                values[key] = value.float()
        for p, stand_in in stand_ins.items():
            if p in state:
                state[stand_in] = state.pop(p)
        try:
            yield stand_ins
            with torch.no_grad():
                if narrow:
                    self.store.store(stepped)
        finally:
            for p, stand_in in stand_ins.items():
                if stand_in in state:
                    state[p] = state.pop(stand_in)
            for p, value in kept.items():
                state[p][self.store.state_key] = value
            with torch.no_grad():
                for p, values, key, value in self._elementwise_state(params):
                    values[key] = value.to(self._dtype_of_state(p))

    def _take_kept(self, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Return what the rule keeps beside each parameter, taken out of the optimizer's state: an
        optimizer takes a state that is not empty for one that it has made."""
        kept: dict[Tensor, Tensor] = {}
        key = self.store.state_key
        for p in params if key else ():
            value = self.optimizer.state[p].pop(key, None)
            if value is None:
                value = self.store.new_state(p.detach())
            kept[p] = value  # type: ignore[assignment]
        return kept

    def _elementwise_state(
        self, params: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, dict[str, Any], str, Tensor]]:
        """Yield each elementwise tensor of the state with its parameter, what holds it, its key."""
        for p in params:
            values = self.optimizer.state.get(p, {})
            for key, value in [*values.items()]:
                if _is_elementwise(key, value, p):
                    yield p, values, key, value

    def _dtype_of_state(self, p: Tensor) -> torch.dtype:
        if self.state_dtype is not None:
            return self.state_dtype
        is_narrow = tensor_facts.is_narrow(p) and not self.store.keeps_wide_state
        return p.dtype if is_narrow else torch.float32

    def _note_loaded(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _restore_dtypes(self, optimizer: Optimizer) -> None:
        """Undo torch's cast of all loaded state to the dtype of its parameter."""
        saved, self._loaded = self._loaded["state"], {}
        params = gradients.parameters_of(optimizer)
        for index, values in saved.items():
            p = params[index]
            for key, value in values.items():
                if key not in optimizer.state[p] or not isinstance(value, Tensor):
                    continue
                if optimizer.state[p][key].dtype is not value.dtype:
                    device = optimizer.state[p][key].device
                    optimizer.state[p][key] = value.detach().clone().to(device)


def _is_elementwise(key: str, value: Any, p: Tensor) -> bool:
    """Return whether a value of the state is an optimizer's own number for each weight."""
    if key in KEPT_KEYS or key == "step" or not isinstance(value, Tensor):
        return False
    # Of a parameter without dimensions, a count or a product of coefficients (NAdam's mu_product)
    # has the shape, too. Rounded in every step, it would stop.
    if value.ndim == 0 and value.dtype is torch.float32:
        return False
    return value.dtype in _WEIGHT_DTYPES and value.shape == p.shape


def _local(tensor: Tensor) -> Tensor:
    """Return a tensor without autograd; of a sharded one this process's shard, in its memory."""
    detached = tensor.detach()
    return detached.to_local() if tensor_facts.is_sharded(detached) else detached


def _shard_like(value: Tensor, p: Tensor) -> Tensor:
    """Return a shard as a tensor that is sharded as a parameter is; of a plain one, the value."""
    if not tensor_facts.is_sharded(p):
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def check_state_dtype(key: str, optimizer: Optimizer, state_dtype: torch.dtype) -> None:
    """Refuse an optimizer that cannot keep its state in a dtype of the runner's choice.

    Args:
        key: that was given, as "optimizer.state_dtype".
        optimizer: its class and the dtypes of its parameters are checked.
        state_dtype: must be one of STATE_DTYPES.

    Raises:
        ConfigError: the dtype is not known; the optimizer has a format of its own, or weights in
            another dtype than float32, bfloat16 and float16.
    """
    if state_dtype not in STATE_DTYPES.values():
        raise ConfigError(
            f"{key}={state_dtype} is not known. Allowed: torch.float32, torch.bfloat16."
        )
    given = f"{key}={tensor_facts.dtype_name(state_dtype)}"
    name = type(optimizer).__name__
    libraries = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if libraries.intersection(_LOW_BIT_LIBRARIES):
        raise ConfigError(
            f"{given}: {name} keeps its state in a format of its own. Allowed: an optimizer of "
            f"torch.optim, or of your own. Leave {key} out, or type optimizer=adamw."
        )
    others = {p.dtype for p in gradients.parameters_of(optimizer)}.difference(_WEIGHT_DTYPES)
    if others:
        names = ", ".join(sorted(map(tensor_facts.dtype_name, others)))
        raise ConfigError(
            f"{given}: {name} has weights in {names}, whose state keeps their dtype. Allowed: "
            f"weights in float32, bfloat16 or float16. Leave {key} out, or type precision=32-true."
        )


def stuck_averages(state_dtype: torch.dtype | None, optimizer: Optimizer) -> list[str]:
    """Return the settings whose running averages bfloat16 cannot shrink, as "betas[1]=0.999".

    An average v becomes beta * v + (1 - beta) * new. Where 1 - beta is below half a unit in the
    last place, a v above its new values is rounded back to itself in every step.
    """
    if state_dtype is not torch.bfloat16:
        return []
    settings: dict[str, None] = {}
    for group in optimizer.param_groups:
        coefficients = {f"betas[{i}]": beta for i, beta in enumerate(group.get("betas") or ())}
        coefficients |= {name: group.get(name) for name in ("alpha", "rho", "momentum")}
        for label, value in coefficients.items():
            if isinstance(value, float) and 0 < 1 - value < SHRINKING_LIMIT:
                settings[f"{label}={value:g}"] = None
    return list(settings)
