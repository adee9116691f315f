"""Why two sides of a mismatch differ, and what makes them alike.

The cause is looked for as mode=diff does: each module computes from the other side's tensors, so
that its own error is known. One kind of module after another then adds its error to the other side,
which says how much of the mismatch comes from there.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from runner.core import Batch, RunSpec, fmt, tensor_facts
from runner.diagnostics.divergence.boundaries import (
    CHOICES,
    Boundary,
    Visitor,
    comparable_modules,
    visited_modules,
)
from runner.diagnostics.divergence.compare import BatchComparison, compare_batch
from runner.diagnostics.divergence.findings import first_divergence
from runner.diagnostics.divergence.reference import generator_states
from runner.diagnostics.divergence.substitution import Execution
from runner.diagnostics.module_tensors import named_modules
from runner.mismatch.record import Mismatch
from runner.mismatch.sides import Side, on_device
from runner.modes.diff import split_overrides
from runner.precision import registry
from runner.precision.layers.experts import stack_names

MAX_CACHE_ERROR = 4.0
"""Times the error that rounding all modules' outputs makes, up to which rounding explains that a
cache differs from none."""
_FLOAT16 = {"bf16-true": "16-true", "bf16-mixed": "16-mixed"}
"""Precisions of three more bits."""
_Change = Callable[[Boundary, Tensor], Tensor]


class _Visit(Visitor):
    """Passes tensors at boundaries through a function."""

    def __init__(self, change: _Change) -> None:
        self._change = change

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        return self._change(boundary, tensor)

    def visit_written(
        self, boundary: Boundary, caller: Tensor, tensor: Tensor, writes: bool
    ) -> None:
        pass


def _scores(side: Side, batch: Batch, names: set[str], change: _Change) -> Tensor:
    """Return the log-probabilities of the labels that count, with changes at the boundaries of
    modules."""
    with visited_modules(side.model, names, _Visit(change)):
        scores, labels = side.score(batch)
    counted = labels >= 0
    return scores[counted].gather(-1, labels[counted].unsqueeze(-1)).double()


def _rms(scores: Tensor, expected: Tensor) -> float:
    return (scores - expected).square().mean().sqrt().item()


def _unchanged(boundary: Boundary, tensor: Tensor) -> Tensor:
    return tensor


def _record(side: Side, batch: Batch, names: set[str]) -> tuple[Tensor, dict[Boundary, Tensor]]:
    """Return a side's scores, and what crosses the boundaries of modules."""
    tensors: dict[Boundary, Tensor] = {}

    def keep(boundary: Boundary, tensor: Tensor) -> Tensor:
        # A copy: what follows may write into the tensor.
        tensors[boundary] = tensor.clone()
        return tensor

    return _scores(side, batch, names, keep), tensors


def _substituted(
    side: Side, batch: Batch, names: set[str], tensors: Mapping[Boundary, Tensor]
) -> tuple[dict[Boundary, Tensor], dict[Boundary, Tensor]]:
    """Give every module of a side the tensors of another execution.

    Returns:
        What the modules compute and choose, and what they were given, in the side's dtypes.
    """
    computed: dict[Boundary, Tensor] = {}
    given: dict[Boundary, Tensor] = {}
    ids = set()

    def substitute(boundary: Boundary, tensor: Tensor) -> Tensor:
        expected = tensors.get(boundary)
        if expected is None or expected.shape != tensor.shape:
            return tensor
        # What a module only passes on, another one has computed.
        if boundary.side in ("out", *CHOICES) and id(tensor) not in ids:
            computed[boundary] = tensor
        given[boundary] = expected.to(tensor.device, tensor.dtype, copy=True)
        ids.add(id(given[boundary]))
        return given[boundary]

    _scores(side, batch, names, substitute)
    return computed, given


def roundoff(side: Side) -> tuple[float, float]:
    """Return the unit roundoffs of what a side computes in and of what it stores."""
    precision = side.state.precision
    computed = tensor_facts.unit_roundoff(precision.compute)
    if precision.converts_layers:
        computed = max(computed, precision.operand_roundoffs[0])
    return computed, tensor_facts.unit_roundoff(precision.storage)


def contributions(training: Side, serving: Side, batch: Batch) -> dict[str, float]:
    """Return the rms that the own errors of each kind of module make, in nats, the largest first.

    A kind is a module's name with * for the number of a layer. A module's own error is what it
    computes minus what the other side's module computes from the same tensors, which both formats
    hold. It is added to the side of the finer format, whose own rounding hides none of it.
    """
    base, other = sorted((training, serving), key=roundoff)
    names = comparable_modules(base.model) & comparable_modules(other.model)
    expected, free = _record(base, batch, names)
    theirs, given = _substituted(other, batch, names, free)
    ours, _ = _substituted(base, batch, names, given)
    errors: dict[Boundary, Tensor] = {}
    for boundary, value in theirs.items():
        own = ours.get(boundary, value).to(base.state.device)
        value = value.to(base.state.device)
        if value.is_floating_point():
            wide = torch.promote_types(own.dtype, torch.float32)
            errors[boundary] = value.to(wide) - own.to(wide)
        elif not value.equal(own):
            errors[boundary] = value
    modules = dict(named_modules(base.model))
    found = {}
    for kind, places in fmt.grouped((kind_of(b.module), b) for b in errors).items():
        # Choices, as the numbers of experts, take the place of the other side's.
        added = {b: errors[b] for b in places if errors[b].any()}

        def add(boundary: Boundary, tensor: Tensor, added: Mapping = added) -> Tensor:
            error = added.get(boundary)
            if error is None:
                return tensor
            return (tensor + error).to(tensor.dtype) if error.is_floating_point() else error

        has_parts = next(modules[places[0].module].children(), None) is not None
        name = f"{kind}, between its modules" if has_parts else kind
        if added:
            found[name] = _rms(_scores(base, batch, names, add), expected)
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def kind_of(module: str) -> str:
    """Return a module's name with * in the place of the numbers of layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def compare_modules(training: Side, serving: Side, batch: Batch) -> BatchComparison:
    """Return mode=diff's comparison of both sides, the finer one as its reference."""
    base, other = sorted((training, serving), key=roundoff)
    batches = (on_device(batch, base.state.device), on_device(batch, other.state.device))
    executions = (Execution(base.name, base.state), Execution(other.name, other.state))
    return compare_batch(*executions, batches, generator_states(base.state.device))


def wrong_module(comparison: BatchComparison, found: Mapping[str, float]) -> str:
    """Return the module whose forward adds more than rounding explains; empty where rounding
    explains everything.

    Args:
        comparison: of mode=diff, which knows what rounding explains.
        found: see contributions; two executions in one precision have no error to explain.
    """
    divergence = first_divergence(comparison.rows)
    is_known = divergence is None or divergence.is_backward or divergence.added.is_known_sum
    if divergence is not None and not is_known:
        return divergence.row.module
    return next(iter(found), "") if comparison.same_format else ""


def cache_is_wrong(serving: Side, batch: Batch, cached: Mismatch) -> bool:
    """Return whether a side with its cache differs from itself without by more than rounding."""
    # Many models compute their norms in float32, whatever their precision.
    size = max(*roundoff(serving), tensor_facts.unit_roundoff(torch.float32))

    def add_noise(boundary: Boundary, tensor: Tensor) -> Tensor:
        if boundary.side != "out" or not tensor.is_floating_point():
            return tensor
        noise = size * (2 * torch.rand_like(tensor, dtype=torch.float32) - 1)
        return (tensor * (1 + noise)).to(tensor.dtype)

    names = comparable_modules(serving.model)
    plain = _scores(serving, batch, names, _unchanged)
    explained = _rms(_scores(serving, batch, names, add_noise), plain)
    return cached.rms > MAX_CACHE_ERROR * explained


@dataclass(frozen=True)
class Cure:
    """What may make two sides alike.

    Attributes:
        what: in words.
        specs: of the side that trains, and of the one that serves.
        words: overrides to type in place of the command's own.
    """

    what: str
    specs: tuple[RunSpec, RunSpec]
    words: Sequence[str]


def cures(training: Side, serving: Side, batch: Batch) -> Iterator[Cure]:
    """Yield what may make two sides alike, the cheapest first.

    Args:
        training: the side that trains.
        serving: the side that serves.
        batch: for the order in which modules are called.
    """
    ours, theirs = specs = (training.spec, serving.spec)
    text = str(ours.value("serving"))
    served = text if "=" in text else f"precision={text}"
    parts = {
        "the head in float32": _head(training, batch),
        "routers in float32": _routers(training.model),
    }
    for what, modules in parts.items():
        kept = (_keeping(training, modules), _keeping(serving, modules))
        key = f"precision.keep_fp32=[{','.join(modules)}]"
        typed = (key, f"serving={served},{key}")
        words = [w for w, old, new in zip(typed, specs, kept, strict=True) if new != old]
        if modules and words:
            yield Cure(what, kept, words)
    names = [str(spec.precision["name"]) for spec in specs]
    finer = [_FLOAT16.get(name, name) for name in names]
    if finer != names:
        changed = (_in_precision(ours, finer[0]), _in_precision(theirs, finer[1]))
        words = [f"precision={finer[0]}", f"serving={finer[1]}"]
        yield Cure("float16 in place of bfloat16", changed, words)
    if not serving.state.precision.freezes:
        yield Cure("training in what serves", (theirs, theirs), split_overrides(served))
    for name in registry.precision_names():
        if registry.load_precision(name).trains_for == names[1]:
            trained = _in_precision(ours, name)
            yield Cure(f"training in {name}", (trained, theirs), [f"precision={name}"])
    yield Cure("serving in what trains", (ours, ours), [f"serving={names[0]}"])


def _head(side: Side, batch: Batch) -> list[str]:
    """Return the last module with weights that is called, and the modules that share them."""
    modules = dict(named_modules(side.model))
    _, tensors = _record(side, batch, comparable_modules(side.model))
    called = [modules[b.module] for b in tensors if b.side == "out"]
    weighted = [module for module in called if [*module.parameters(recurse=False)]]
    weights = {*weighted[-1].parameters()}
    return [n for n, m in modules.items() if not weights.isdisjoint(m.parameters(recurse=False))]


def _routers(model: nn.Module) -> list[str]:
    """Return the kinds of modules beside stacked experts that have a row of weights per expert."""
    found = {}
    for stack in stack_names(model):
        layer = stack.rpartition(".")[0]
        block = layer.rpartition(".")[0]
        count = len(model.get_parameter(stack))
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            weight = getattr(module, "weight", None)
            is_matrix = isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) == count
            if is_matrix and not f"{name}.".startswith(f"{layer}."):
                found[kind_of(name)] = None
    return [*found]


def _keeping(side: Side, modules: Sequence[str]) -> RunSpec:
    """Return a side's spec with modules in float32; as it is where nothing of it is narrower."""
    node = side.spec.precision
    is_narrow = max(roundoff(side)) > tensor_facts.unit_roundoff(torch.float32)
    if "keep_fp32" not in node or not is_narrow:
        return side.spec
    kept = [*dict.fromkeys([*node["keep_fp32"], *modules])]
    return replace(side.spec, precision={**node, "keep_fp32": kept})


def _in_precision(spec: RunSpec, name: str) -> RunSpec:
    if spec.precision["name"] == name:
        return spec
    return replace(spec, precision={**registry.precision_config(name), "name": name})
