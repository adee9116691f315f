"""Show a stacked weight to a model's forward, and have experts' layers compute its products.

Each way to multiply with experts has a rule, which torch calls in place of its function.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from runner.core import ConfigError

Groups = Sequence[tuple[int, Tensor]]
"""Experts and the rows, [..., contracted], that each multiplies."""


class ExpertWeight(Tensor):
    """What converted experts show as a stacked weight, or as some of its matrices.

    It has the weight's shape, dtype and device, and no numbers: its products are computed by the
    experts' layers.

    Attributes:
        module: layers.experts.Experts, which holds the experts.
        stack: name of the stacked weight.
        experts: an expert, a tensor of experts (int [n]), or None for all.
        is_transposed: whether the last two dimensions are exchanged.
    """

    module: Any
    stack: str
    experts: int | Tensor | None
    is_transposed: bool

    def __new__(
        cls,
        module: Any,
        stack: str,
        experts: int | Tensor | None = None,
        is_transposed: bool = False,
    ) -> "ExpertWeight":
        count, *matrix = module.shapes[stack]
        leading = [count] if experts is None else []
        if isinstance(experts, Tensor):
            leading = [len(experts)]
        plain = module._parameters.get(stack)
        like = plain if plain is not None else next(module.layers_of(stack).parameters())
        shown = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*leading, *(matrix[::-1] if is_transposed else matrix)),
            dtype=torch.float32 if plain is None else plain.dtype,
            device=like.device,
            requires_grad=plain is not None and plain.requires_grad,
        )
        shown.module, shown.stack = module, stack
        shown.experts, shown.is_transposed = experts, is_transposed
        with torch._C.DisableTorchFunctionSubclass():
            if shown.requires_grad:
                shown.register_hook(partial(_refuse_gradient, stack))
        return shown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and _takes(rule, kwargs):
            result = rule(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "a function")
        args, kwargs = tree_map(partial(_numbers, function=name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Below autograd there are no numbers to ask for.
        name = func.overloadpacket.__name__
        args, kwargs = tree_map(partial(_numbers, function=name), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ExpertWeight({self.stack}, shape={list(self.shape)})"

    def transposed_view(self) -> "ExpertWeight":
        """Return the weight with its last two dimensions exchanged."""
        return ExpertWeight(self.module, self.stack, self.experts, not self.is_transposed)

    def products(self, groups: Groups, contracts_last: bool) -> list[Tensor]:
        """Return the products of rows with experts, see Experts.products; contracts_last is as this
        weight shows its dimensions."""
        return self.module.products(self.stack, groups, contracts_last is not self.is_transposed)


def _refuse_gradient(stack: str, gradient: Tensor) -> None:
    """Raise ConfigError where a gradient arrives at an ExpertWeight, past the weight itself."""
    raise ConfigError(
        f"A torch.autograd.Function of the model takes {stack}, and the gradient that its backward "
        "returns would be lost, for the products of experts are computed by layers. Type "
        "precision.ignore_modules=[<the module that holds it>]."
    )


def _numbers(leaf: Any, function: str) -> Any:
    """Return the numbers of an ExpertWeight that a function, by its name, computes with."""
    if not isinstance(leaf, ExpertWeight):
        return leaf
    weight = leaf.module.numbers(leaf.stack, function)
    if leaf.module.watch is not None:
        leaf.module.watch.other_uses.setdefault(leaf.stack, function)
    weight = weight if leaf.experts is None else weight[leaf.experts]
    return weight.mT if leaf.is_transposed else weight


# Rules of functions: each returns the function's result, or NotImplemented where it has none.


def _takes(rule: Callable[..., Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether a rule has all of these keywords, as it may lack `out`."""
    parameters = signature(rule).parameters if keywords else {}
    return keywords.keys() <= parameters.keys()


def _multiply(rows: Tensor, weight: ExpertWeight, contracts_last: bool) -> Any:
    """Return the product of rows [..., n, contracted] with a matrix, or with one for each element
    of the dimension before n: [..., n, out]."""
    if isinstance(weight.experts, int):
        return weight.products([(weight.experts, rows)], contracts_last)[0]
    count = weight.shape[0]
    batches = rows.unsqueeze(-3) if rows.ndim == 2 else rows
    batches = batches.movedim(-3, 0)
    if len(batches) not in (1, count):
        return NotImplemented
    batches = batches.expand(count, *batches.shape[1:])
    if not count:
        return weight.products([(0, batches)], contracts_last)[0].movedim(0, -3)
    if weight.experts is None:
        outputs = weight.products([*enumerate(batches)], contracts_last)
        return torch.stack(outputs).movedim(0, -3)
    # Rows of one expert together.
    order = weight.experts.argsort(stable=True)
    experts, counts = weight.experts.unique(return_counts=True)
    parts = batches[order].split(counts.tolist())
    outputs = weight.products([*zip(experts.tolist(), parts, strict=True)], contracts_last)
    return torch.cat(outputs)[order.argsort()].movedim(0, -3)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, ExpertWeight) or weight.ndim != 2 or isinstance(input, ExpertWeight):
        return NotImplemented
    output = _multiply(input, weight, contracts_last=True)
    return output if bias is None else output + bias.to(output.dtype)


def _matmul(input: Tensor, other: Tensor) -> Any:
    if isinstance(input, ExpertWeight):
        if isinstance(other, ExpertWeight):
            return NotImplemented
        if other.ndim == 1:
            return _multiply(other, input, True) if input.ndim == 2 else NotImplemented
        output = _multiply(other.mT, input, contracts_last=True)
        return output if output is NotImplemented else output.mT
    is_vector = input.ndim == 1 and other.ndim > 2
    return NotImplemented if is_vector else _multiply(input, other, contracts_last=False)  # type: ignore[arg-type]


def _addmm(input: Tensor, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    is_known = beta == alpha == 1 and not isinstance(input, ExpertWeight)
    output = _matmul(mat1, mat2) if is_known else NotImplemented
    return output if output is NotImplemented else input.to(output.dtype) + output


def _grouped_mm(
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    if not isinstance(mat2, ExpertWeight) or isinstance(input, ExpertWeight):
        return NotImplemented
    if mat2.experts is not None or bias is not None:
        return NotImplemented
    if offs is None:
        output = _multiply(input, mat2, contracts_last=False)
    else:
        ends = offs.tolist()
        starts = [0, *ends[:-1]]
        groups = [
            (e, input[a:b]) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a
        ]
        outputs = mat2.products(groups or [(0, input[:0])], contracts_last=False)
        rest = outputs[0].new_zeros(len(input) - ends[-1], mat2.shape[-1])
        output = torch.cat([*outputs, rest])
    return output if out_dtype is None else output.to(out_dtype)


def _einsum(equation: Any, *operands: Any) -> Any:
    """Return a product by einsum of one tensor and all experts, as in "eci,eio->eco", or one."""
    is_text = isinstance(equation, str)
    if not is_text or len(operands) != 2 or "->" not in equation or "." in equation:
        return NotImplemented
    inputs, result = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if isinstance(operands[0], ExpertWeight):
        terms, operands = terms[::-1], operands[::-1]
    rows, weight = operands
    if isinstance(rows, ExpertWeight) or (weight.experts is not None and weight.ndim > 2):
        return NotImplemented
    of_rows, of_weight = terms
    expert, matrix = of_weight[:-2], of_weight[-2:]
    summed = "".join({*matrix} - {*result})
    kept = matrix.replace(summed, "")
    others = [label for label in of_rows if label not in expert + summed]
    if len(summed) != 1 or summed not in of_rows or expert not in result:
        return NotImplemented
    if {*others, *expert, kept} != {*result} or kept in of_rows:
        return NotImplemented
    contracts_last = matrix[1] == summed
    batch = [expert] if expert and expert in of_rows else []
    ordered = rows.permute([of_rows.index(label) for label in (*batch, *others, *summed)])
    flat = ordered.reshape(*ordered.shape[: len(batch)], -1, ordered.shape[-1])
    output = _multiply(flat, weight, contracts_last)
    sizes = ordered.shape[len(batch) : -1]
    labels = (*expert, *others, kept)
    output = output.reshape(*weight.shape[:-2], *sizes, output.shape[-1])
    return output.permute([labels.index(label) for label in result])


def _getitem(weight: Any, index: Any) -> Any:
    """Return one expert, or those that a tensor of one dimension names."""
    if not isinstance(weight, ExpertWeight) or weight.experts is not None:
        return NotImplemented
    if isinstance(index, tuple):
        rest = index[1:]
        if all(isinstance(part, slice) and part == slice(None) for part in rest):
            index = index[0]  # as w[expert, :, :]
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
        if index.ndim == 1:
            return ExpertWeight(weight.module, weight.stack, index, weight.is_transposed)
        index = int(index) if index.ndim == 0 else index
    if isinstance(index, int) and not isinstance(index, bool):
        expert = range(len(weight))[index]
        return ExpertWeight(weight.module, weight.stack, expert, weight.is_transposed)
    return NotImplemented


def _unbind(weight: Any, dim: int = 0) -> Any:
    is_all = weight.experts is None and dim == 0
    return tuple(weight[e] for e in range(len(weight))) if is_all else NotImplemented


def _transpose(weight: Any, dim0: int, dim1: int) -> Any:
    """Return a weight with its last two dimensions exchanged; other exchanges are not known."""
    count = weight.ndim
    is_known = {dim0 % count, dim1 % count} == {count - 2, count - 1}
    return weight.transposed_view() if is_known else NotImplemented


def _permute(weight: Any, *dims: Any) -> Any:
    order = [d % weight.ndim for d in tree_leaves(dims)]
    exchanged = [*range(weight.ndim - 2), weight.ndim - 1, weight.ndim - 2]
    return weight.transposed_view() if order == exchanged else NotImplemented


def _flip(weight: Any) -> Any:
    return weight.transposed_view() if weight.ndim == 2 else NotImplemented


def _keep(weight: Any, *target: Any, **keywords: Any) -> Any:
    """Return a weight unchanged: a layer has its own dtype, whatever it is cast to. Another tensor
    gets the dtype and the device of the weight that is its target."""
    if not isinstance(weight, ExpertWeight):
        (like,) = target
        return weight.to(like.device, like.dtype)
    return NotImplemented if "device" in keywords else weight


_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.einsum: _einsum,
    torch._grouped_mm: _grouped_mm,
    getattr(F, "grouped_mm", None): _grouped_mm,
    Tensor.T.__get__: _flip,  # type: ignore[attr-defined]
    Tensor.mT.__get__: ExpertWeight.transposed_view,  # type: ignore[attr-defined]
    Tensor.__rmatmul__: lambda weight, other: _matmul(other, weight),
    # It shares the memory of the stacked weight.
    Tensor._is_view: lambda weight: True,
    Tensor.__iter__: lambda weight: iter(_unbind(weight)),
}
_METHODS = {
    _matmul: "__matmul__ matmul mm bmm mv",
    _addmm: "addmm baddbmm",
    _transpose: "transpose swapaxes swapdims",
    _permute: "permute",
    _flip: "t",
    _getitem: "__getitem__",
    _unbind: "unbind",
    _keep: "to float bfloat16 half double type_as contiguous",
}
for _rule, _names in _METHODS.items():
    for _name in _names.split():
        _RULES[getattr(Tensor, _name)] = _rule
        # Most are functions of torch, too.
        _RULES[getattr(torch, _name, None)] = _rule
_NAMES = "shape dtype device ndim requires_grad is_leaf is_cuda is_sparse layout is_meta grad_fn"
_NAMES += " is_nested itemsize is_cpu"
_QUESTIONS = {
    *(getattr(Tensor, name).__get__ for name in _NAMES.split()),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
    *(Tensor.element_size, Tensor.is_complex, Tensor.get_device, torch.is_floating_point),
    *(Tensor.is_contiguous, Tensor.stride),
}
