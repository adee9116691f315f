"""Why two sides of a mismatch differ, and what makes them alike.

The cause is looked for as mode=diff does: each module computes from the other side's tensors, so
that its own error is known. One kind of module after another then adds its error to the other side,
which says how much of the mismatch comes from there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

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
from runner.mismatch.sides import Side
from runner.precision import registry
from runner.precision.layers.experts import stack_names

CAUSE_ROWS = 4
"""Examples by which the cause is looked for: all their activations are held."""
MAX_CACHE_ERROR = 4.0
"""Times the error that rounding all modules' outputs makes, up to which rounding explains that a
cache differs from none."""


@dataclass(frozen=True)
class Contribution:
    """What the modules of one kind add to a mismatch.

    Attributes:
        modules: their name, with * for the number of a layer.
        rms: of the difference of log-probabilities that their own errors alone make, in nats.
        share: of the mismatch's mean square; they need not add up to 1, for errors may cancel.
    """

    modules: str
    rms: float
    share: float


class _Record(Visitor):
    """Keeps the tensors that cross boundaries."""

    def __init__(self) -> None:
        self.values: dict[Boundary, Tensor] = {}

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        # A copy: what follows may write into the tensor.
        self.values[boundary] = tensor.clone()
        return tensor

    def visit_written(
        self, boundary: Boundary, caller: Tensor, tensor: Tensor, writes: bool
    ) -> None:
        pass


class _Substitute(_Record):
    """Gives every module the tensors of another execution, and keeps what it computes from them.

    Attributes:
        given: what modules were given, by the boundaries.
    """

    def __init__(self, tensors: Mapping[Boundary, Tensor]) -> None:
        super().__init__()
        self.given: dict[Boundary, Tensor] = {}
        self._tensors = tensors
        self._ids: set[int] = set()

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        expected = self._tensors.get(boundary)
        if expected is None or expected.shape != tensor.shape:
            return tensor
        # What a module only passes on, another one has computed.
        if boundary.side in ("out", *CHOICES) and id(tensor) not in self._ids:
            self.values[boundary] = tensor
        given = expected.to(tensor.device, tensor.dtype, copy=True)
        self.given[boundary] = given
        self._ids.add(id(given))
        return given


class _Add(_Record):
    """Adds errors to what some modules compute, or puts their choices in its place."""

    def __init__(self, errors: Mapping[Boundary, Tensor], modules: Sequence[str]) -> None:
        super().__init__()
        self._errors = {b: error for b, error in errors.items() if b.module in modules}

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        error = self._errors.get(boundary)
        if error is None:
            return tensor
        return (tensor + error).to(tensor.dtype) if error.is_floating_point() else error


class _Round(_Record):
    """Rounds what every module computes, by random shares of a format's unit roundoff."""

    def __init__(self, roundoff: float) -> None:
        super().__init__()
        self._roundoff = roundoff

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        if boundary.side != "out" or not tensor.is_floating_point():
            return tensor
        noise = self._roundoff * (2 * torch.rand_like(tensor, dtype=torch.float32) - 1)
        return (tensor * (1 + noise)).to(tensor.dtype)


def _visited(side: Side, batch: Batch, names: set[str], visitor: Visitor) -> Tensor:
    """Return the log-probabilities of the labels that count, with a visitor at the boundaries."""
    with visited_modules(side.model, names, visitor):
        scores, labels = side.score(batch)
    counted = labels >= 0
    return scores[counted].gather(-1, labels[counted].unsqueeze(-1)).double()


def roundoff(side: Side) -> tuple[float, float]:
    """Return the unit roundoffs of what a side computes in and of what it stores."""
    precision = side.state.precision
    computed = tensor_facts.unit_roundoff(precision.compute)
    if precision.converts_layers:
        computed = max(computed, precision.operand_roundoffs[0])
    return computed, tensor_facts.unit_roundoff(precision.storage)


def first_rows(batch: Batch) -> Batch:
    """Return the examples of a batch by which the cause is looked for."""
    return tree_map_only(Tensor, lambda t: t[:CAUSE_ROWS] if t.dim() else t, batch)


def contributions(training: Side, serving: Side, batch: Batch) -> list[Contribution]:
    """Return what each kind of module adds to a mismatch, the most first.

    A module's own error is what it computes minus what the other side's module computes from the
    same tensors, which both formats hold. It is added to the side of the finer format, whose own
    rounding hides none of it.
    """
    base, other = sorted((training, serving), key=roundoff)
    names = comparable_modules(base.model) & comparable_modules(other.model)
    free = _Record()
    expected = _visited(base, batch, names, free)
    total = (_visited(other, batch, names, _Add({}, ())) - expected).square().mean().item()
    theirs = _Substitute(free.values)
    _visited(other, batch, names, theirs)
    ours = _Substitute(theirs.given)
    _visited(base, batch, names, ours)
    errors: dict[Boundary, Tensor] = {}
    for boundary, value in theirs.values.items():
        value = value.to(base.state.device)
        own = ours.values.get(boundary, value)
        if value.is_floating_point():
            wide = torch.promote_types(own.dtype, torch.float32)
            errors[boundary] = value.to(wide) - own.to(wide)
        elif not value.equal(own):
            errors[boundary] = value
    errors = {b: error for b, error in errors.items() if error.any()}
    found = []
    for kind, modules in fmt.grouped((kind_of(b.module), b.module) for b in errors).items():
        changed = _visited(base, batch, names, _Add(errors, modules))
        square = (changed - expected).square().mean().item()
        is_container = any(True for _ in dict(named_modules(base.model))[modules[0]].children())
        name = f"{kind}, between its modules" if is_container else kind
        found.append(Contribution(name, square**0.5, square / total if total else 0.0))
    return sorted(found, key=lambda one: -one.rms)


def kind_of(module: str) -> str:
    """Return a module's name with * in the place of the numbers of layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def compare_modules(training: Side, serving: Side, batch: Batch) -> BatchComparison:
    """Return mode=diff's comparison of both sides, the finer one as its reference."""
    base, other = sorted((training, serving), key=roundoff)
    executions = (Execution(base.name, base.state), Execution(other.name, other.state))
    batches = tuple(
        tree_map_only(Tensor, lambda t, d=side.state.device: t.to(d), batch)
        for side in (base, other)
    )
    return compare_batch(*executions, batches, generator_states(base.state.device))


def wrong_module(comparison: BatchComparison, found: Sequence[Contribution]) -> str:
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
    return found[0].modules if comparison.same_format and found else ""


def cache_is_wrong(serving: Side, batch: Batch, cached: Mismatch) -> bool:
    """Return whether a side with its cache differs from itself without by more than rounding."""
    names = comparable_modules(serving.model)
    plain = _visited(serving, batch, names, _Add({}, ()))
    rounded = _visited(serving, batch, names, _Round(max(roundoff(serving))))
    explained = (rounded - plain).square().mean().sqrt().item()
    return cached.rms > MAX_CACHE_ERROR * explained


@dataclass(frozen=True)
class Cure:
    """What may make two sides alike.

    Attributes:
        what: in words.
        training, serving: specs of both sides.
        words: overrides to type.
    """

    what: str
    training: RunSpec
    serving: RunSpec
    words: Sequence[str]


_FLOAT16 = {"bf16-true": "16-true", "bf16-mixed": "16-mixed"}
"""Precisions of three more bits."""


def cures(training: Side, serving: Side, batch: Batch) -> Iterator[Cure]:
    """Yield what may make two sides alike, the cheapest first.

    Args:
        training: the side that trains.
        serving: the side that serves.
        batch: for the order in which modules are called.
    """
    record = _Record()
    _visited(training, batch, comparable_modules(training.model), record)
    called = [b.module for b in record.values if b.side == "out"]
    model = training.model
    specs = (training.spec, serving.spec)
    own = serving.name if "=" in serving.name else f"precision={serving.name}"
    parts = {"the head in float32": _head(model, called), "routers in float32": _routers(model)}
    for what, modules in parts.items():
        kept = [_kept(side, modules) for side in (training, serving)]
        if modules and kept != [*specs]:
            key = f"precision.keep_fp32=[{','.join(modules)}]"
            sides = zip(kept, specs, ([key], [f'serving="{own},{key}"']), strict=True)
            words = [word for new, old, typed in sides if new != old for word in typed]
            yield Cure(what, kept[0], kept[1], words)
    names = [str(spec.precision["name"]) for spec in specs]
    finer = [_FLOAT16.get(name, name) for name in names]
    if finer != names:
        words = [f"precision={finer[0]}", f"serving={finer[1]}"]
        yield Cure("float16 in place of bfloat16", *map(_in_precision, specs, finer), words)
    ours, theirs = specs
    yield Cure("training in what serves", theirs, theirs, [*own.split(",precision=")])
    yield Cure("serving in what trains", ours, ours, [f"serving={names[0]}"])


def _head(model: nn.Module, called: Sequence[str]) -> list[str]:
    """Return the last module with weights that is called, and the modules that share them."""
    modules = dict(named_modules(model))
    weighted = [name for name in called if [*modules[name].parameters(recurse=False)]]
    if not weighted:
        return []
    weights = {*modules[weighted[-1]].parameters()}
    return [n for n, m in modules.items() if not weights.isdisjoint(m.parameters(recurse=False))]


def _routers(model: nn.Module) -> list[str]:
    """Return kinds of modules beside stacked experts that have a row of weights per expert."""
    found = {}
    for stack in stack_names(model):
        layer = stack.rpartition(".")[0]
        count = len(model.get_parameter(stack))
        block = layer.rpartition(".")[0]
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            weight = getattr(module, "weight", None)
            is_inside = name == layer or name.startswith(f"{layer}.")
            if isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) == count:
                found |= {} if is_inside else {kind_of(name): None}
    return [*found]


def _kept(side: Side, modules: Sequence[str]) -> RunSpec:
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
