"""What one training step computes and moves, operator by operator, from tensors without values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from runner.core import module_tape, tensor_facts
from runner.diagnostics.memory.memory_tracker import CUDA_BLOCK, MemoryTracker
from runner.diagnostics.module_tensors import tensors_in

PRODUCT, ATTENTION, POINTWISE, OTHER = "product", "attention", "pointwise", "other"
"""Kinds of operators: matrix products and convolutions; fused attention; what a compiler fuses; the
rest."""
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""Phases of a step."""
_LOOKUPS = ("embedding", "index", "index_select", "gather", "_unsafe_index")
_FREE = ("_unsafe_view", "empty", "new_empty", "detach")
# Of names of operators that compute nothing.
# Sums over rows that a compiler fuses with what is around them.
_FUSED = (
    *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "mean", "sum", "cat"),
    *("_fused_rms_norm_backward", "_softmax", "_log_softmax", "_softmax_backward_data", "_to_copy"),
    *("_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "copy_", "clone"),
)


@dataclass(frozen=True)
class Operator:
    """One operator of a step.

    Attributes:
        kind: PRODUCT, ATTENTION, POINTWISE or OTHER.
        phase: FORWARD, BACKWARD or UPDATE.
        dtype: of its floating operands, as float32 or float8_e4m3fn.
        flops: additions and multiplications; of causal attention the half that is needed.
        reads, writes: bytes by the tensor that they are of, a number that no two tensors share.
        shape: rows, contracted width and outputs of a product; empty for others.
        module: the watched one whose forward it is in; empty outside of them.
        weight: elements of a product's second operand; 0 outside of watched modules.
        is_3x3: whether it is a convolution of 3 x 3 pixels and stride 1.
    """

    kind: str
    phase: str
    dtype: str
    flops: float
    reads: Mapping[int, float]
    writes: Mapping[int, float]
    shape: tuple[int, ...] = ()
    module: str = ""
    weight: int = 0
    is_3x3: bool = False

    @property
    def bytes(self) -> float:
        """Return what the operator reads and writes where it runs alone."""
        return sum(self.reads.values()) + sum(self.writes.values())


class StepTracker(MemoryTracker):
    """Tracks what a step holds, as on a GPU, and notes each of its operators.

    Args:
        running: names of the watched modules whose forward runs, the innermost last.
        options: of MemoryTracker.

    Attributes:
        operators: in their order.
    """

    block = CUDA_BLOCK

    def __init__(self, running: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self._running = running
        self.operators: list[Operator] = []
        self._numbers: dict[int, int] = {}
        self._count = 0
        self._is_step = True

    def end_step(self) -> None:
        self._is_step = False

    def workspace(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Return 0: the kernels of this machine's CPU are not those of the card."""
        return 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        is_free = func.namespace == "prim" or func.is_view or name.startswith(_FREE)
        if self._is_step and not is_free:
            self._note(name, func, args, kwargs or {}, result)
        return result

    def _note(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        # The address of a storage that was freed is used again.
        before = {t.untyped_storage()._cdata for t in inputs}
        for key in {t.untyped_storage()._cdata for t in outputs} - before:
            self._numbers.pop(key, None)
        pairs = [*zip(func._schema.arguments, args, strict=False)]
        named = {argument.name: value for argument, value in pairs} | {**kwargs}
        written = [v for one, v in pairs if one.alias_info is not None and one.alias_info.is_write]
        writes = self._bytes([*outputs, *tensors_in(written)])
        reads = writes if name in _LOOKUPS else self._bytes(inputs)
        floating = [t for t in inputs if t.is_floating_point() or t.is_complex()] or outputs
        if not floating:
            return
        kind, flops = _count_flops(func, named, args, kwargs, result)
        if not kind:
            fuses = torch.Tag.pointwise in func.tags or name in _FUSED
            kind = POINTWISE if fuses else OTHER
        phase = UPDATE if self.updates else FORWARD
        if module_tape.is_in_backward():
            phase = BACKWARD
        dtype = tensor_facts.dtype_name(max(floating, key=Tensor.numel).dtype)
        shape: tuple[int, ...] = ()
        weight = 0
        module = self._running[-1] if self._running else ""
        if kind == PRODUCT and module:
            weight = [t for t in inputs if t.ndim > 1][-1].numel()
            width = outputs[0].shape[-1]
            rows = outputs[0].numel() // width
            shape = (rows, int(flops / (2 * rows * width)), width)
        is_3x3 = (
            name.startswith("convolution")
            and [*named["weight"].shape[2:]] == [3, 3]
            and {*named["stride"]} == {1}
        )
        operator = Operator(kind, phase, dtype, flops, reads, writes, shape, module, weight, is_3x3)
        self.operators.append(operator)

    def _bytes(self, tensors: Sequence[Tensor]) -> dict[int, float]:
        """Return the bytes of each storage that an operator touches, by the storage's number."""
        found: dict[int, float] = {}
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._numbers:
                self._count += 1
                self._numbers[key] = self._count
            number = self._numbers[key]
            found[number] = max(found.get(number, 0), tensor.numel() * tensor.element_size())
        return found


def _count_flops(
    func: Any, named: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> tuple[str, float]:
    """Return the kind of an operator that multiplies matrices, and its operations; "" and 0 for
    others."""
    name = func.name()
    if "dot_product" in name:
        # torch counts full attention, and not the kernel of CPUs.
        flops = sdpa_flop_count(*(named[key].shape for key in ("query", "key", "value")))
        passes = 2.5 if "backward" in name else 1
        mask: Any = named.get("attn_mask")
        # A padding mask is the same for all queries; a learned bias differs between heads.
        is_causal = bool(named.get("is_causal"))
        if mask is not None and mask.stride(-2) != 0:
            is_causal = mask.shape[:-2].numel() <= len(mask)
        return ATTENTION, flops * passes / (2 if is_causal else 1)
    if "_grouped_mm" in name:
        left, right = args[:2]
        # Of [T, K] and [E, K, N], or of [M, T] and [T, N] that are summed by groups of T.
        return PRODUCT, 2 * left.numel() * right.shape[-1]
    counter = flop_registry.get(func.overloadpacket)
    if not counter:
        return "", 0
    # A product of complex numbers is four of real ones.
    factor = 4 if any(t.is_complex() for t in tensors_in(args)) else 1
    return PRODUCT, factor * counter(*args, **kwargs, out_val=result)


def moved_bytes(operators: Sequence[Operator], is_fused: bool) -> float:
    """Return the bytes that operators other than products and attention read and write.

    Args:
        operators: of a step, in their order.
        is_fused: whether a compiler fuses pointwise operators of a phase: then what one writes and
            only others of them read is never in memory.
    """
    makers: dict[int, tuple[str, str]] = {}
    readers: dict[int, set[tuple[str, str]]] = {}
    for one in operators:
        group = one.kind, one.phase
        for number in one.reads:
            readers.setdefault(number, set()).add(group)
        makers |= dict.fromkeys(one.writes.keys() - one.reads.keys(), group)
    total = 0.0
    for one in operators:
        group = one.kind, one.phase
        if one.kind in (PRODUCT, ATTENTION):
            continue
        if not is_fused or one.kind != POINTWISE:
            total += one.bytes
            continue
        total += sum(size for key, size in one.reads.items() if makers.get(key) != group)
        for key, size in one.writes.items():
            if key in one.reads or readers.get(key, set()) - {group}:
                total += size
    return total


class Product(NamedTuple):
    """A matrix product or convolution.

    Attributes:
        dtype: of its operands.
        flops, bytes: see Operator.
        shape: rows, contracted width and outputs, of the forward of a watched module; empty for
            others.
        is_recomputation: whether that forward is computed again, in the backward.
        gradients: how many products the backward makes of it: of the input, of the weight.
        weight: elements of the weight, of all experts of a stack.
        is_3x3: whether it is a convolution of 3 x 3 pixels and stride 1.
    """

    dtype: str
    flops: float
    bytes: float
    shape: tuple[int, ...] = ()
    is_recomputation: bool = False
    gradients: int = 2
    weight: int = 0
    is_3x3: bool = False


@dataclass(frozen=True)
class StepCost:
    """What a step computes and moves.

    Attributes:
        products: with how many of each there are.
        attention: operations by dtype.
        traffic: bytes that other operators read and write, alone and fused by a compiler.
        update: bytes of the optimizer's.
        update_flops: operations of its products, by dtype.
        operators: how many there are.
    """

    products: Mapping[Product, int]
    attention: Mapping[str, float]
    traffic: tuple[float, float]
    update: float
    update_flops: Mapping[str, float]
    operators: int

    @classmethod
    def of_operators(
        cls, operators: Sequence[Operator], gradients: Mapping[str, int] = MappingProxyType({})
    ) -> Self:
        """Return the cost of the operators of a step.

        Args:
            operators: in their order.
            gradients: of watched modules, see Product.
        """
        products: Counter[Product] = Counter()
        attention: Counter[str] = Counter()
        update_flops: Counter[str] = Counter()
        for one in operators:
            if one.kind == ATTENTION:
                attention[one.dtype] += one.flops  # type: ignore[assignment]
            elif one.kind == PRODUCT and one.phase == UPDATE:
                update_flops[one.dtype] += one.flops  # type: ignore[assignment]
            elif one.kind == PRODUCT:
                is_recomputation = bool(one.shape) and one.phase == BACKWARD
                size = one.flops, one.bytes, one.shape
                count = gradients.get(one.module, 2)
                product = Product(one.dtype, *size, is_recomputation, count, one.weight, one.is_3x3)
                products[product] += 1
        others = [one for one in operators if one.phase != UPDATE]
        updates = [one for one in operators if one.phase == UPDATE]
        traffic = moved_bytes(others, False), moved_bytes(others, True)
        update = sum(one.bytes for one in updates)
        return cls(products, attention, traffic, update, update_flops, len(operators))

    @property
    def flops(self) -> float:
        """Return the operations of products and attention."""
        products = sum(count * one.flops for one, count in self.products.items())
        return products + sum(self.attention.values())
