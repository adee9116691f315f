"""Why two sides of a mismatch differ, and what makes them alike.

The cause is looked for as mode=diff does: each module computes from the other side's tensors, so
that its own error is known. One kind of module after another then adds its error to the other side,
which says how much of the mismatch comes from there.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from runner.core import Batch, RunSpec, batch_layout, fmt, module_tape, tensor_facts
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
from runner.mismatch.record import Mismatch, log_probabilities
from runner.mismatch.sides import Generation, Side
from runner.modes.diff import on_device
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


def _scores(side: Side, batch: Batch, names: set[str], change: _Change) -> Tensor:
    """Return the log-probabilities of the labels that count, with changes at the boundaries of
    modules."""
    with visited_modules(side.model, names, _Visit(change)):
        logits, labels = side.score(batch)
    counted = labels != batch_layout.IGNORED_LABEL
    scores = log_probabilities(logits[counted])
    return scores.gather(-1, labels[counted].unsqueeze(-1)).double()


def _rms(scores: Tensor, expected: Tensor) -> float:
    return (scores - expected).square().mean().sqrt().item()


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
        given[boundary] = expected.to(tensor.dtype, copy=True)
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
        own = ours.get(boundary, value)
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
    device = training.state.device
    batch = on_device(batch, device)
    executions = (
        Execution(base.precision_name, base.state),
        Execution(other.precision_name, other.state),
    )
    return compare_batch(*executions, (batch, batch), generator_states(device))


def wrong_module(comparison: BatchComparison) -> str:
    """Return the first module whose forward adds more than rounding explains; empty where rounding
    explains everything."""
    divergence = first_divergence(comparison.rows)
    if divergence is None or divergence.is_backward or divergence.added.is_known_sum:
        return ""
    return divergence.row.module


def cache_is_wrong(serving: Side, text: Generation, temperature: float) -> bool:
    """Return whether what was drawn with a cache differs from the same side without one by more
    than rounding explains."""
    # Many models compute their norms in float32, whatever their precision.
    size = max(*roundoff(serving), tensor_facts.unit_roundoff(torch.float32))

    def add_noise(boundary: Boundary, tensor: Tensor) -> Tensor:
        if boundary.side != "out" or not tensor.is_floating_point():
            return tensor
        noise = size * (2 * torch.rand_like(tensor, dtype=torch.float32) - 1)
        return (tensor * (1 + noise)).to(tensor.dtype)

    cached = text.record(serving.score_text(text, temperature))
    names = comparable_modules(serving.model)
    with visited_modules(serving.model, names, _Visit(add_noise)):
        rounded = serving.score_text(text, temperature)
    plain = text._replace(logits=serving.score_text(text, temperature))
    return cached.rms > MAX_CACHE_ERROR * plain.record(rounded).rms


@dataclass(frozen=True)
class Cure:
    """What may make two sides alike.

    Attributes:
        what: in words.
        specs: of the side that trains, and of the one that serves.
        words: overrides to type in place of the command's own for these keys.
        remainder: what remains of the mismatch; None where it cannot be tried.
        reason: why not.
    """

    what: str
    specs: tuple[RunSpec, RunSpec]
    words: Sequence[str]
    remainder: Mismatch | None = None
    reason: str = ""


def cures(training: Side, serving: Side, batch: Batch) -> Iterator[Cure]:
    """Yield what may make two sides alike, the cheapest first.

    Args:
        training: the side that trains.
        serving: the side that serves.
        batch: for the order in which modules are called.
    """
    ours, theirs = training.spec, serving.spec
    parts = {
        "the head in float32": _head(training, batch),
        "routers in float32": _routers(training.model),
    }
    for what, modules in parts.items():
        kept = (_keep(training, modules), _keep(serving, modules))
        yield from _cure(what, (training, serving), kept)
    finer = tuple(_in_precision(spec, _FLOAT16) for spec in (ours, theirs))
    yield from _cure("float16 in place of bfloat16", (training, serving), (finer[0], finer[1]))
    for name in registry.precision_names():
        if registry.load_precision(name).trains_for == serving.precision_name:
            changed = _in_precision(ours, {training.precision_name: name})
            yield from _cure(f"training in {name}", (training, serving), (changed, theirs))
    if not serving.state.precision.freezes:
        yield from _cure("training in what serves", (training, serving), (theirs, theirs))
    yield from _cure("serving in what trains", (training, serving), (ours, ours))


def _cure(what: str, sides: tuple[Side, Side], specs: tuple[RunSpec, RunSpec]) -> Iterator[Cure]:
    """Yield a cure with the words that its specs take; none where they are as they were."""
    ours, theirs = specs
    training, serving = sides
    words = []
    if ours != training.spec:
        words += words_of(ours, training.spec)
    if theirs != serving.spec:
        words.append(f"serving={','.join(words_of(theirs, ours))}")
    if words:
        yield Cure(what, (ours, theirs), words)


def words_of(spec: RunSpec, base: RunSpec) -> list[str]:
    """Return the overrides that give a spec its precision, and its model's keys over another's."""
    name = str(spec.precision["name"])
    words = [f"precision={name}"]
    nodes = {
        "precision": (spec.precision, registry.precision_config(name)),
        "model": (spec.model, base.model),
    }
    for group, (node, plain) in nodes.items():
        before = dict(fmt.leaves(plain, group))
        for key, value in fmt.leaves(node, group):
            if before.get(key, value) != value:
                words.append(f"{key}={fmt.typed_value(value)}")
    return words


def _own_options(spec: RunSpec) -> dict[str, Any]:
    """Return the keys of a precision that are not as its name has them."""
    plain = registry.precision_config(str(spec.precision["name"]))
    return {key: v for key, v in spec.precision.items() if key in plain and plain[key] != v}


def _head(side: Side, batch: Batch) -> list[str]:
    """Return the last module with weights of its own that is called, and those that share them."""
    modules = dict(named_modules(side.model))
    own = {name: {*m.parameters(recurse=False)} for name, m in modules.items()}
    called = []

    def note(boundary: Boundary, tensor: Tensor) -> Tensor:
        called.append(boundary.module)
        return tensor

    _scores(side, batch, comparable_modules(side.model) - {module_tape.ROOT}, note)
    weights = next((own[name] for name in reversed(called) if own[name]), set())
    return [name for name, parameters in own.items() if not weights.isdisjoint(parameters)]


def _routers(model: nn.Module) -> list[str]:
    """Return the kinds of modules beside stacked experts that have a row of weights per expert."""
    found = {}
    for stack in stack_names(model):
        block = stack.rpartition(".")[0].rpartition(".")[0]
        count = len(model.get_parameter(stack))
        for name, module in model.get_submodule(block).named_children():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) == count:
                found[kind_of(f"{block}.{name}" if block else name)] = None
    return [*found]


def _keep(side: Side, modules: Sequence[str]) -> RunSpec:
    """Return a side's spec with modules in float32; as it is where nothing of it is narrower."""
    node = side.spec.precision
    is_narrow = max(roundoff(side)) > tensor_facts.unit_roundoff(torch.float32)
    if "keep_fp32" not in node or not is_narrow or not modules:
        return side.spec
    kept = [*dict.fromkeys([*node["keep_fp32"], *modules])]
    return replace(side.spec, precision={**node, "keep_fp32": kept})


def _in_precision(spec: RunSpec, names: Mapping[str, str]) -> RunSpec:
    """Return a spec in the precision that takes its own's place, with its options that this one
    has, too; as it is where none does."""
    name = names.get(str(spec.precision["name"]))
    if name is None:
        return spec
    config = registry.precision_config(name)
    options = {key: value for key, value in _own_options(spec).items() if key in config}
    return replace(spec, precision={**config, **options, "name": name})
