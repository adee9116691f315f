"""FSDP's hooks that gather the weights of FP8 layers in FP8, one byte per element.

A layer whose weight has one scale casts the whole weight in every forward. The hooks cast each
process's shard with that scale before the gather, so that the layer gets the same numbers.

They are attributes of the shards, which FSDP looks up (torch, _fully_shard/_fsdp_param.py), and
parameters stay plain tensors. torchao's own hooks (torchao/float8/fsdp_utils.py) are methods of a
tensor subclass, which would be saved, and send shards of different sizes where the number of
processes does not divide a weight's first dimension.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F


def gather_in_float8(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> None:
    """Have FSDP gather the weights of FP8 layers in FP8.

    Args:
        model: sharded by FSDP.
        units: torchao's Float8Linear layers with one scale per weight, those together whose weights
            FSDP gathers together; in the same order in all processes.
    """
    parts = [_Float8Unit(layers) for layers in units if layers]

    def attach(*_: object) -> None:
        for part in parts:
            part.attach()

    # In every forward, before FSDP looks: a move of the model replaces the shards.
    model.register_forward_pre_hook(attach, prepend=True)


class _Float8Unit:
    """FP8 layers whose weights are gathered together.

    FSDP asks for each cast shard at every gather. The first call of a gather all-reduces the
    largest magnitudes of all weights at once, and the other calls take their scales from it.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._scales: dict[int, Tensor] = {}

    def attach(self) -> None:
        """Attach the hooks to the shards, except for weights that are gathered at the moment."""
        for i, layer in enumerate(self._layers):
            # Not to_local, which returns another object than FSDP looks at.
            shard = getattr(layer.weight, "_local_tensor", None)
            if shard is not None:
                shard.fsdp_pre_all_gather = partial(self.cast_shard, i)
                shard.fsdp_post_all_gather = _gathered_weight

    def cast_shard(
        self,
        index: int,
        mesh: DeviceMesh,
        size: torch.Size,
        _stride: tuple[int, ...],
        layer: Any,
        _policy: object,
    ) -> tuple[tuple[Tensor], tuple[Any, ...]]:
        """Return a shard's FP8 codes, [rows, columns] as bytes, and what the gathered weight needs.

        The arguments after the index are FSDP's: size is that of the whole weight.
        """
        from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

        dtype = layer.config.cast_config_weight.target_dtype
        if index not in self._scales:
            self._scales = self._whole_scales(mesh, dtype)
        scale = self._scales.pop(index)
        shard = layer.weight._local_tensor
        codes = hp_tensor_and_scale_to_float8(shard, scale, dtype)._data.view(torch.uint8)
        # All processes must send as many rows, and the last shards may be short or empty.
        rows = -(-size[0] // mesh.size())
        padded = F.pad(codes, (0, 0, 0, rows - len(codes)))
        return (padded,), (scale, dtype, layer.linear_mm_config)

    def _whole_scales(self, mesh: DeviceMesh, dtype: torch.dtype) -> dict[int, Tensor]:
        """Return the scale of each whole weight by its index: float32 scalars."""
        from torchao.float8.float8_utils import amax_to_scale

        amaxes = torch.stack([_amax(layer.weight._local_tensor) for layer in self._layers])
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=mesh.get_group())
        return dict(enumerate(amax_to_scale(amaxes, dtype).unbind()))


def _amax(shard: Tensor) -> Tensor:
    """Return the largest magnitude of a shard, which may be empty: a float32 scalar."""
    if shard.numel() == 0:
        return shard.new_zeros((), dtype=torch.float32)
    return shard.abs().amax().float()


def _gathered_weight(
    outputs: tuple[Tensor],
    metadata: tuple[Any, ...],
    param_dtype: torch.dtype,
    *,
    out: Any = None,
) -> Any:
    """Return the gathered weight as torchao's FP8 tensor, and the tensors whose memory FSDP frees.

    Args:
        outputs: the bytes of all shards; FSDP cuts the padding off.
        metadata: what cast_shard returned beside the codes.
        param_dtype: that the weight shows.
        out: the FP8 tensor of an earlier gather, whose codes FSDP has written already.
    """
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    scale, dtype, products = metadata
    if scale.is_cuda:
        # It was made on FSDP's stream of gathers, and products read it on this one.
        scale.record_stream(torch.cuda.current_stream(scale.device))
    if out is not None:
        out._scale = scale
        return None
    codes = outputs[0].view(dtype)
    weight = Float8TrainingTensor(codes, scale, param_dtype, products, GemmInputRole.WEIGHT)
    return weight, (codes,)
