"""strategy=fsdp: every process has a shard of each weight, gradient and optimizer state.

Source: Zhao et al., PyTorch FSDP, arXiv:2304.11277; torch.distributed.fsdp.fully_shard (FSDP2).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from runner.core import ConfigError, fmt, module_tree, tensor_facts
from runner.training.strategies.process_group import ProcessGroupStrategy

REDUCE_DTYPES: Mapping[Any, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@final
class FSDP(ProcessGroupStrategy):
    """torch's fully_shard, with one unit of weights gathered at a time.

    Weights are gathered in the dtype that they are stored in, so that a precision does what it does
    in one process. By default gradients are added in float32.

    Args:
        units: patterns of modules whose weights are gathered together, each such module for
            itself; None: the repeated blocks of the model. The remaining weights are one unit, too.
        reshard_after_forward: drop gathered weights after the forward and gather them again for
            the backward.
        timeout: seconds after which a process that waits for another one gives up.
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
        reduce_dtype: str | None = None,
        cpu_ram_efficient_loading: bool = True,
    ) -> None:
        super().__init__(timeout)
        if reduce_dtype is not None and reduce_dtype not in REDUCE_DTYPES:
            allowed = ", ".join(REDUCE_DTYPES)
            raise ValueError(f"reduce_dtype={reduce_dtype} is not known. Allowed: null, {allowed}")
        self.units = units
        self.reshard_after_forward = reshard_after_forward
        self.reduce_dtype = reduce_dtype
        self.cpu_ram_efficient_loading = cpu_ram_efficient_loading
        self._model = None

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        scalars = [name for name, p in model.named_parameters() if not p.ndim]
        if scalars:
            raise ConfigError(
                "strategy=fsdp cannot shard parameters without dimensions: "
                f"{fmt.first_names(scalars)}."
                " Make them vectors of one number, as in nn.Parameter(torch.ones(1)), or type "
                "strategy=ddp."
            )
        mesh = init_device_mesh(device.type, (self.rank.world_size,))
        for module in model.modules():
            # Layers have the method whose packed weight holds its scales.
            if hasattr(module, "separate_scales"):
                module.separate_scales(device)  # type: ignore[operator]
        usual = None
        if any(p.is_floating_point() and p.itemsize < 4 for p in model.parameters()):
            # For gradients that are narrower; others are added in their own dtype.
            usual = torch.float32
        reduced = REDUCE_DTYPES.get(self.reduce_dtype, usual)
        policy = MixedPrecisionPolicy(reduce_dtype=reduced, cast_forward_inputs=False)
        shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
        # fully_shard takes inner modules before those that hold them.
        for unit in self._units(model):
            shard(unit, reshard_after_forward=self.reshard_after_forward)
        # None keeps the root's weights gathered: the backward needs them first.
        shard(model, reshard_after_forward=None if self.reshard_after_forward else False)
        assert isinstance(model, FSDPModule)
        self._model = model
        return model

    def describe(self) -> str:
        # Without the key FSDP does what the precision says, and there is nothing to report.
        if self.reduce_dtype is None:
            return ""
        return f"fsdp gathers weights as they are stored; it adds gradients in {self.reduce_dtype}"

    def _units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules to shard before the model itself, inner ones first."""
        if self.units is None:
            units = module_tree.repeated_blocks(model)
        else:
            names = [name for name, _ in model.named_modules()]
            selected = module_tree.select_modules("strategy.units", self.units, names)
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
        return [
            tensor.to_local() if tensor_facts.is_sharded(tensor) else tensor for tensor in tensors
        ]

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
            full = value.full_tensor() if tensor_facts.is_sharded(value) else value
            if self.rank.is_main:
                full_tensors[name] = full.detach().cpu().contiguous()
        return full_tensors

    def reduce_norms(self, norms: Tensor) -> Tensor:
        # The squares of the shards' norms add up to the square of the full tensor's norm.
        return self.sum(norms.double().square()).sqrt()


def _modules_of_other_dtype(model: nn.Module) -> list[nn.Module]:
    """Return the modules with weights of another dtype than most weights of the model."""
    # fully_shard wants weights of one dtype in a unit, except for frozen codes.
    dtype_counts = Counter(p.dtype for p in model.parameters() if p.is_floating_point())
    usual = dtype_counts.most_common(1)[0][0]
    others = []
    for module in model.modules():
        dtypes = {p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()}
        if len(dtypes) > 1:
            name = type(module).__name__
            raise ConfigError(
                f"strategy=fsdp: the weights of a {name} have several dtypes, and it shards one. "
                "Name the module in precision.keep_fp32, or type strategy=ddp."
            )
        if dtypes - {usual}:
            others.append(module)
    return others


def named_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model by name, buffers that are not saved included."""
    yield from model.named_parameters()
    # A buffer that modules share is one object on the main process only, so each name counts.
    yield from model.named_buffers(remove_duplicate=False)


@torch.no_grad()
def scatter_values(model: nn.Module, values: dict[str, Tensor], device: torch.device) -> None:
    """Copy the main process's values into the shards and buffers of all processes. Collective.

    Args:
        model: sharded, with storage on the device; its values are overwritten.
        values: on the main process the whole tensors by name, on any device, each removed once it
            is sent; empty on the others.
        device: on which the model's shards are. One whole tensor at a time lies there.
    """
    for name, tensor in named_values(model):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if name in values:
            whole.copy_(values.pop(name))
        if tensor_facts.is_sharded(tensor):
            shard = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
            tensor.to_local().copy_(shard.to_local())
        else:
            dist.broadcast(whole, 0)
            tensor.copy_(whole)
