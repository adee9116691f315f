"""strategy=ddp: every process has the whole model; gradients are averaged.

Source: Li et al., PyTorch Distributed, arXiv:2006.15704.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.core import tensor_facts
from runner.training.strategies.process_group import ProcessGroupStrategy

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
        self._model = None
        self._narrow: set[Tensor] = set()
        self._sums: dict[Tensor, Tensor] = {}
        self._accumulates = False

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._model = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=True,
        )
        self._narrow = tensor_facts.narrow_parameters(model.parameters())
        self._model.register_comm_hook(self._sums, float32_mean_hook)
        return self._model

    def accumulating(self, last: bool) -> AbstractContextManager[object]:
        if self._model is None or (last and not self._accumulates):
            return _NOTHING
        self._accumulates = True
        if last:
            return self._reducing_sums() if self._narrow else _NOTHING
        return self._model.no_sync()

    @contextmanager
    def _reducing_sums(self) -> Iterator[None]:
        """Return the context around a step's last backward, whose gradients are reduced together
        with what earlier ones have added up in float32: torch reduces the weights' dtype alone."""
        wide = [p for p in self._narrow if p.grad_dtype not in (None, p.dtype)]
        self._sums.update((p, p.grad) for p in wide if p.grad is not None)
        for p in self._sums:
            p.grad = None
        tensor_facts.cast_gradients(wide)
        yield
        tensor_facts.cast_gradients(wide, torch.float32)
        for p, average in self._sums.items():
            p.grad = average
        self._sums.clear()


def float32_mean_hook(
    sums: dict[Tensor, Tensor], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the processes.

    Gradients are added in float32 or their own wider dtype, and rounded to their dtype once.

    Args:
        sums: what earlier micro-batches of the step have added up, by parameter; replaced by the
            average, which is not rounded.
        bucket: gradients of the last micro-batch.
    """
    grads = bucket.buffer()
    # Sums in half precision would lose more bits with every process.
    wide = grads.float() if grads.itemsize < 4 else grads
    if sums:
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = grad.storage_offset() - grads.storage_offset()
            part = wide.as_strided(grad.shape, grad.stride(), start)
            if p in sums:
                sums[p] = part.add_(sums[p])
    wide.div_(dist.get_world_size())
    work = dist.all_reduce(wide, async_op=True)
    assert work is not None

    def round_into_bucket(_: object) -> Tensor:
        return grads.copy_(wide) if wide is not grads else grads

    return work.get_future().then(round_into_bucket)
