"""Keep what a weight of 16 bits cannot hold of its updates.

An update below half a unit in the last place of a bfloat16 weight (2**-9 of its value) is rounded
away. Each rule here computes the optimizer's step in float32 and keeps what is left in its own way:

| rule | beside 2 bytes a weight | the weights that the optimizer steps |
| --- | --- | --- |
| nearest | nothing | the stored ones; what is left is lost |
| master_weights | 4 bytes, float32 | the float32 copy |
| remainders | 2 bytes, integer | stored weight and remainder: the same float32 numbers |
| kahan | 2 bytes, in the weight's dtype | stored weight plus compensation, 16 bits of mantissa |
| stochastic_rounding | nothing | the stored ones; rounded up or down by chance, right on average |

Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740 (master weights); Zamirai et
al., Revisiting BFloat16 Training, arXiv:2010.06192 (Kahan summation, stochastic rounding). The
remainders are those of NVIDIA's fused Adam in TransformerEngine.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from runner.core import ConfigError, tensor_facts

UpdateRule = Literal["nearest", "master_weights", "remainders", "kahan", "stochastic_rounding"]
UPDATE_RULES: tuple[str, ...] = get_args(UpdateRule)

_LOW_BITS = 16
_HALF_UNIT = 1 << (_LOW_BITS - 1)


class SteppedWeights(NamedTuple):
    """Weights after a step, in lists of equal length, an item for each parameter.

    Attributes:
        weights: the stored ones, as before the step.
        kept: what is kept beside each; empty for nothing.
        wide: float32, stepped.
        generator: for rules that draw; on the weights' device.
    """

    weights: list[Tensor]
    kept: list[Tensor]
    wide: list[Tensor]
    generator: torch.Generator | None


class WeightStore:
    """How weights of 16 bits become float32 for a step, and are stored after it.

    All methods take lists of equal length, an item for each parameter; of a sharded parameter they
    get this process's shard.

    Attributes:
        name: of the rule.
        state_key: of what is kept beside a weight, in the optimizer's state; empty for nothing.
        keeps_wide_state: the optimizer's state is in float32; else in the weights' dtype.
        reads_weights: forwards write the stored weights, which count then, and not what is kept.
    """

    name: str
    state_key = ""
    keeps_wide_state = False
    reads_weights = False

    def new_state(self, weight: Tensor) -> Tensor | None:
        """Return what is kept beside a weight before its first step; None for nothing."""
        return None

    def widen(self, weights: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
        """Return the weights in float32, as tensors that the step may change."""
        wide = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        torch._foreach_copy_(wide, weights)
        return wide

    def store(self, stepped: SteppedWeights) -> None:
        """Write stepped weights into the stored ones, and what is left into what is kept; both in
        place. By default they are rounded to nearest, and nothing is kept."""
        torch._foreach_copy_(stepped.weights, stepped.wide)


@final
class Nearest(WeightStore):
    """What is left is lost, as where the optimizer steps 16-bit weights by itself."""

    name = "nearest"


@final
class MasterWeights(WeightStore):
    """The optimizer trains a float32 copy, and the stored weights are its rounding."""

    name = "master_weights"
    state_key = "master_weight"
    keeps_wide_state = True

    def new_state(self, weight: Tensor) -> Tensor:
        return weight.float()

    def widen(self, weights: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
        for weight, copy in zip(weights, kept, strict=True) if self.reads_weights else ():
            copy.copy_(torch.where(copy.to(weight.dtype) == weight, copy, weight))
        return [*kept]


@final
class Remainders(WeightStore):
    """A bfloat16 weight and 16 bits that make it the float32 weight again, bit by bit.

    bfloat16 is the upper half of float32, so the difference of the two bit patterns fits in 16
    bits. A tie is rounded away from zero: rounded to even, two float32 numbers would have the same
    pair of weight and remainder.
    """

    name = "remainders"
    state_key = "weight_remainder"
    keeps_wide_state = True

    def new_state(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight, dtype=torch.int16)

    def widen(self, weights: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
        wide = []
        for weight, remainder in zip(weights, kept, strict=True):
            bits = weight.view(torch.int16).to(torch.int32)
            bits.bitwise_left_shift_(_LOW_BITS).add_(remainder)
            wide.append(bits.view(torch.float32))
        return wide

    def store(self, stepped: SteppedWeights) -> None:
        shards = zip(stepped.weights, stepped.kept, stepped.wide, strict=True)
        for weight, remainder, value in shards:
            bits = value.view(torch.int32)
            upper = (bits + _HALF_UNIT).bitwise_right_shift_(_LOW_BITS)
            # Both fit: an int16 takes the lower half of an int32.
            weight.view(torch.int16).copy_(upper)
            remainder.copy_(bits - upper.bitwise_left_shift_(_LOW_BITS))


@final
class Kahan(WeightStore):
    """What the rounding of a weight lost is kept in the weight's dtype, and added the next time."""

    name = "kahan"
    state_key = "compensation"

    def new_state(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight)

    def widen(self, weights: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
        wide = super().widen(weights, kept)
        torch._foreach_add_(wide, kept)
        return wide

    def store(self, stepped: SteppedWeights) -> None:
        super().store(stepped)
        left = torch._foreach_sub(stepped.wide, stepped.weights)
        torch._foreach_copy_(stepped.kept, left)


@final
class StochasticRounding(WeightStore):
    """A weight is rounded up with a probability that is the share of the gap that it has passed."""

    name = "stochastic_rounding"

    def store(self, stepped: SteppedWeights) -> None:
        for weight, value in zip(stepped.weights, stepped.wide, strict=True):
            weight.copy_(round_stochastically(value, weight.dtype, stepped.generator))


STORES: dict[str, type[WeightStore]] = {
    store.name: store for store in (Nearest, MasterWeights, Remainders, Kahan, StochasticRounding)
}


def round_stochastically(
    values: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Return float32 values in bfloat16 or float16, each rounded to one of its two neighbours.

    The probability of the upper one is the share of the gap between the two that the value has
    passed, so that the mean of many roundings is the value. Values that the dtype holds, infinities
    and NaN stay as they are.
    """
    if dtype is torch.bfloat16:
        # Uniform bits added below the kept ones carry into these as often as they should.
        noise = torch.empty_like(values, dtype=torch.int32)
        noise.random_(0, 1 << _LOW_BITS, generator=generator)
        bits = (values.view(torch.int32) + noise).bitwise_and_(-(1 << _LOW_BITS))
        rounded = bits.view(torch.float32).to(dtype)
        return torch.where(values.isfinite(), rounded, values.to(dtype))
    nearest = values.to(dtype)
    rest = values - nearest
    # The neighbour on the side of the value: the next magnitude outwards or inwards. Of 0 it is the
    # smallest number of the value's sign.
    bits = nearest.view(torch.int16)
    outwards = (nearest == 0) | (rest.signbit() == nearest.signbit())
    other = (bits + torch.where(outwards, 1, -1).to(torch.int16)).view(dtype)
    other = other.abs().copysign(torch.where(nearest == 0, rest, nearest.float()).to(dtype))
    share = rest.abs() / (other.float() - nearest.float()).abs()
    drawn = torch.rand(values.shape, generator=generator, device=values.device)
    is_other = (drawn < share) & values.isfinite() & other.isfinite()
    return torch.where(is_other, other, nearest)


class WideForward(TorchDispatchMode):
    """A context around forwards, not compiled, whose writes to some tensors follow a rule.

    A teacher that follows by a moving average, or a counter, loses what is below half a unit in the
    last place, as an optimizer's weights do. Each operation that writes such a tensor in place runs
    on its float32 numbers here, which are stored by the rule; operations that only read it are
    unchanged.

    Args:
        model: its 16-bit buffers and frozen weights are those tensors.
        rule: one of UPDATE_RULES but nearest.
        stores: of the optimizers, which are told where a forward writes weights that train.

    Attributes:
        kept: what the rule keeps beside each tensor that was written, by name; empty tensors for
            stochastic rounding.
    """

    def __init__(self, model: nn.Module, rule: str, stores: Iterable[WeightStore] = ()) -> None:
        super().__init__()
        self._tensors: dict[int, tuple[str, Tensor, WeightStore]] = {}
        self._trained = {tensor_facts.memory_of(p) for p in model.parameters() if p.requires_grad}
        self._stores = [*stores]
        self._generators: dict[torch.device, torch.Generator] = {}
        named = [*model.named_buffers(), *model.named_parameters()]
        counts = Counter(tensor_facts.memory_of(tensor) for _, tensor in named)
        for name, tensor in named:
            memory = tensor_facts.memory_of(tensor)  # 0 of one without elements
            # Tensors that share a storage would each need what is kept beside the other.
            if (
                memory
                and counts[memory] == 1
                and tensor_facts.is_narrow(tensor)
                and not tensor.requires_grad
            ):
                store = STORES[rule]
                if store is MasterWeights:
                    # A copy would not follow what is written elsewhere; these are beside the value.
                    store = Remainders if tensor.dtype is torch.bfloat16 else Kahan
                self._tensors[memory] = (name, tensor.detach(), store())
        self.kept: dict[str, Tensor] = {}

    def seed(self, seed: int, step: int) -> None:
        """Seed the draws of a step: processes that hold the same tensors round them alike.

        Args:
            seed: of the run, the same in all processes.
            step: number of the step.
        """
        tensors = [tensor for _, tensor, _ in self._tensors.values()]
        # The optimizer's step draws from other seeds.
        self._generators = seeded_generators(tensors, ~(seed * 1_000_003 + step))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        targets = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        written = {tensor_facts.memory_of(t) for t in targets if func._schema.is_mutable}
        for store in self._stores if written & self._trained else ():
            store.reads_weights = True
        # What is copied was computed in 16 bits before.
        updated = () if "copy_" in func.__name__ else written & {*self._tensors}
        stepped = {key: self._widened(*self._tensors[key]) for key in updated}
        if not stepped:
            return func(*args, **kwargs)

        def widen(value: Any) -> Any:
            one = stepped.get(tensor_facts.memory_of(value))
            if one is not None:
                offset = value.storage_offset() - one.weights[0].storage_offset()
                return one.wide[0].as_strided(value.size(), value.stride(), offset)
            is_plain = type(value) in (Tensor, nn.Parameter)  # no shard
            return value.float() if is_plain and tensor_facts.is_narrow(value) else value

        result = func(*tree_map(widen, args), **tree_map(widen, kwargs))
        for key, one in stepped.items():
            self._tensors[key][2].store(one)
        # An operation on lists returns nothing.
        return None if result is None else args[0]

    def _widened(self, name: str, tensor: Tensor, store: WeightStore) -> SteppedWeights:
        if name not in self.kept:
            state = store.new_state(tensor)
            self.kept[name] = tensor.new_empty(0) if state is None else state
        kept = [self.kept[name]]
        generator = self._generators.get(tensor.device)
        return SteppedWeights([tensor], kept, store.widen([tensor], kept), generator)


def seeded_generators(tensors: Iterable[Tensor], seed: int) -> dict[torch.device, torch.Generator]:
    """Return a generator with this seed for each device that tensors are on."""
    # Tensors without values, as in a plan of memory, draw nothing.
    devices = {tensor.device for tensor in tensors if not tensor.is_meta}
    return {device: torch.Generator(device).manual_seed(seed % 2**63) for device in devices}


def check_update(name: str, rule: str, storage: torch.dtype) -> None:
    """Raise ConfigError where a precision cannot have an update rule.

    Args:
        name: of the precision.
        rule: value of precision.update.
        storage: dtype of the precision's weights.
    """
    key = f"precision.update={rule}"
    if rule not in UPDATE_RULES:
        raise ConfigError(f"{key} is not known. Allowed: {', '.join(UPDATE_RULES)}.")
    if rule == Nearest.name:
        return
    if storage.itemsize != 2:
        raise ConfigError(
            f"{key}: precision={name} stores weights in {tensor_facts.dtype_name(storage)}, "
            "whose updates need no cure. Leave it out, or type precision=bf16-true."
        )
    if rule == Remainders.name and storage is not torch.bfloat16:
        raise ConfigError(
            f"{key}: precision={name} stores weights in {tensor_facts.dtype_name(storage)}, "
            "which is not the upper half of float32. Type precision.update=master_weights."
        )
