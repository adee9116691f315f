"""Number formats of linear layers: pack a weight, and round it as packing does.

Training rounds a float32 weight to the values that its packed form stands for ("fake
quantisation"); an evaluation packs it. The int4 and int8 arithmetic is torchao's: quantize_ packs,
and torchao.quantization.qat rounds. That of NVFP4 is runner.precision.emulation.quantizers, because
torchao's NVFP4 layers need Blackwell's products.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core import terminal
from runner.precision.emulation.formats import E2M1
from runner.precision.emulation.quantizers import Nvfp4Quantizer

FORMAT_NAMES = ("int4", "int8", "nvfp4")
# torchao's least scale of int8 tensors; its fake quantisers have another by default, that of int4.
_LEAST_SCALE = torch.finfo(torch.float32).eps
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
_NVFP4_BLOCK = 16  # weights that share a scale
# The magnitudes of E2M1 by the lower three bits of their code; the fourth bit is the sign.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Rounding = Callable[[Tensor], Tensor]
PackedTensors = Mapping[str, Tensor]
"""A packed weight: its codes under `weight`, its scales under further names."""


class WeightFormat(ABC):
    """A number format of a linear layer's weight, and of its inputs where they are rounded, too.

    Attributes:
        label: name of the packing, which two layers with interchangeable state dicts share.
        multiple: the input widths that it can hold are multiples of it.
        group: what the multiple is, in messages.
        rounds_inputs: whether inputs are rounded, too.
    """

    label: str
    multiple: int = 1
    group: str = ""
    rounds_inputs: bool = False
    # torchao's fake quantisers keep the scales of their last call, which are of no use after it.
    _weight_rounding: Any = None
    _input_rounding: Any = None

    def load_library(self) -> None:
        """Import the library that rounds; called when a layer is converted, before any forward."""

    @abstractmethod
    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a weight, float32 [out, in], as codes and scales."""

    @abstractmethod
    def unpack(self, packed: PackedTensors) -> Tensor:
        """Return the weight that codes and scales stand for: float32 [out, in]."""

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return unpack(pack(weight)) bit by bit, with a gradient: float32 [out, in] to the same.

        The gradient passes straight through, also where a value is clipped.
        """
        self.load_library()
        return _straight_through(weight, self._weight_rounding)

    def round_input(self, rows: Tensor) -> Tensor:
        """Return the inputs as the product sees them, with a gradient that passes straight through.

        Args:
            rows: float [..., in].
        """
        # The library fails on no rows at all.
        if not self.rounds_inputs or not rows.numel():
            return rows
        self.load_library()
        return _straight_through(rows, self._input_rounding)

    def product(self, rows: Tensor, packed: PackedTensors) -> Tensor:
        """Return rows [..., in] times the packed weight, in the rows' dtype: [..., out]."""
        return F.linear(self.round_input(rows), self.unpack(packed).to(rows.dtype))


def weight_format(name: str, group_size: int) -> WeightFormat:
    """Return the format of a name; group_size is int4's."""
    if name == "int4":
        return Int4Format(group_size)
    return Int8Format() if name == "int8" else Nvfp4Format()


def format_of_packed(packed: PackedTensors) -> WeightFormat:
    """Return the format that a packed weight of a state dict has."""
    weight = packed["weight"]
    if weight.dtype is torch.int8:
        return Int8Format()
    if "weight_tensor_scale" in packed:
        return Nvfp4Format()
    return Int4Format(2 * weight.shape[1] // packed["weight_scale"].shape[1])


@final
class Int4Format(WeightFormat):
    """Integers from -8 to 7 with a float32 scale for each group of weights; inputs stay float.

    The scale is the group's largest magnitude / 7.5, so that a largest weight above zero is clipped
    to 7. Two codes are in a byte, the first in its lower bits. Source: torchao's
    IntxWeightOnlyConfig(torch.int4, PerGroup(group_size)), symmetric.
    """

    def __init__(self, group_size: int) -> None:
        self.label = f"int4-{group_size}"
        self.multiple = group_size
        self.group = f"precision.group_size={group_size}"

    def load_library(self) -> None:
        if self._weight_rounding is None:
            torchao = _import_torchao()
            self._weight_rounding = _fake_quantizer(_INT4, torchao.PerGroup(self.multiple))

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        torchao = _import_torchao()
        config = torchao.IntxWeightOnlyConfig(_INT4, torchao.PerGroup(self.multiple))
        quantized = _quantize(weight, config)
        return {"weight": pack_nibbles(quantized.qdata), "weight_scale": quantized.scale}

    def unpack(self, packed: PackedTensors) -> Tensor:
        # The sign is in the fourth bit.
        codes = (unpack_nibbles(packed["weight"]) ^ 8).to(torch.int8) - 8
        groups = codes.float().unflatten(1, (-1, self.multiple))
        return (groups * packed["weight_scale"][..., None]).flatten(1)


@final
class Int8Format(WeightFormat):
    """Integers of 8 bits for weights, with a scale per output, and for inputs, scaled per row.

    Products of the integers are summed in int32 (torch._int_mm). Source: torchao's
    Int8DynamicActivationInt8WeightConfig with asymmetric activations, which are the ones that its
    fake quantisers know.
    """

    label = "int8"
    rounds_inputs = True

    def load_library(self) -> None:
        if self._weight_rounding is None:
            torchao = _import_torchao()
            # Weights with a scale per output, inputs with one per row, asymmetric.
            least = {"eps": _LEAST_SCALE}
            self._weight_rounding = _fake_quantizer(torch.int8, torchao.PerAxis(0), **least)
            self._input_rounding = _fake_quantizer(
                torch.int8, "per_token", is_symmetric=False, **least
            )

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        torchao = _import_torchao()
        # Inductor's settings are the process's, not this model's.
        config = torchao.Int8DynamicActivationInt8WeightConfig(
            act_mapping_type=torchao.MappingType.ASYMMETRIC, set_inductor_config=False
        )
        quantized = _quantize(weight, config)
        return {"weight": quantized.qdata, "weight_scale": quantized.scale}

    def unpack(self, packed: PackedTensors) -> Tensor:
        return packed["weight"].float() * packed["weight_scale"]

    def product(self, rows: Tensor, packed: PackedTensors) -> Tensor:
        codes = packed["weight"]
        if not rows.numel():
            return rows.new_zeros(*rows.shape[:-1], codes.shape[0])
        torchao = _import_torchao()
        from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

        inputs = QuantizeTensorToInt8Kwargs(torchao.PerRow(), torchao.MappingType.ASYMMETRIC)
        weight = torchao.Int8Tensor(
            codes, packed["weight_scale"], [1, codes.shape[1]], rows.dtype, act_quant_kwargs=inputs
        )
        return F.linear(rows, weight)


@final
class Nvfp4Format(WeightFormat):
    """E2M1 for weights and inputs, an E4M3 scale for each 16, one float32 scale for each tensor.

    Products are those of the rounded values in float. Source: arXiv:2509.25149.
    """

    label = "nvfp4"
    rounds_inputs = True
    multiple = _NVFP4_BLOCK
    group = f"NVFP4's blocks of {_NVFP4_BLOCK}"
    _weight_rounding = Nvfp4Quantizer((1, _NVFP4_BLOCK))

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        values, block_scale, tensor_scale = self._weight_rounding.parts(weight)
        table = torch.tensor(_E2M1_VALUES, device=weight.device)
        codes = torch.searchsorted(table, values.abs()) + 8 * values.signbit()
        return {
            "weight": pack_nibbles(codes.to(torch.uint8)),
            # As bits: a model's floating tensors may be cast, which would change their meaning.
            "weight_scale": block_scale.to(torch.float8_e4m3fn).view(torch.uint8),
            "weight_tensor_scale": tensor_scale,
        }

    def unpack(self, packed: PackedTensors) -> Tensor:
        codes = unpack_nibbles(packed["weight"])
        magnitudes = torch.tensor(_E2M1_VALUES, device=codes.device)[(codes & 7).long()]
        values = magnitudes.where(codes < 8, -magnitudes)
        stored = packed["weight_scale"].view(torch.float8_e4m3fn).float()
        scale = stored * packed["weight_tensor_scale"]
        return (values.unflatten(1, (-1, _NVFP4_BLOCK)) * scale[..., None]).flatten(1)

    def _input_rounding(self, rows: Tensor) -> Tensor:
        flat = rows.float().reshape(-1, rows.shape[-1])
        return self._weight_rounding(flat).view(rows.shape).to(rows.dtype)


assert E2M1.largest == _E2M1_VALUES[-1]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return codes two in a byte, the first in the lower bits.

    Args:
        codes: int8 or uint8 [rows, columns], an even number of columns; the lower four bits count.

    Returns:
        uint8 [rows, columns / 2].
    """
    pairs = codes.view(torch.uint8).unflatten(1, (-1, 2)) & 15
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the codes of pack_nibbles: uint8 [rows, columns / 2] to uint8 [rows, columns]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _import_torchao() -> Any:
    """Import torchao.quantization, with fake quantisers as its `qat`, and return it."""
    with terminal.suppress_warnings():
        import torchao.quantization.qat

    return torchao.quantization


def _fake_quantizer(*settings: Any, **more: Any) -> Rounding:
    """Return torchao's fake quantiser of these settings."""
    qat = _import_torchao().qat
    return qat.IntxFakeQuantizer(qat.IntxFakeQuantizeConfig(*settings, **more))


def _quantize(weight: Tensor, config: Any) -> Any:
    """Return torchao's quantised tensor of a weight, float32 [out, in]."""
    out, into = weight.shape
    layer = nn.Linear(into, out, bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous())
    quantization = _import_torchao()
    with terminal.suppress_warnings():  # it imports its kernels when it is first called
        quantization.quantize_(nn.Sequential(layer), config)
    return layer.weight


def _straight_through(values: Tensor, rounding: Rounding) -> Tensor:
    """Return rounded values whose gradient is that of the identity.

    torchao's own gradient is that of torch.clamp, which in torch 2.15 is zero at the bounds too:
    weights that are rounded to the least or the largest code, 1 in 25 of int4, would never train.
    """
    # Rounded outside of the function below: torch.compile allows no side effects in it.
    return _StraightThrough.apply(values, rounding(values.detach()))  # type: ignore[return-value]


class _StraightThrough(torch.autograd.Function):
    """The second argument, with the first one's gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
