"""Linear layers whose weight is packed in a number format, or rounded to it in every forward.

Each layer is a torch.nn.Linear or a Conv1D whose class was changed in place.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from runner.core import ConfigError, tensor_facts
from runner.precision.casting import autocast_input
from runner.precision.conversion import change_class
from runner.precision.layers.conv1d import is_transposed, weight_matrix
from runner.precision.layers.experts import stack_packed_experts
from runner.precision.layers.weight_formats import (
    PackedTensors,
    Packing,
    WeightFormat,
    format_of_packed,
)


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

    format: WeightFormat

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
