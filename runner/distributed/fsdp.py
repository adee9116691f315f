"""strategy=fsdp: every process has a shard of each weight, gradient and optimizer state.

Source: Zhao et al., PyTorch FSDP, arXiv:2304.11277; torch.distributed.fsdp.fully_shard (FSDP2).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from runner.distributed.float8_gather import gather_in_float8
from runner.distributed.process_group import ProcessGroupStrategy
from runner.distributed.strategy import NarrowWeights, is_sharded
from runner.utils.modules import repeated_blocks, select_modules
from runner.utils.tensors import dtype_name

PARAM_DTYPES = ("compute",)
REDUCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@final
class FSDP(ProcessGroupStrategy):
    """torch's fully_shard, with one unit of weights gathered at a time.

    By default weights are gathered in the dtype that they are stored in, so that a precision does
    what it does in one process, and gradients are added in float32.

    Args:
        units: patterns of modules whose weights are gathered together, each such module for
            itself; None: the repeated blocks of the model. The remaining weights are one unit, too.
        reshard_after_forward: drop gathered weights after the forward and gather them again for
            the backward.
        timeout: seconds after which a process that waits for another one gives up.
        param_dtype: compute gathers weights in the dtype to which autocast or an FP8 layer casts
            them anyway, see runner.precision.gathered_weights; None: as they are stored.
        cpu_ram_efficient_loading: only the main process makes the weights, and the others receive
            their shards; false: each process makes all weights in its host's memory.
        reduce_dtype: dtype in which gradients are added, float32 or bfloat16, over micro-batches
            and over processes; None: float32, or the dtype of wider gradients.

    Raises:
        ValueError: a value that is not allowed.
    """

    name = "fsdp"
    shards = True

    def __init__(
        self,
        units: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
        timeout: float = 1800.0,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        cpu_ram_efficient_loading: bool = True,
    ) -> None:
        super().__init__(timeout)
        _check_value("param_dtype", param_dtype, PARAM_DTYPES)
        _check_value("reduce_dtype", reduce_dtype, REDUCE_DTYPES)
        self.units = units
        self.reshard_after_forward = reshard_after_forward
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.cpu_ram_efficient_loading = cpu_ram_efficient_loading
        self._model: FSDPModule | None = None
        self._description = ""

    def wrap(
        self, model: nn.Module, device: torch.device, narrow: NarrowWeights | None = None
    ) -> nn.Module:
        mesh = init_device_mesh(device.type, (self.place.world_size,))
        for module in model.modules():
            # Layers have the method whose packed weight holds its scales.
            if hasattr(module, "separate_scales"):
                module.separate_scales(device)  # type: ignore[operator]
        policy = self._policy(model, narrow)
        self._description = _describe(model, policy, narrow)
        float8_layers = set(narrow.float8_layers) if narrow else set()
        float8_units: list[list[nn.Module]] = []
        # fully_shard takes inner modules before those that hold them.
        for unit in [*self._units(model), model]:
            reshard: bool | None = self.reshard_after_forward
            if reshard and unit is model:
                # None keeps the root's weights gathered: the backward needs them first.
                reshard = None
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
            # Without the layers of inner units.
            float8_units.append([module for module in unit.modules() if module in float8_layers])
            float8_layers.difference_update(float8_units[-1])
        if narrow is not None:
            gather_in_float8(model, float8_units)
        assert isinstance(model, FSDPModule)
        self._model = model
        return model

    def describe(self) -> str:
        # Without the keys FSDP does what the precision says, and there is nothing to report.
        return self._description if self.param_dtype or self.reduce_dtype else ""

    def _policy(self, model: nn.Module, narrow: NarrowWeights | None) -> MixedPrecisionPolicy:
        """Return the dtypes in which weights are gathered and gradients are added."""
        if self.reduce_dtype is not None:
            reduced: torch.dtype | None = REDUCE_DTYPES[self.reduce_dtype]
        else:
            reduced = _reduce_dtype(model)
        if narrow is None:
            return MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
        ids = narrow.ids
        # By name, for older versions of torch, which are refused before, have no such parameter.
        overrides: dict[str, Any] = {
            "param_dtype_override_fn": lambda p: None if id(p) in ids else p.dtype
        }
        return MixedPrecisionPolicy(
            param_dtype=narrow.dtype,
            # Gathered weights have narrow gradients, whatever dtype the model stores.
            reduce_dtype=reduced or torch.float32,
            cast_forward_inputs=False,
            **overrides,
        )

    def _units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules to shard before the model itself, inner ones first."""
        if self.units is None:
            units = repeated_blocks(model)
        else:
            names = [name for name, _ in model.named_modules()]
            selected = select_modules("strategy.units", self.units, names)
            # A pattern also matches the modules inside the one that it names.
            outer = [name for name in selected if name.rpartition(".")[0] not in selected]
            units = [model.get_submodule(name) for name in sorted(outer) if name]
        return [*_modules_of_other_dtype(model), *units]

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        if self._model is not None:
            self._model.set_requires_gradient_sync(last)
        yield

    def drop_gathered_weights(self) -> None:
        if self._model is None:
            return
        assert isinstance(self._model, nn.Module)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def local_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]

    def reduce_found_inf(self, flag: Tensor | None) -> Tensor | None:
        if flag is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        # First, because FSDP then drops gathered weights.
        state = model.state_dict(keep_vars=True)
        tensors = super().full_state_dict(model)
        known = {id(value) for value in tensors.values()}
        for name, value in state.items():
            # The scales of 4-bit weights are neither parameters nor buffers.
            if id(value) not in known and not name.endswith("_extra_state"):
                tensors[name] = value
        full_tensors = {}
        for name, value in tensors.items():
            # Collective: every process gathers every tensor, and only the main one stores it.
            full = value.full_tensor() if is_sharded(value) else value
            if self.place.is_main:
                full_tensors[name] = full.detach().cpu().contiguous()
        return full_tensors

    def reduce_norms(self, norms: Tensor) -> Tensor:
        # The squares of the shards' norms add up to the square of the full tensor's norm.
        return self.sum(norms.double().square()).sqrt()


def _check_value(key: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError for a value that is neither None nor allowed."""
    if value is not None and value not in allowed:
        raise ValueError(f"{key}={value} is not known. Allowed: null, {', '.join(allowed)}")


def _describe(model: nn.Module, policy: MixedPrecisionPolicy, narrow: NarrowWeights | None) -> str:
    """Return one line about the dtypes of what is sent."""
    gathered = "as they are stored"
    if narrow is not None:
        total = sum(parameter.numel() for parameter in model.parameters())
        parts = []
        if narrow.float8_layers:
            parts.append(f"{narrow.float8_elements:,} of {total:,} in FP8")
        if narrow.ids:
            parts.append(f"{narrow.elements:,} of {total:,} in {dtype_name(narrow.dtype)}")
        gathered = f"{' and '.join(parts)}, the others as they are stored"
    reduced = "in their own dtype"
    if policy.reduce_dtype is not None:
        reduced = f"in {dtype_name(policy.reduce_dtype)}"
    return f"fsdp gathers weights {gathered}; it adds gradients {reduced}"


def _reduce_dtype(model: nn.Module) -> torch.dtype | None:
    """Return float32 for gradients that are narrower; None, for their own dtype, if none is."""
    has_narrow = any(p.is_floating_point() and p.itemsize < 4 for p in model.parameters())
    return torch.float32 if has_narrow else None


def _modules_of_other_dtype(model: nn.Module) -> list[nn.Module]:
    """Return the modules with weights of another dtype than most weights of the model."""
    # fully_shard wants weights of one dtype in a unit, except for frozen codes.
    dtype_counts = Counter(p.dtype for p in model.parameters() if p.is_floating_point())
    usual = dtype_counts.most_common(1)[0][0]
    found = []
    for module in model.modules():
        dtypes = {p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()}
        if dtypes - {usual}:
            found.append(module)
    return found
