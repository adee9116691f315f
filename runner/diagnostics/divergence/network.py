"""The facts about a compared model that its errors are judged by."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from runner.diagnostics.divergence.added_error import LARGEST_EXPLAINED, LARGEST_EXPLAINED_OF_CODE
from runner.diagnostics.divergence.boundaries import LOSS, ROOT, Boundary
from runner.diagnostics.divergence.expected_error import Roundoffs
from runner.diagnostics.divergence.passes import Arrival, Substitution
from runner.diagnostics.divergence.reference import Reference
from runner.diagnostics.divergence.roundoffs import Execution
from runner.precision.conversion import is_converted
from runner.utils.tensors import dtype_name


@dataclass(frozen=True)
class Network:
    """Facts about the compared model.

    Attributes:
        kinds: class of each module, by name, in the order of the first calls.
        owners: by boundary, the module whose own code computed the tensor; in the forward's order.
        users: by boundary, the module whose own code takes it.
        dtypes: by boundary, name of the tensor's dtype in the other execution.
        state_dtypes: by parameter or buffer, the same.
        roundoffs: with which the wider of the two executions computes.
        widths: by module, the most elements of an example of the tensors that it takes and returns.
        rows: by module, the largest number of rows of their last dimension.
        layers: names of the layers of torch.nn and of converted ones, which round once.
    """

    kinds: Mapping[str, str]
    owners: Mapping[Boundary, str]
    users: Mapping[Boundary, str]
    dtypes: Mapping[Boundary, str]
    state_dtypes: Mapping[str, str]
    roundoffs: Roundoffs
    widths: Mapping[str, int]
    rows: Mapping[str, int]
    layers: frozenset[str]

    def limit(self, module: str) -> float:
        """Return the error that rounding explains in a module, as a multiple of the expected."""
        return LARGEST_EXPLAINED if module in self.layers else LARGEST_EXPLAINED_OF_CODE


def build_network(
    execution: Execution,
    reference: Reference,
    arrival: Arrival,
    added: Substitution,
    roundoffs: Roundoffs,
) -> Network:
    """Return the facts about the compared model that its errors are judged by."""
    model = execution.state.plain_model
    widths, rows = _sizes(reference)
    # What only this execution writes into is no boundary of the reference.
    written = {b: b.module for b in added.forward if b not in reference.owners}
    state = (*model.named_parameters(), *model.named_buffers())
    return Network(
        kinds=_kinds(model, reference),
        owners={**reference.owners, **written},
        users=reference.users,
        dtypes={boundary: dtype_name(dtype) for boundary, dtype in arrival.dtypes.items()},
        state_dtypes={name: dtype_name(tensor.dtype) for name, tensor in state},
        roundoffs=roundoffs,
        widths=widths,
        rows=rows,
        layers=_layers(model),
    )


def _kinds(model: nn.Module, reference: Reference) -> dict[str, str]:
    """Return the class of each called module, in the order of the first calls; the loss last."""
    modules = dict(model.named_modules())
    called = dict.fromkeys(name for name, _ in reference.generators)
    kinds = {}
    for name in called:
        module = modules.get("" if name == ROOT else name)
        kinds[name] = type(module).__name__ if module is not None else ""
    return {**kinds, LOSS: "loss"}


def _sizes(reference: Reference) -> tuple[dict[str, int], dict[str, int]]:
    """Return by module the most elements of an example, and the most rows, of its tensors."""
    widths: dict[str, int] = {}
    rows: dict[str, int] = {}
    for boundary, value in reference.values.items():
        width = value.numel() // max(value.shape[0], 1) if value.ndim > 1 else 1
        height = value.numel() // max(value.shape[-1], 1) if value.ndim else 1
        for module in (reference.owners[boundary], reference.users[boundary]):
            widths[module] = max(widths.get(module, 1), width)
            rows[module] = max(rows.get(module, 1), height)
    return widths, rows


def _layers(model: nn.Module) -> frozenset[str]:
    """Return the names of the layers of torch.nn without modules of their own, and of converted
    layers."""
    names = []
    for name, module in model.named_modules():
        is_plain = type(module).__module__.startswith("torch.nn.")
        if is_converted(module) or (is_plain and next(module.children(), None) is None):
            names.append(name or ROOT)
    return frozenset(names)
