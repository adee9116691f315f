"""Compute the products of stacked weights, as those of a mixture of experts, one expert at a time.

A mixture holds the matrices of its experts as one parameter of three dimensions: [experts, out, in]
or, transposed, [experts, in, out]. After its conversion each expert is a linear layer of the
precision, and the module's own forward stays: where it reads the parameter it gets an ExpertWeight,
whose products those layers compute. So every kind of linear layer holds experts, too, and blocks,
scales and the padding of rows are those of one expert.

Where the precision packs weights, the layers hold the codes; otherwise the parameter stays one, and
each layer sees its slice of it.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from runner.core import ConfigError, fmt, module_tree, tensor_facts
from runner.precision.layers.expert_weight import ExpertWeight, Groups

# Of the child that holds the layers of a stack: of [experts, out, in], and of a transposed one. No
# model names its own lists so, as it may name one local_experts.
_SUFFIXES = {False: "_as_experts", True: "_as_experts_transposed"}
_PACKED_KEY = re.compile(r"(.+)(_as_experts|_as_experts_transposed)\.(\d+)\.(base_layer\.)?weight")

KERNEL_ROWS = 64
"""Multiple of rows that an expert's products in 16 bits are padded to on a CPU."""

# Methods of Experts.
_METHODS = ("view_of", "layers_of", "products", "numbers")


def is_known_mixture(model: nn.Module) -> bool:
    """Return whether a model has experts of transformers' use_experts_implementation."""
    return any(hasattr(module, "has_gate") for module in model.modules())


def own_stacks(module: nn.Module) -> dict[str, bool]:
    """Return the stacked weights of experts that a module says it has, by name, and whether each is
    transposed: of those that transformers' use_experts_implementation has decorated."""
    if not (hasattr(module, "has_gate") and isinstance(getattr(module, "is_transposed", 0), bool)):
        return {}
    return {
        name: module.is_transposed  # type: ignore[misc]
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.is_floating_point()
    }


def possible_stacks(module: nn.Module) -> dict[str, bool]:
    """Return the parameters of a module that may be stacked weights of experts, by name; whether
    they are, and transposed, its forward shows."""
    if type(module).__module__.startswith("torch.nn.") or clashing_names(module):
        return {}
    return {
        name: False
        for name, parameter in module.named_parameters(recurse=False)
        # A bias of experts may be [experts, 1, out].
        if parameter.ndim == 3 and 1 not in parameter.shape and parameter.is_floating_point()
    }


def clashing_names(module: nn.Module) -> list[str]:
    """Return the names that a module has and Experts would take from it."""
    return [name for name in (*_ATTRIBUTES, *_METHODS) if hasattr(module, name)]


def stack_names(model: nn.Module) -> set[str]:
    """Return the dotted names of the stacked weights that are, or may be, those of experts, also of
    those that were packed."""
    names = set()
    for path, module in model.named_modules():
        stacks = module.transposed if isinstance(module, Experts) else possible_stacks(module)
        names |= {f"{path}.{stack}" if path else stack for stack in stacks}
    return names


def expert_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside one with stacked weights that each of its implementations calls in
    another way: the experts' own layers, and modules without parameters."""
    if isinstance(module, Experts):
        for stack in module.transposed:
            yield from module.layers_of(stack).modules()
    elif not possible_stacks(module):
        return
    for part in module.modules():
        if part is not module and next(part.parameters(), None) is None:
            yield part


def by_expert(name: str, tensor: Tensor, stacks: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the part of each expert in a parameter, or in what is as large, as `name[expert]`; a
    parameter that is not among the stacks whole, under its name."""
    if name not in stacks:
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        yield f"{name}[{expert}]", matrix


def expert_matrices(weight: Tensor, transposed: bool) -> Tensor:
    """Return a stacked weight as [experts, out, in], a view."""
    return weight.mT if transposed else weight


class ExpertLayer(nn.Module):
    """Mixin before the linear layer of one expert whose weight is a slice of the stacked one."""

    # In a tuple, so that the module is not registered as a child of its layer.
    _owner: tuple["Experts", str, int]
    _slice: Tensor | None

    @property
    def weight(self) -> Tensor:
        """Return the expert's matrix, float [out, in]."""
        if self._slice is not None:
            return self._slice
        module, stack, expert = self._owner
        weight: Any = module._parameters[stack]
        return expert_matrices(weight[expert], module.transposed[stack])


class ExpertsWatch:
    """What a module's forward did with its stacked weights.

    Attributes:
        contracted: by a stack's name, which of its dimensions products contracted: whether the
            last one.
        other_uses: functions that used a stack in another way than in products, by its name.
    """

    def __init__(self) -> None:
        self.contracted: dict[str, set[bool]] = {}
        self.other_uses: dict[str, str] = {}

    def transposed(self) -> dict[str, bool]:
        """Return the stacks that are experts, and whether each is transposed."""
        return {
            stack: True not in found
            for stack, found in self.contracted.items()
            if stack not in self.other_uses and len(found) == 1
        }

    def obstacle(self) -> str:
        """Return why the module's experts cannot be converted; empty where they can."""
        if self.other_uses:
            stacks, functions = map(", ".join, (self.other_uses, {*self.other_uses.values()}))
            return f"its forward uses {stacks} in {functions}, which is no product with each expert"
        for stack, found in self.contracted.items():
            if len(found) > 1:
                return f"its forward multiplies both dimensions of {stack}"
        return ""


class Experts(nn.Module):
    """Mixin of modules that hold experts, each of which is a low-precision linear layer.

    Attributes:
        transposed: the names of the stacked weights, and whether each is [experts, in, out].
        shapes: of the stacked weights, by name.
        is_trial: whether there are no layers yet, until a forward has shown what is multiplied with
            the stacks.
        watch: what the forward does with the stacks while it is watched, else None.
        active_experts: while the module's forward runs, names of stacks and numbers of the experts
            that it has multiplied with; else None.
    """

    transposed: dict[str, bool]
    shapes: dict[str, torch.Size]
    is_trial: bool
    watch: "ExpertsWatch | None"
    active_experts: set[tuple[str, int]] | None

    # A loop over experts depends on the data, so that a compiler would break the graph anyway.
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return what the module's own forward returns, with products by the experts' layers."""
        self.active_experts = set()
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
            idle = self._idle_additions() if torch.is_grad_enabled() else []
            if not idle:
                return output
            first, *rest = output if isinstance(output, tuple) else (output,)
            first = _ZeroGradients.apply(first, *idle)
            return (first, *rest) if isinstance(output, tuple) else first
        finally:
            self.active_experts = None

    def _idle_additions(self) -> list[nn.Parameter]:
        """Return the trainable parameters of adapters on experts that no token has reached."""
        assert self.active_experts is not None
        idle = []
        for stack in () if self.is_trial else self.transposed:
            layers = self.layers_of(stack)
            for expert, layer in enumerate(layers if hasattr(layers[0], "base_layer") else ()):
                if (stack, expert) not in self.active_experts:
                    idle += [p for p in layer.parameters() if p.requires_grad]
        return idle

    def view_of(self, stack: str) -> Tensor:
        """Return what stands for a stacked weight where code reads it."""
        plain = self._parameters.get(stack)
        # FSDP compares the shards that it finds here.
        return plain if tensor_facts.is_sharded(plain) else ExpertWeight(self, stack)

    def layers_of(self, stack: str) -> nn.ModuleList:
        """Return the layers of a stack's experts."""
        return self._modules[stack + _SUFFIXES[self.transposed[stack]]]  # type: ignore[return-value]

    def layer_elements(self) -> dict[str, int]:
        """Return the elements of the matrix of each expert's layer, by the layer's name in here."""
        return {
            f"{stack}{_SUFFIXES[self.transposed[stack]]}.{expert}": math.prod(matrix)
            for stack, (count, *matrix) in self.shapes.items()
            for expert in range(count)
        }

    def products(self, stack: str, groups: Groups, contracts_last: bool) -> list[Tensor]:
        """Return the products of rows with experts' matrices.

        Args:
            stack: name of the stacked weight.
            groups: rows float [..., in] of experts; some may be empty.
            contracts_last: whether a product contracts the last dimension of the stacked weight.

        Returns:
            float [..., out] for each group.
        """
        if self.watch is not None:
            self.watch.contracted.setdefault(stack, set()).add(contracts_last)
        if self.is_trial or contracts_last is self.transposed[stack]:
            matrices = expert_matrices(self.numbers(stack, "linear"), not contracts_last)
            return [F.linear(rows, matrices[expert].to(rows.dtype)) for expert, rows in groups]
        plain = self._parameters.get(stack)
        slices: Any = None if plain is None else expert_matrices(plain, self.transposed[stack])
        if slices is not None and len(groups) > 1:
            # Expert by expert the gradient of each slice would be a stack of zeros.
            slices = slices.unbind(0)
        layers: Any = self.layers_of(stack)
        outputs = []
        for expert, rows in groups:
            if self.active_experts is not None:
                self.active_experts.add((stack, expert))
            layer = layers[expert]
            if slices is None:
                outputs.append(_call(layer, rows))
                continue
            held = _without_adapter(layer)
            held._slice = slices[expert]
            try:
                outputs.append(_call(layer, rows))
            finally:  # activation checkpointing ends a forward in its midst by an exception
                held._slice = None
        return outputs

    def numbers(self, stack: str, function: str) -> Tensor:
        """Return a stacked weight as it was built, for a function that no layer of an expert
        computes.

        Raises:
            ConfigError: the forward runs and is not watched, so that nobody would learn of it.
        """
        if self.active_experts is not None and self.watch is None:
            name = getattr(self, "converted_name", type(self).__name__)
            raise ConfigError(
                f"{name} uses its {stack} in {function}. Allowed: products with each expert, by "
                f"linear, matmul, bmm, einsum or grouped_mm. Type "
                f"precision.ignore_modules=[{name}], and leave it out of adapter.modules."
            )
        plain = self._parameters.get(stack)
        if plain is not None:
            return plain
        layers = map(_without_adapter, self.layers_of(stack))
        matrices = torch.stack([layer.unpacked_weight() for layer in layers])
        return expert_matrices(matrices, self.transposed[stack])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # type: ignore[override]
        """Give a plain stacked weight to the experts' layers, which pack it."""
        for stack, transposed in self.transposed.items():
            weight = state_dict.get(prefix + stack)
            if weight is None or stack in self._parameters:
                continue
            del state_dict[prefix + stack]
            if weight.shape != self.shapes[stack]:
                shapes = f"{list(weight.shape)}, not {list(self.shapes[stack])}"
                args[-1].append(f"{prefix}{stack}: its shape is {shapes}")
                continue
            for expert, matrix in enumerate(expert_matrices(weight, transposed)):
                state_dict[f"{prefix}{stack}{_SUFFIXES[transposed]}.{expert}.weight"] = matrix
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


_ATTRIBUTES = (*Experts.__annotations__,)


class _ZeroGradients(torch.autograd.Function):
    """Give parameters that a forward did not need gradients of zero, as a stacked weight has them:
    processes exchange the gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, *map(torch.zeros_like, ctx.parameters)


def _call(layer: nn.Module, rows: Tensor) -> Tensor:
    """Return a layer's outputs, also on no rows: [..., in] to [..., out]."""
    flat = rows.reshape(-1, rows.shape[-1])
    # Without rows one row of zeros gives the dtype, and gradients that are zero.
    missing = int(not len(flat))
    is_half = tensor_facts.is_narrow(rows) or torch.is_autocast_enabled("cpu")
    # A mode that watches kernels counts the rows of the model.
    if rows.is_cpu and is_half and _get_current_dispatch_mode() is None:
        # oneDNN compiles a kernel in 16 bits for each new number of rows, in the time of twenty
        # products of 256 x 128 x 128, and the tokens of an expert differ in each step.
        missing = -len(flat) % KERNEL_ROWS or missing * KERNEL_ROWS
    if not missing:
        return layer(rows)
    output = layer(F.pad(flat, (0, 0, 0, missing)))[: len(flat)]
    return output.reshape(*rows.shape[:-1], output.shape[-1])


def _without_adapter(layer: nn.Module) -> Any:
    """Return the layer of an expert, of one with an adapter the layer that the adapter adds to."""
    return getattr(layer, "base_layer", layer)


def convert_experts(
    module: nn.Module,
    stacks: Mapping[str, bool],
    convert: Callable[[nn.Module], None] | None,
    packs: bool = False,
) -> None:
    """Turn the experts of a module into low-precision linear layers, in place.

    Args:
        module: holds stacked weights.
        stacks: their names, and whether each is transposed.
        convert: turns one nn.Linear into a layer of the precision, in place; None makes no layers
            yet, see Experts.is_trial.
        packs: whether the layer holds the weight, as codes, so that the stacked one is dropped.
    """
    shapes = {}
    for stack, transposed in stacks.items():
        weight: Any = module._parameters[stack]
        shapes[stack] = weight.shape
        layers = module_tree.ConditionalModules()
        matrices = expert_matrices(weight.detach(), transposed)
        for expert, matrix in enumerate(matrices if convert is not None else ()):
            layer: Any = linear_of(matrix)
            layer.weight.requires_grad_(weight.requires_grad)
            convert(layer)  # type: ignore[misc]
            if not packs:
                del layer._parameters["weight"]
                layer.__class__ = _expert_layer_class(type(layer))
                vars(layer).update(_owner=(module, stack, expert), _slice=None)
            layers.append(layer.train(module.training))
        if packs:
            del module._parameters[stack]
        module.add_module(stack + _SUFFIXES[transposed], layers)
    module.__class__ = _experts_class(type(module), tuple(stacks))
    values = (dict(stacks), shapes, convert is None, None, None)
    vars(module).update(zip(_ATTRIBUTES, values, strict=True))


def restore_stacks(module: Experts) -> None:
    """Undo convert_experts in a module that still holds the stacked weights, in place."""
    for stack, transposed in module.transposed.items():
        del module._modules[stack + _SUFFIXES[transposed]]
    for name in _ATTRIBUTES:
        del vars(module)[name]
    module.__class__ = type(module).__bases__[1]


class Stack(NamedTuple):
    """A stacked weight of experts that have a layer each.

    Attributes:
        name: dotted name of the weight.
        module: that holds it.
        transposed: whether it is [experts, in, out].
        layers: dotted names of the experts' layers.
    """

    name: str
    module: Experts
    transposed: bool
    layers: list[str]


def expert_stacks(model: nn.Module) -> Iterator[Stack]:
    """Yield the stacked weights of a model whose experts have a layer each."""
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        for stack, transposed in module.transposed.items():
            name = f"{path}.{stack}".removeprefix(".")
            layers = [f"{name}{_SUFFIXES[transposed]}.{e}" for e in range(module.shapes[stack][0])]
            yield Stack(name, module, transposed, layers)


def expert_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers of converted experts with their names, as experts.down_proj[3]."""
    return {
        layer: f"{stack.name}[{expert}]"
        for stack in expert_stacks(model)
        for expert, layer in enumerate(stack.module.layers_of(stack.name.rpartition(".")[2]))
    }


def linear_of(matrix: Tensor) -> nn.Linear:
    """Return a linear layer without a bias whose weight is a matrix [out, in]."""
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(matrix, requires_grad=matrix.requires_grad)
    return layer


@cache
def _expert_layer_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (ExpertLayer, kind), {"__module__": kind.__module__})


@cache
def _experts_class(kind: type[nn.Module], stacks: tuple[str, ...]) -> type[nn.Module]:
    """Return the class of a module with converted experts, which shows them as its stacks."""
    shown = {stack: property(lambda module, stack=stack: module.view_of(stack)) for stack in stacks}
    # The module's own class tells the runner whose attributes the module has.
    return type(kind.__name__, (Experts, kind), {"__module__": kind.__module__, **shown})


def stack_packed_experts(state_dict: dict[str, Any]) -> None:
    """Join experts' matrices of a state dict, which are unpacked, to stacked weights, in place.

    Raises:
        ValueError: those of an expert are missing.
    """
    matches = [match for match in map(_PACKED_KEY.fullmatch, state_dict) if match]
    groups = fmt.grouped((match.group(1, 2, 4), match) for match in matches)
    for (stack, suffix, base), group in groups.items():
        names = [f"{stack}{suffix}.{expert}.{base or ''}weight" for expert in range(len(group))]
        missing = set(names) - state_dict.keys()
        if missing:
            raise ValueError(f"the packed experts of {stack} lack {', '.join(sorted(missing))}")
        matrices = [state_dict.pop(name) for name in names]
        transposed = suffix == _SUFFIXES[True]
        state_dict[stack] = expert_matrices(torch.stack(matrices), transposed).contiguous()
