"""Record which dtypes each module really stores and computes in, in a step that runs anyway."""

from collections import Counter, defaultdict
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.core import model_call, module_tape, tensor_facts

_HEAVY = (
    *("convolution", "mm", "linear", "scaled_dot_product"),
    *("lstm", "gru", "rnn", "norm", "embedding"),
)
"""Parts of the names of operators whose input dtype is the dtype that a module computes in."""


def kernel_dtypes(kernel: Any, args: tuple[Any, ...]) -> set[str]:
    """Return the names of the dtypes in which a kernel computes.

    Args:
        kernel: an operator, as __torch_dispatch__ gets it.
        args: its positional arguments.

    Returns:
        An empty set for a kernel that is no product, convolution, norm or lookup.
    """
    name = _operator_name(kernel)
    if not any(part in name for part in _HEAVY):
        return set()
    # The first one alone: norms may hold weights and statistics in a wider dtype.
    first = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
    if first is not None:
        # torchao's FP8 tensors say the dtype that they stand for; the kernel gets their codes.
        return _names(next(tensor_facts.inner_tensors(first), first))
    # Other integers are indices, as those of an embedding.
    return {name for name in _names(args) if "complex" in name or name == "int8"}


def _operator_name(kernel: Any) -> str:
    """Return an operator's name without its namespace and overload, as addmm."""
    return kernel._schema.name.split("::")[1].strip("_")


_PRODUCTS = ("mm", "bmm", "int_mm", "grouped_mm", "grouped_mm_fallback", "linear", "mv", "dot")
_PRODUCTS_ADDED = ("addmm", "baddbmm", "addbmm", "addmm_activation", "addmv")
"""Products that are added to their first argument."""


def _product(name: str, args: tuple[Any, ...], out: Any) -> tuple[Tensor, int] | None:
    """Return an operand of a product, and its floating-point operations; None for no product."""
    is_added = name in _PRODUCTS_ADDED
    if is_added or name.removeprefix("scaled_") in _PRODUCTS:
        factor = args[int(is_added)]
        return factor, 2 * factor.numel() * (1 if name in ("mv", "addmv", "dot") else out.shape[-1])
    if name == "convolution":
        image, weight, is_transposed = args[0], args[1], args[6]
        return image, 2 * (image if is_transposed else out).numel() * weight[0].numel()
    if "scaled_dot_product" in name:
        query, key = args[:2]
        return query, 4 * query.numel() * key.shape[-2]
    if name in ("mkldnn_rnn_layer", "cudnn_rnn"):
        weights = args[1] if name == "cudnn_rnn" else args[1:3]
        rows = args[0].numel() // args[0].shape[-1]
        return args[0], 2 * rows * sum(weight.numel() for weight in weights)
    return None


def _names(values: Any) -> set[str]:
    """Return the names of the dtypes of the tensors in a nest."""
    return {tensor_facts.dtype_name(v.dtype) for v in tree_leaves(values) if isinstance(v, Tensor)}


_Seen = dict[str, dict[str, set[str]]]
"""Names of dtypes, by a module's name and by column."""


def _note(seen: _Seen, column: str, name: str, values: Any) -> None:
    seen[name][column] |= _names(values)


class DtypeProbe(TorchDispatchMode):
    """Context around one training step; table() gives a row per module that ran.

    A row holds the module's dotted name and kind and the dtypes of: `stores` (its own parameters),
    `inputs`, `computes` (what its convolutions and products took), `outputs` and `gradients`.
    A model of which torch compiled a part in place shows nothing: hooks would be compiled in.
    Dispatch comes after autocast, so the dtypes of products are those that kernels really get.

    Attributes:
        model: that is watched.
        seen: names of dtypes by module and column.
        work: floating-point operations of the forward's products by module, operator and dtype.
        input_rows: how many vectors each module was given, as tokens of a linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Modules have the names that the conversion's report gives them.
        self.model = model_call.plain_module(model)
        self._tape = module_tape.ModuleTape()
        self.seen: _Seen = defaultdict(lambda: defaultdict(set))
        self.work: Counter[tuple[str, str, str]] = Counter()
        self.input_rows: Counter[str] = Counter()
        # Compiled kernels are not dispatched one by one.
        self._shows_kernels = not hasattr(model, "_orig_mod")

    def __enter__(self) -> "DtypeProbe":
        if any(module._compiled_call_impl for module in self.model.modules()):
            return self
        end = partial(_note, self.seen, "outputs")
        for dotted_name, module in self.model.named_modules():
            name = dotted_name or module_tape.ROOT
            self._tape.watch_calls(name, module, self._note_inputs, end)
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    note = partial(_note, self.seen, "gradients", name)
                    self._tape.watch_gradient(p, lambda p, note=note: note(p.grad))
        if self._shows_kernels:
            super().__enter__()
            self._tape.push(super().__exit__)
        return self

    def __exit__(self, *_: object) -> None:
        self._tape.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._tape.running:
            module = self._tape.running[-1]
            self.seen[module]["computes"] |= kernel_dtypes(func, args)
            name = _operator_name(func)
            product = _product(name, args, out)
            if product is not None:
                # torchao's FP8 tensors hold codes.
                dtype = next(tensor_facts.inner_tensors(product[0]), product[0]).dtype
                self.work[module, name, tensor_facts.dtype_name(dtype)] += product[1]
        return out

    def _note_inputs(self, name: str, values: Any) -> None:
        _note(self.seen, "inputs", name, values)
        first = next((v for v in tree_leaves(values) if isinstance(v, Tensor) and v.ndim), None)
        if first is not None and first.numel():
            self.input_rows[name] += first.numel() // first.shape[-1]

    def table(self) -> list[dict[str, str]]:
        """Return a row for each module that ran, in the model's order."""
        rows = []
        for name, module in self.model.named_modules():
            seen = self.seen.get(name or module_tape.ROOT)
            if not seen or not seen["outputs"]:
                continue
            columns = {"stores": _names(list(module.parameters(recurse=False)))}
            for column in ("inputs", "computes", "outputs", "gradients"):
                columns[column] = seen[column]
            row = {key: " ".join(sorted(value)) for key, value in columns.items()}
            rows.append({"module": name or module_tape.ROOT, "kind": type(module).__name__, **row})
        return rows
