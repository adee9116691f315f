"""Linear layers whose weight is packed in a number format, or rounded to it in every forward.

Each layer is a torch.nn.Linear or a Conv1D whose class was changed in place. Training rounds a
float32 weight to the values that its packed form stands for ("fake quantisation"); an evaluation
packs it. The int4 and int8 arithmetic is torchao's: quantize_ packs, and torchao.quantization.qat
rounds. That of NVFP4 is runner.precision.emulation.formats, because torchao's NVFP4 layers need
Blackwell's products.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from runner.core import ConfigError, tensor_facts, terminal
from runner.precision.casting import autocast_input
from runner.precision.conversion import change_class
from runner.precision.emulation.formats import Nvfp4Quantizer
from runner.precision.layers.conv1d import is_transposed, weight_matrix
from runner.precision.layers.experts import stack_packed_experts

FORMAT_NAMES = ("int4", "int8", "nvfp4")
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
_NVFP4_BLOCK = 16  # weights that share a scale
# The magnitudes of E2M1 by the lower three bits of their code; the fourth bit is the sign.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Rounding = Callable[[Tensor], Tensor]
PackedTensors = Mapping[str, Tensor]
"""A packed weight: its codes under `weight`, its scales under further names."""


class Packing(ABC):
    """A way to store the weight of a linear layer as codes and scales."""

    @abstractmethod
    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a weight, float32 [out, in], as codes under `weight` and scales by their names."""

    @abstractmethod
    def unpack(self, packed: PackedTensors) -> Tensor:
        """Return the weight that codes and scales stand for: float32 [out, in]."""


class WeightFormat(Packing):
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
    _weight_rounding: Any
    _input_rounding: Any

    def load_library(self) -> None:
        """Import the library that rounds; called when a layer is converted, before any forward."""

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return unpack(pack(weight)) bit by bit, with a gradient: float32 [out, in] to the same.

        The gradient passes straight through, also where a value is clipped.
        """
        return _straight_through(weight, self._weight_rounding)

    def round_input(self, rows: Tensor) -> Tensor:
        """Return the inputs as the product sees them, with a gradient that passes straight through.

        Args:
            rows: float [..., in].
        """
        # The library fails on no rows at all.
        if not self.rounds_inputs or not rows.numel():
            return rows
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
        self._weight_rounding = _fake_quantizer(_INT4, _import_torchao().PerGroup(self.multiple))

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
        # Weights with a scale per output, inputs with one per row, asymmetric.
        per_output = _import_torchao().PerAxis(0)
        # torchao's least scale of int8 tensors; its fake quantisers have that of int4 by default.
        least = {"eps": torch.finfo(torch.float32).eps}
        self._weight_rounding = _fake_quantizer(torch.int8, per_output, **least)
        self._input_rounding = _fake_quantizer(torch.int8, "per_token", is_symmetric=False, **least)

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
            # They are stored as bits: a cast of the model's floating tensors would change them.
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


class AutocastLinear(nn.Linear):
    """Base of linear layers that multiply rows in the dtype that autocast gives them."""

    @abstractmethod
    def _product(self, rows: Tensor) -> Tensor:
        """Return the product with the weight: float [..., in] to the same dtype [..., out]."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype, or autocast's, [..., out]."""
        rows = autocast_input(input)
        with torch.autocast(input.device.type, enabled=False):
            output = self._product(rows)
            return output if self.bias is None else output + self.bias.to(output.dtype)


class FakeQuantizedLinear(AutocastLinear):
    """A linear layer that rounds its plain weight to a format in every forward.

    Its parameters stay the same objects; gradients pass the rounding straight through.
    """

    format: WeightFormat

    def _product(self, rows: Tensor) -> Tensor:
        weight = self.format.round_weight(weight_matrix(self).float())
        return F.linear(self.format.round_input(rows), weight.to(rows.dtype))


class PackedWeight(Tensor):
    """What a packed layer shows as its weight: shape and device of the weight that its codes stand
    for, as float32, and no numbers.

    Raises:
        ConfigError: anything computes with it. Codes that are taken for numbers give a wrong result
            without an error.
    """

    layer: Any
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, layer: Any) -> "PackedWeight":
        shape = (layer.out_features, layer.in_features)
        shown = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            shape[::-1] if is_transposed(layer) else shape,
            # Also of a weight in half precision: peft makes its additions in this dtype.
            dtype=torch.float32,
            device=layer._parameters["weight"].device,
        )
        shown.layer = layer
        # What isinstance(..., nn.Parameter) asks for.
        shown._is_param = True
        return shown

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        layer = next(leaf.layer for leaf in leaves if isinstance(leaf, cls))
        name = getattr(layer, "converted_name", type(layer).__name__)
        raise ConfigError(
            f"The weight of {name} is packed into codes, and code outside of the layer's forward "
            f"computes with it. Call the layer, read its unpacked_weight(), or type "
            f"precision.ignore_modules=[{name}], which leaves the layer as it is."
        )


class PackedWeightOwner(nn.Module):
    """Mixin of layers whose weight is packed: only their own code reads the codes."""

    @property
    def codes(self) -> nn.Parameter:
        """Return the packed weight."""
        return self._parameters["weight"]  # type: ignore[return-value]

    @property
    def weight(self) -> Any:
        """Return the shape and device of the weight, without numbers."""
        # FSDP compares the shards that it finds here.
        return self.codes if tensor_facts.is_sharded(self.codes) else PackedWeight(self)


class PackedLinear(PackedWeightOwner, nn.Linear):  # type: ignore[misc]
    """Base of linear layers with a frozen weight of codes, and scales in buffers.

    The bias keeps its dtype and trains if it did before the conversion.
    """

    format: Packing
    scale_names: tuple[str, ...]

    @classmethod
    def convert_in_place(cls, module: Any, **attributes: Any) -> None:
        """Turn a linear layer into one of this class, in place, and pack its weight.

        Args:
            module: nn.Linear or Conv1D.
            attributes: those that the class annotates.
        """
        matrix = weight_matrix(module).detach().float().contiguous()
        change_class(module, cls, **attributes)
        packed = module.format.pack(matrix)
        module.weight = nn.Parameter(packed.pop("weight"), requires_grad=False)
        for name, scale in packed.items():
            module.register_buffer(name, scale)
        module.scale_names = tuple(packed)

    def packed(self) -> dict[str, Tensor]:
        """Return the codes and the scales."""
        scales = {name: getattr(self, name) for name in self.scale_names}
        return {"weight": self.codes.data, **scales}

    def unpacked_weight(self) -> Tensor:
        """Return the weight that the codes stand for: float32 [out, in], a Conv1D's [in, out]."""
        weight = self.format.unpack(self.packed())
        return weight.t() if is_transposed(self) else weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        """Load a packed weight with its scales unchanged; pack a plain weight."""
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.is_floating_point():
            matrix = weight.t() if is_transposed(self) else weight
            state_dict[f"{prefix}weight"] = matrix
            # nn.Module below reports a weight of another shape.
            if matrix.shape == (self.out_features, self.in_features):
                packed = self.format.pack(matrix.to(self.codes.device).float().contiguous())
                state_dict.update({f"{prefix}{name}": part for name, part in packed.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


class QuantizedLinear(PackedLinear, AutocastLinear):  # type: ignore[misc]
    """A linear layer with a weight in a number format."""

    format: WeightFormat  # type: ignore[assignment]

    def _product(self, rows: Tensor) -> Tensor:
        return _PackedProduct.apply(rows, self.format, self.packed())  # type: ignore[return-value]


class _PackedProduct(torch.autograd.Function):
    """The product of rows [..., in] and a packed weight: [..., out], in the rows' dtype.

    The weight is unpacked again for the backward, so that it is not stored unpacked. It is frozen:
    only the rows have a gradient, which passes the rounding of inputs straight through.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, fmt: WeightFormat, packed: PackedTensors) -> Tensor:
        ctx.format = fmt
        ctx.packed = packed
        # No view, which torch would not let a model change in place.
        return fmt.product(rows, packed).data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad @ ctx.format.unpack(ctx.packed).to(grad.dtype), None, None


def packed_entries(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the packed weights of a state dict with QuantizedLinear layers.

    Yields:
        A layer's prefix in the state dict, such as "blocks.0.expand.", and its codes and scales.
    """
    names = ("weight", "weight_scale", "weight_tensor_scale")
    for key in state_dict:
        prefix = key.removesuffix("weight_scale")
        weight = state_dict.get(f"{prefix}weight")
        # A state dict may hold values that are no tensors.
        is_packed = isinstance(weight, Tensor) and not weight.is_floating_point()
        if key.endswith("weight_scale") and is_packed:
            yield prefix, {n: state_dict[prefix + n] for n in names if prefix + n in state_dict}


def unpack_state_dict(
    state_dict: Mapping[str, Any], transposed: Collection[str] = ()
) -> dict[str, Any]:
    """Return a state dict with every packed weight as the float32 weight that it stands for.

    Args:
        state_dict: of a model with QuantizedLinear layers, or with those of bitsandbytes;
            unchanged.
        transposed: dotted names of the layers whose weight is [in, out] when it is not packed.

    Raises:
        ValueError: a packed weight lacks its scales.
    """
    plain = dict(state_dict)
    prefixes = []
    for prefix, packed in packed_entries(state_dict):
        prefixes.append(prefix)
        for name in packed:
            del plain[f"{prefix}{name}"]
        plain[f"{prefix}weight"] = format_of_packed(packed).unpack(packed)
    if not prefixes:
        for key, value in state_dict.items():
            is_weight = key.rpartition(".")[2] == "weight"
            if is_weight and value.dtype in (torch.int8, torch.uint8):
                # Imported here, because bitsandbytes may not be installed.
                from runner.precision.layers.bnb_linear import pop_unpacked

                plain[key] = pop_unpacked(plain, key)
                prefixes.append(key.removesuffix("weight"))
    for prefix in prefixes:
        if prefix.rstrip(".") in transposed:
            plain[f"{prefix}weight"] = plain[f"{prefix}weight"].t().contiguous()
    stack_packed_experts(plain)
    return plain


def packed_label(state_dict: Mapping[str, Any]) -> str:
    """Return how the QuantizedLinear layers of a state dict are packed; empty where it has none."""
    for _, packed in packed_entries(state_dict):
        return format_of_packed(packed).label
    return ""
