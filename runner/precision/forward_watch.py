"""Try a model's forward, and watch it for converted layers that do not run, or whose weight
something else reads.

A model may take a layer's weight (`F.linear(x, layer.weight)`) and never call the layer: then
nothing is computed in the converted format. Where the weight is packed, the reader gets codes
instead of numbers, and `x.to(layer.weight.dtype)` rounds activations to uint8.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from runner.core import ConversionPlan, ConversionReport, Fate, Strategy, module_tape, tensor_facts
from runner.precision.conversion import ROOT_NAME
from runner.precision.layers.conv1d import is_packed
from runner.precision.layers.experts import Experts, ExpertsWatch, expert_stacks
from runner.precision.layers.quantized_linear import PackedWeight


class TrialForward(Protocol):
    """A function that computes one forward of a model, which leaves no trace in the process.

    Args:
        inputs: loads the model inputs.
        plan: by which they are cast and the model is called.
        watch: the context around the forward.
        trains: the model is in training mode, and not in evaluation mode.

    Returns:
        Whether the forward ended without an error.
    """

    def __call__(
        self,
        inputs: Callable[[], Any],
        plan: ConversionPlan,
        watch: AbstractContextManager[Any],
        trains: bool = False,
    ) -> bool: ...


class ModelTrial(NamedTuple):
    """A model that was built, with the first batch of its run.

    Attributes:
        model: converted, and sharded where the strategy shards.
        report: of the conversion.
        plan: by which it was converted.
        inputs: loads the model inputs of the first batch.
        forward: computes a forward of the model.
        strategy: of the processes that try the model together, each on its own samples.
        has_label: the last field of the inputs is the target.
        has_adapter: the model has an adapter, or was to get one.
    """

    model: nn.Module
    report: ConversionReport
    plan: ConversionPlan
    inputs: Callable[[], Any]
    forward: TrialForward
    strategy: Strategy
    has_label: bool
    has_adapter: bool


def converted_layers(model: nn.Module, report: ConversionReport) -> dict[str, nn.Module]:
    """Return the converted modules of a model, proven or not, by their names in its report."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {}
    for row in report.modules:
        module = modules.get("" if row.module == ROOT_NAME else row.module)
        # An adapter's wrapper has taken the name.
        while hasattr(module, "get_base_layer"):
            module = module.get_base_layer()  # type: ignore[union-attr,operator]
        if row.fate in (Fate.CONVERTED, Fate.UNPROVEN) and module is not None:
            layers[row.module] = module
    return layers


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that an adapter adds to, by the names that they have without it."""
    return {
        name: module.get_base_layer()  # type: ignore[operator]
        for name, module in model.named_modules()
        if hasattr(module, "get_base_layer")
    }


def expert_layouts(model: nn.Module) -> dict[str, bool | None]:
    """Return the dotted names of a model's stacked weights, and whether each is transposed; None
    where it is not converted, and stands for one that a forward is to find."""
    return {
        stack.name: None if stack.module.is_trial else stack.transposed
        for stack in expert_stacks(model)
    }


def holds_matrix(layer: nn.Module) -> bool:
    """Return whether a layer holds a matrix, as a norm does not."""
    if isinstance(layer, Experts):
        return True
    weight = layer._parameters.get("weight")
    return weight is not None and weight.ndim > 1


class _Forward(NamedTuple):
    """A forward that a ForwardWatch follows.

    Attributes:
        layer: name of the converted layer that it is of; empty for other modules.
        holds: names of the layers whose weights its module holds as its own.
        is_model: whether it is the model's.
    """

    layer: str = ""
    holds: AbstractSet[str] = frozenset()
    is_model: bool = False


class ForwardWatch(TorchFunctionMode):
    """A context that watches the converted layers in one forward and restores every module after.

    Code outside a layer that reads its packed weight gets the numbers that the weight represents,
    so that the forward continues and one pass finds all such readers.

    Args:
        model: the model that holds the layers.
        layers: converted modules by name.

    Attributes:
        executed: names of the layers whose own forward ran.
        read_elsewhere: names of the layers whose weight other code computed with.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.executed: set[str] = set()
        self.read_elsewhere: set[str] = set()
        self._names = self._weight_names()
        self._watches: dict[Experts, ExpertsWatch] = {}
        # The forwards that run now, the outermost first.
        self._running: list[_Forward] = []
        self._tape = module_tape.ModuleTape()

    @property
    def bypassed(self) -> set[str]:
        """Return the names of the layers that must not be converted: a plain weight may be read by
        other code as long as the layer runs too, a packed one may not."""
        packed = {name for name in self.read_elsewhere if is_packed(self.layers[name])}
        return (self.read_elsewhere - self.executed) | packed | self.obstacles.keys()

    @property
    def obstacles(self) -> dict[str, str]:
        """Return why the forward cannot compute with converted experts, by their module's name."""
        watches = {
            name: self._watches[module]
            for name, module in self.layers.items()
            # Where the forward was to show the use of stacks, other stacks may be experts.
            if isinstance(module, Experts)
            and not (module.is_trial and self._watches[module].transposed())
        }
        return {name: watch.obstacle() for name, watch in watches.items() if watch.obstacle()}

    @property
    def plain_stacks(self) -> dict[str, str]:
        """Return why stacked weights whose use the forward was to show are no experts, by the name
        of their module in reports."""
        return {
            name or ROOT_NAME: self._watches[module].obstacle()
            for name, module in self.model.named_modules()
            if isinstance(module, Experts) and module.is_trial and self._watches[module].obstacle()
        }

    def experts(self) -> dict[str, bool]:
        """Return the dotted names of the stacked weights whose products the forward computed with
        experts, and whether each is transposed."""
        return {
            f"{name}.{stack}".removeprefix("."): transposed
            for name, module in self.model.named_modules()
            if isinstance(module, Experts)
            for stack, transposed in self._watches[module].transposed().items()
        }

    def __enter__(self) -> "ForwardWatch":
        names = {id(layer): name for name, layer in self.layers.items()}
        self._watches = {m: ExpertsWatch() for m in self.model.modules() if isinstance(m, Experts)}
        for module, watch in self._watches.items():
            module.watch = watch
        for module in self.model.modules():
            held = [*module._parameters.values()]
            if hasattr(module, "get_base_layer"):
                # DoRA reads the weight of the layer that it adds to, beside that layer's forward.
                held.append(module.get_base_layer()._parameters.get("weight"))  # type: ignore[union-attr,operator]
            # A module may share a converted layer's weight, as an embedding may.
            weights = {self._names[id(p)] for p in held if id(p) in self._names}
            if id(module) in names:
                self._watch(module, _Forward(layer=names[id(module)]))
            elif weights:
                self._watch(module, _Forward(holds=weights))
        # Last, around the wrapper that a model which is itself a layer has by now.
        self._watch(self.model, _Forward(is_model=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tape.close()
        for module in self._watches:
            module.watch = None
        # The module around experts may multiply with their weights.
        for name, layer in self.layers.items():
            if isinstance(layer, Experts) and self._watches[layer].contracted:
                self.executed.add(name)

    def _weight_names(self) -> dict[int, str]:
        """Return the names of the layers that hold a weight, by the weight's id."""
        weights = {name: layer._parameters.get("weight") for name, layer in self.layers.items()}
        return {id(weight): name for name, weight in weights.items() if weight is not None}

    def _watch(self, module: nn.Module, running: _Forward) -> None:
        """Replace a module's forward by one that is among the running ones while it runs."""
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if running.layer:
                self.executed.add(running.layer)
            self._running.append(running)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        self._tape.replace_forward(module, run)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_in_layer = any(forward.layer for forward in self._running)
        is_in_model = any(forward.is_model for forward in self._running)
        # A layer's own reads do not count, and outside the model an optimizer reads weights.
        if is_in_layer or not is_in_model:
            return func(*args, **kwargs)
        # What a packed layer shows to others is followed as the packed weight itself.
        arguments = tree_map(
            lambda leaf: leaf.layer.codes if isinstance(leaf, PackedWeight) else leaf,
            (args, kwargs),
        )
        names = {self._layer_of(leaf) for leaf in tree_leaves(arguments)} - {""}
        for forward in self._running:
            names -= forward.holds
        numbers: dict[int, Tensor] = {}
        for name in names:
            layer = self.layers[name]
            if is_packed(layer):
                numbers[id(layer._parameters["weight"])] = layer.unpacked_weight()  # type: ignore[operator]
        given, named = tree_map(lambda leaf: numbers.get(id(leaf), leaf), arguments)
        result = func(*given, **named)
        # Without a tensor in the result it was a question, such as the weight's device.
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.read_elsewhere |= names
        return result

    def _layer_of(self, leaf: Any) -> str:
        """Return the name of the layer whose weight a value is; empty where it is no such
        weight."""
        if isinstance(leaf, nn.Parameter) and id(leaf) not in self._names:
            # While a unit of FSDP computes, gathered weights are in the places of the shards.
            self._names |= self._weight_names()
        name = self._names.get(id(leaf), "") if isinstance(leaf, Tensor) else ""
        # FSDP itself reads shards, and gathered weights that are not yet in their places.
        if not name or tensor_facts.is_sharded(leaf):
            return ""
        return name if self.layers[name]._parameters.get("weight") is leaf else ""
