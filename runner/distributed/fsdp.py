"""strategy=fsdp: every process has a part of each weight, gradient and optimizer state.

Source: Zhao et al., PyTorch FSDP, arXiv:2304.11277; torch.distributed.fsdp.fully_shard (FSDP2).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from runner.distributed.process_group import ProcessGroupStrategy
from runner.distributed.strategy import is_sharded
from runner.utils.modules import repeated_blocks, select_modules


@final
class FSDP(ProcessGroupStrategy):
    """torch's fully_shard. Weights are gathered in the dtype that they are stored in, so that a
    precision does what it does in one process; gradients are added in float32.

    Args:
        units: patterns of modules whose weights are gathered together, each such module for
            itself; None: the repeated blocks of the model. What is left is one unit, too.
        reshard_after_forward: drop gathered weights after the forward and gather them again for
            the backward.
        timeout: seconds after which a process that waits for another one gives up.
    """

    name = "fsdp"
    shards = True

    def __init__(
        self,
        units: Sequence[str] | None = None,
        reshard_after_forward: bool = True,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout)
        self.units, self.reshard_after_forward = units, reshard_after_forward
        self._model: FSDPModule | None = None

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        mesh = init_device_mesh(device.type, (self.place.world_size,))
        policy = MixedPrecisionPolicy(reduce_dtype=_reduction(model), cast_forward_inputs=False)
        for unit in [*self._units(model), model]:
            # Of the root's weights the backward has need at once.
            reshard = (
                None
                if self.reshard_after_forward and unit is model
                else (self.reshard_after_forward)
            )
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        assert isinstance(model, FSDPModule)
        self._model = model
        return model

    def _units(self, model: nn.Module) -> list[nn.Module]:
        """Inner ones first; what is of another dtype than the most is a unit of its own."""
        if self.units is None:
            units = repeated_blocks(model)
        else:
            found = select_modules(
                "strategy.units", self.units, [n for n, _ in model.named_modules()]
            )
            outer = [name for name in found if name.rpartition(".")[0] not in found]
            units = [model.get_submodule(name) for name in sorted(outer) if name]
        return [*_odd(model), *units]

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        if self._model is not None:
            self._model.set_requires_gradient_sync(last)
        yield

    def local_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.to_local() if is_sharded(t) else t for t in tensors]

    def reduce_found_inf(self, flag: Tensor | None) -> Tensor | None:
        if flag is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        found = {}
        for name, value in super().full_state_dict(model).items():
            full = value.full_tensor() if is_sharded(value) else value
            if self.place.is_main:
                found[name] = full.detach().cpu().contiguous()
        return found

    def reduce_norms(self, norms: Tensor) -> Tensor:
        return self.sum(norms.double().square()).sqrt()


def _reduction(model: nn.Module) -> torch.dtype | None:
    """float32 for gradients that are narrower."""
    narrow = any(p.is_floating_point() and p.itemsize < 4 for p in model.parameters())
    return torch.float32 if narrow else None


def _odd(model: nn.Module) -> list[nn.Module]:
    """Modules with weights of another dtype than most of them: a unit has one."""
    dtypes = Counter(p.dtype for p in model.parameters())
    usual = dtypes.most_common(1)[0][0]
    return [
        m for m in model.modules() if any(p.dtype != usual for p in m.parameters(recurse=False))
    ]
