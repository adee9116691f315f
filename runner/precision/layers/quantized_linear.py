"""Linear layers whose weight is packed in a number format, or rounded to it in every forward.

Each layer is a torch.nn.Linear or a Conv1D whose class was changed in place.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.precision.conversion import low_precision_class
from runner.precision.layers.conv1d import is_transposed, layer_widths, weight_matrix
from runner.precision.layers.weight_formats import PackedTensors, WeightFormat, format_of_packed


class FakeQuantizedLinear(nn.Linear):
    """A linear layer that rounds its plain weight to a format in every forward.

    float [..., in] to the same dtype, or autocast's, [..., out]. Its parameters stay the same
    objects; gradients pass the rounding straight through.
    """

    format: WeightFormat

    @classmethod
    def convert_in_place(cls, module: Any, fmt: WeightFormat) -> None:
        """Turn a linear layer (nn.Linear or Conv1D) into a FakeQuantizedLinear, in place."""
        fmt.load_library()
        module.in_features, module.out_features = layer_widths(module)
        module.__class__ = low_precision_class(cls, type(module))
        module.format = fmt

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype, or autocast's, [..., out]."""
        rows = _autocast_input(input)
        with torch.autocast(input.device.type, enabled=False):
            weight = self.format.round_weight(weight_matrix(self).float())
            output = F.linear(self.format.round_input(rows), weight.to(rows.dtype))
            return _add_bias(output, self.bias)

    def packed(self) -> dict[str, Tensor]:
        """Return the weight as its format packs it: codes and scales."""
        return self.format.pack(weight_matrix(self).detach().float().contiguous())


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen, packed weight: float [..., in] to the same dtype [..., out].

    Codes are in `weight`, scales in buffers whose names begin with `weight_`. The bias keeps its
    dtype and trains if it did before the conversion.
    """

    format: WeightFormat
    scale_names: tuple[str, ...]

    @classmethod
    def convert_in_place(cls, module: Any, fmt: WeightFormat) -> None:
        """Turn a linear layer (nn.Linear or Conv1D) into a QuantizedLinear, in place."""
        packed = fmt.pack(weight_matrix(module).detach().float().contiguous())
        module.in_features, module.out_features = layer_widths(module)
        module.__class__ = low_precision_class(cls, type(module))
        module.weight = nn.Parameter(packed.pop("weight"), requires_grad=False)
        for name, scale in packed.items():
            module.register_buffer(name, scale)
        module.scale_names = tuple(packed)
        module.format = fmt

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs: float [..., in] to the same dtype, or autocast's, [..., out]."""
        rows = _autocast_input(input)
        with torch.autocast(input.device.type, enabled=False):
            output = _PackedProduct.apply(rows, self.format, self.packed())
            return _add_bias(output, self.bias)  # type: ignore[arg-type]

    def packed(self) -> dict[str, Tensor]:
        """Return the codes and the scales."""
        scales = {name: getattr(self, name) for name in self.scale_names}
        return {"weight": self.weight.data, **scales}

    def unpacked_weight(self) -> Tensor:
        """Return the weight that the codes stand for: float32 [out, in], a Conv1D's [in, out]."""
        weight = self.format.unpack(self.packed())
        return weight.t() if is_transposed(self) else weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        """Load a packed weight with its scales unchanged; pack a plain weight."""
        key = f"{prefix}weight"
        weight = state_dict.get(key)
        if weight is not None and weight.is_floating_point():
            matrix = weight.t() if is_transposed(self) else weight
            # nn.Module below reports a weight of another shape.
            if matrix.shape == (self.out_features, self.in_features):
                matrix = matrix.to(self.weight.device).float().contiguous()
                packed = self.format.pack(matrix)
                state_dict.update({f"{prefix}{name}": part for name, part in packed.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


class _PackedProduct(torch.autograd.Function):
    """The product of rows [..., in] and a packed weight: [..., out], in the rows' dtype.

    The weight is unpacked again for the backward, so that it is not stored unpacked. It is frozen:
    only the rows have a gradient, which passes the rounding of inputs straight through.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, fmt: WeightFormat, packed: PackedTensors) -> Tensor:
        ctx.format = fmt
        ctx.packed = packed
        return fmt.product(rows, packed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad @ ctx.format.unpack(ctx.packed).to(grad.dtype), None, None


def _autocast_input(input: Tensor) -> Tensor:
    """Return a layer's input in the dtype that autocast gives products."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        return input.to(torch.get_autocast_dtype(kind))
    return input


def _add_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    return output if bias is None else output + bias.to(output.dtype)


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
            entries = {name: state_dict.get(f"{prefix}{name}") for name in names}
            yield prefix, {name: value for name, value in entries.items() if value is not None}


def unpacked_entries(
    state_dict: Mapping[str, Any], transposed: Collection[str] = ()
) -> dict[str, Any]:
    """Return a state dict with every packed weight as the float32 weight that it stands for.

    Args:
        state_dict: of a model with QuantizedLinear layers; unchanged.
        transposed: dotted names of the layers whose weight is [in, out] when it is not packed.
    """
    plain = dict(state_dict)
    for prefix, packed in packed_entries(state_dict):
        weight = format_of_packed(packed).unpack(packed)
        for name in packed:
            del plain[f"{prefix}{name}"]
        is_conv1d = prefix.rstrip(".") in transposed
        plain[f"{prefix}weight"] = weight.t().contiguous() if is_conv1d else weight
    return plain


def packed_label(state_dict: Mapping[str, Any]) -> str:
    """Return how the QuantizedLinear layers of a state dict are packed; empty where it has none."""
    for _, packed in packed_entries(state_dict):
        return format_of_packed(packed).label
    return ""
