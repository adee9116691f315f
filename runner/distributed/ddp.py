"""strategy=ddp: every process has the whole model; gradients are averaged.

Source: Li et al., PyTorch Distributed, arXiv:2006.15704.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.process_group import ProcessGroupStrategy

_NOTHING = nullcontext()


@final
class DDP(ProcessGroupStrategy):
    """torch's DistributedDataParallel. Gradients of half precision are added in float32.

    Args:
        bucket_cap_mb: MiB of gradients that are reduced together.
        find_unused_parameters: for models of which a step leaves parameters out.
        static_graph: for models whose every step uses the same parameters in the same way.
        timeout: seconds after which a process that waits for another one gives up.
    """

    name = "ddp"

    def __init__(
        self,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__(timeout)
        self.bucket_cap_mb = bucket_cap_mb
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self._model: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._model = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
        )
        self._model.register_comm_hook(None, float32_mean_hook)
        return self._model

    def accumulating(self, last: bool) -> AbstractContextManager[object]:
        if last or self._model is None:
            return _NOTHING
        return self._model.no_sync()


def float32_mean_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the processes.

    Gradients are added in float32 or their own wider dtype, and rounded to their dtype once.
    """
    grads = bucket.buffer()
    # Sums in half precision would lose more bits with every process.
    wide = grads.float() if grads.itemsize < 4 else grads
    wide.div_(dist.get_world_size())
    work = dist.all_reduce(wide, async_op=True)
    assert work is not None

    def round_into_bucket(_: object) -> Tensor:
        return grads.copy_(wide) if wide is not grads else grads

    return work.get_future().then(round_into_bucket)
