"""Trace a model's forward to a program of torch.export that takes any number of rows."""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_symbols

from runner.checkpoint.program_inputs import TRACED_ROWS, named_tensors, program_arguments


class TracedShapes(NamedTuple):
    """Shapes of a program's input and output tensors, with -1 for sizes that may differ."""

    inputs: list[list[int]]
    outputs: list[list[int]]


def trace(
    module: nn.Module, example: Any, lengths: Collection[str] = ()
) -> torch.export.ExportedProgram:
    """Trace a module's forward to a program that takes any number of rows.

    Args:
        module: its forward takes the arguments of `program_arguments`.
        example: a batch of inputs.
        lengths: names of inputs [N, T, ...] whose T may differ, too, where the forward allows it.

    Raises:
        ValueError: the forward fixes the number of rows.
    """
    arguments = program_arguments(example)
    # AUTO permits a forward that fixes the number of rows, which is refused below in one line.
    free = torch.export.Dim.AUTO
    named = named_tensors(example)
    sizes = [{0: free, 1: free} if name in lengths else {0: free} for name in named]
    shapes = (dict(zip(named, sizes, strict=True)),) if isinstance(example, dict) else (*sizes,)
    # One entry for `*arguments`.
    program = torch.export.export(module, arguments, dynamic_shapes=(shapes,))
    _require_any_rows(program, [*named_tensors(example)])
    # A region under autocast is a graph of its own inside the program.
    for graph in program.graph_module.modules():
        if isinstance(graph, torch.fx.GraphModule):
            _set_default_dtypes(graph)
    # The program would be saved with the batch, and the user's data stay out of the file.
    program.example_inputs = None
    return program


def _require_any_rows(program: torch.export.ExportedProgram, names: list[str]) -> None:
    """Refuse a program whose inputs have a fixed number of rows.

    Raises:
        ValueError: with the names of those inputs, where it has several.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found = [nodes[name].meta["val"] for name in program.graph_signature.user_inputs]
    fixed = [
        name for name, value in zip(names, found, strict=True) if not free_symbols(value.shape[0])
    ]
    if fixed:
        inputs = f" of {', '.join(fixed)}" if len(names) > 1 else ""
        raise ValueError(
            f"its forward takes {TRACED_ROWS} rows{inputs} for a constant, so it fits no other "
            "batch"
        )


def _set_default_dtypes(graph_module: torch.fx.GraphModule) -> None:
    """Write down the dtype of tensors that the forward creates."""
    # In a true precision it is torch's default dtype that the precision set here, which the process
    # that loads the program does not have.
    for node in graph_module.graph.nodes:
        created = node.meta.get("val")
        schema = getattr(node.target, "_schema", None)
        if schema is None or not isinstance(created, Tensor):
            continue
        if node.kwargs.get("dtype") is not None:
            continue
        # With a tensor among its arguments, an operation takes the dtype from that one.
        if any("Tensor" in str(argument.type) for argument in schema.arguments):
            continue
        positions = {argument.name: i for i, argument in enumerate(schema.arguments)}
        # Not where the dtype is given by its position.
        if positions.get("dtype", 0) >= len(node.args) > 0:
            node.kwargs = {**node.kwargs, "dtype": created.dtype}
    graph_module.recompile()


def traced_shapes(program: torch.export.ExportedProgram) -> TracedShapes:
    """Return the shapes of a program's inputs and outputs."""
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [_sizes(nodes[name].meta["val"]) for name in signature.user_inputs]
    given = [nodes[name].meta.get("val") for name in signature.user_outputs if name in nodes]
    outputs = [_sizes(value) for value in given if isinstance(value, Tensor)]
    return TracedShapes(inputs, outputs)


def _sizes(value: Tensor) -> list[int]:
    return [-1 if free_symbols(size) else int(size) for size in value.shape]
