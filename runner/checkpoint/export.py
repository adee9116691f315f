"""Export a trained model as a program of plain torch operations (model.pt2).

The program loads without the classes that the model was made from. Read here in this order: export
and write the program, trace it, describe it in facts, compare it with the model.
"""

import copy
import json
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

from runner.checkpoint.program_inputs import (
    TRACED_ROWS,
    ExportError,
    batch_of_arguments,
    error_line,
    first_rows,
    named_tensors,
    program_arguments,
    shortened,
    token_names,
)
from runner.precision.casting import cast_nest
from runner.precision.contract import CPU_DEVICE, Precision
from runner.utils.files import write_with_torch
from runner.utils.import_warnings import suppress_import_warnings
from runner.utils.layout import EXPORTED_MODEL
from runner.utils.tensors import dtype_name

_DEVICE_EPS = 2**-10
"""Least relative error of a device's operations: TF32 has ten bits, and sums another order."""
Forward = Callable[[nn.Module, Any], Any]
"""Returns what the task takes of a model's output for the inputs of a batch."""


@dataclass(frozen=True)
class ExportedModel:
    """An exported model's file, and the facts that a reader of it needs.

    Attributes:
        path: of model.pt2.
        facts: `inputs` and `outputs`, lists of {name, dtype, shape} with -1 for the batch,
            and other sizes that may differ, `torch`, the version that wrote it, `one_tensor`,
            whether input and output are single tensors, `one_output`, whether the output is, and
            `fields`, whether the program takes the inputs by name; all JSON.
    """

    path: Path
    facts: dict[str, Any]


def _call_with_tensor(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output for one argument."""
    return model(inputs)


def export(
    model: nn.Module,
    precision: Precision,
    example: Any,
    folder: Path,
    call: Forward = _call_with_tensor,
) -> ExportedModel:
    """Write the model as the evaluation runs it, on the CPU, for any number of rows.

    Call it inside `precision.session`. The program takes inputs as the data gives them (a tensor,
    a plain dict of tensors by field, or several tensors by position) and gives outputs as the task
    gets them, in `precision.loss_dtype`. The model, its modes, the random states and the process's
    settings are the same before and after.

    Args:
        model: converted, on its device.
        precision: casts the inputs and surrounds the forward.
        example: a batch of inputs [N, ...], N from 1, on the model's device: a tensor, a dict of
            tensors, or PositionalInputs.
        folder: where model.pt2 is written; made if it is missing.
        call: returns what the task takes of the output of a model for inputs of the example's
            kind.

    Raises:
        ExportError: the precision replaces layers, the model cannot be run, traced, saved or
            loaded, or the program's outputs differ from the model's.
    """
    # torch.compile's wrapper has the model in `_orig_mod`.
    model = getattr(model, "_orig_mod", model)
    path = folder / EXPORTED_MODEL
    # Any error, because a model's forward is the user's code, and an export must not end a run that
    # has trained its weights.
    try:
        _check_layers(model, precision)
        example = first_rows(example, TRACED_ROWS)
        lengths = token_names(example)
        if lengths:
            # Some forwards fix the length of their sequences in ways that fail only when traced or
            # run. They are written once more, for the length of the batch.
            with suppress(Exception):
                return _write_program(model, precision, example, path, call, lengths)
        return _write_program(model, precision, example, path, call, [])
    except Exception as error:
        with suppress(OSError):
            path.unlink()
        raise ExportError(error_line(error)) from error


def _check_layers(model: nn.Module, precision: Precision) -> None:
    """Refuse layers that no program of plain operations can hold.

    Raises:
        ExportError: the model has one.
    """
    if precision.converts_layers:
        raise ExportError(
            f"torch.export cannot write the layers of precision={precision.name} "
            f"({precision.storage_format} weights, {precision.compute_format})"
        )
    # An LSTM is the only layer whose float16 kernel comes from this package: torch itself has
    # kernels for the others, which run where the program is loaded. See
    # runner.precision.emulation.cpu_kernels.
    if precision.kernels() != "float32_accumulate":
        return
    is_autocast = isinstance(precision.forward(CPU_DEVICE), torch.autocast)
    if is_autocast and any(isinstance(module, nn.LSTM) for module in model.modules()):
        raise ExportError("torch has no float16 kernel on a CPU for an LSTM under autocast")


def _write_program(
    model: nn.Module,
    precision: Precision,
    example: Any,
    path: Path,
    call: Forward,
    lengths: list[str],
) -> ExportedModel:
    """Trace, save, load and compare a program; see `export`.

    Args:
        model: converted, on its device.
        precision: casts the inputs and surrounds the forward.
        example: of TRACED_ROWS rows.
        path: of the file.
        call: returns what the task takes of the output.
        lengths: names of inputs [N, T] whose T may differ from the example's.
    """
    device = next(iter(named_tensors(example).values())).device
    with _evaluation_mode(model, precision, device), suppress_import_warnings():
        kind = type(example)
        live = _EvaluationForward(model, precision, device, call, kind)
        expected = live.of_batch(example)
        traced = _EvaluationForward(_on_cpu(model), precision, CPU_DEVICE, call, kind)
        program = _trace(traced, example, lengths)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_with_torch(path) as file:
            torch.export.save(program, file)
        # The file is compared, not the program in memory: users get the file.
        loaded = torch.export.load(path).module()
        pairs = [(example, expected)]
        shapes = _traced_shapes(program)
        named = zip(named_tensors(example), shapes.inputs, strict=True)
        free = [name for name, shape in named if name in lengths and shape[1] == -1]
        if free:
            shorter = shortened(example, free)
            pairs.append((shorter, live.of_batch(shorter)))
    facts = _facts(example, expected, shapes)
    # Half the digits of the compute dtype, for the square root halves the exponent.
    eps = torch.finfo(precision.compute).eps
    tolerance = math.sqrt(eps if device.type == "cpu" else max(eps, _DEVICE_EPS))
    for inputs, outputs in pairs:
        _compare(loaded, inputs, outputs, tolerance)
    return ExportedModel(path, facts)


def _on_cpu(model: nn.Module) -> nn.Module:
    """Return a model on the CPU: the given one where it is there, else a copy."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device == CPU_DEVICE for tensor in tensors):
        return model
    # Tensors are copied straight to the CPU: a second model may not fit on the device. A subclass
    # of Tensor may hold more than its numbers, and is copied by its own __deepcopy__.
    memo: dict[int, Any] = {id(t): _cpu_copy(t) for t in tensors if type(t) in _TORCH_TENSORS}
    return copy.deepcopy(model, memo).to(CPU_DEVICE)


_TORCH_TENSORS = (Tensor, nn.Parameter)


def _cpu_copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to(CPU_DEVICE)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


class _EvaluationForward(nn.Module):
    """A model with the casts and contexts that surround its forward in an evaluation.

    Its own forward takes arguments that need no class of the runner, see `program_inputs`.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        call: Forward,
        kind: type,
    ) -> None:
        super().__init__()
        self.model = model
        self._precision = precision
        self._device = device
        self._call = call
        self._kind = kind
        self.training = model.training

    def of_batch(self, inputs: Any) -> Any:
        """Return the output for inputs as the data give them."""
        with self._precision.forward(self._device):
            output = self._call(self.model, self._precision.cast(inputs))
        return cast_nest(_plain_container(output), self._precision.loss_dtype)

    def forward(self, *arguments: Any) -> Any:
        return self.of_batch(batch_of_arguments(self._kind, arguments))


def _plain_container(output: Any) -> Any:
    """Return a library's mapping of outputs as a dict of its tensors with a batch of examples.

    Its class would have to be there when the program is loaded. Any other output is returned as it
    is.
    """
    if not isinstance(output, Mapping) or type(output) is dict:
        return output
    tensors = {name: part for name, part in output.items() if isinstance(part, Tensor)}
    return {name: part for name, part in tensors.items() if part.ndim > 0}


@contextmanager
def _evaluation_mode(
    model: nn.Module, precision: Precision, device: torch.device
) -> Iterator[None]:
    """Put the model in evaluation mode without gradients; restore modes and random states after."""
    # One by one: a user's module may be in evaluation mode while the model trains.
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.no_grad())
        stack.callback(_restore_modes, modes)
        model.eval()
        # Entered last, so that it ends before the modes are restored.
        stack.enter_context(precision.eval_context(model))
        yield


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


class _TracedShapes(NamedTuple):
    """Shapes of a program's input and output tensors, with -1 for sizes that may differ."""

    inputs: list[list[int]]
    outputs: list[list[int]]


def _trace(
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


def _traced_shapes(program: torch.export.ExportedProgram) -> _TracedShapes:
    """Return the shapes of a program's inputs and outputs."""
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [_sizes(nodes[name].meta["val"]) for name in signature.user_inputs]
    given = [nodes[name].meta.get("val") for name in signature.user_outputs if name in nodes]
    outputs = [_sizes(value) for value in given if isinstance(value, Tensor)]
    return _TracedShapes(inputs, outputs)


def _sizes(value: Tensor) -> list[int]:
    return [-1 if free_symbols(size) else int(size) for size in value.shape]


def _facts(example: Any, expected: Any, shapes: _TracedShapes) -> dict[str, Any]:
    """Return the facts of ExportedModel.

    Raises:
        ExportError: MLflow cannot describe the inputs or outputs.
    """
    inputs = named_tensors(example)
    outputs = _output_tensors(expected)
    for dtype in {t.dtype for t in (*inputs.values(), *outputs)}:
        # MLflow's signatures have NumPy's dtypes, which lack bfloat16 and FP8.
        if not hasattr(np, dtype_name(dtype)):
            raise ExportError(f"MLflow's signatures know no {dtype_name(dtype)}")
    if any(t.ndim == 0 or len(t) != TRACED_ROWS for t in outputs):
        raise ExportError("its outputs have no batch dimension")
    names = [f"output_{i}" for i in range(len(outputs))]
    if isinstance(expected, dict) and len(expected) == len(outputs):
        names = [str(name) for name in expected]
    facts = {
        "file": EXPORTED_MODEL,
        "inputs": _tensor_specs(inputs, [*inputs.values()], shapes.inputs),
        "outputs": _tensor_specs(names, outputs, shapes.outputs),
        "one_tensor": isinstance(example, Tensor) and isinstance(expected, Tensor),
        "fields": isinstance(example, dict),
        "one_output": isinstance(expected, Tensor),
        "torch": str(torch.__version__),
    }
    # Fails here, as an ExportError, rather than when the facts are recorded.
    json.dumps(facts)
    return facts


def _tensor_specs(
    names: Iterable[str], tensors: list[Tensor], shapes: list[list[int]]
) -> list[dict[str, Any]]:
    """Return name, dtype and shape of each tensor, with -1 for sizes that may differ."""
    # An output that is a constant or an input is no node of its own in the program.
    if len(shapes) != len(tensors):
        shapes = [[-1, *tensor.shape[1:]] for tensor in tensors]
    rows = zip(names, tensors, shapes, strict=True)
    return [
        {"name": name, "dtype": dtype_name(tensor.dtype), "shape": shape}
        for name, tensor, shape in rows
    ]


def _compare(loaded: Any, example: Any, expected: Any, tolerance: float) -> None:
    """Run the program on the batch and on its first row, and compare it with the model.

    Args:
        loaded: the program, read from its file.
        example: the batch that was traced.
        expected: the model's outputs of it.
        tolerance: greatest relative error in the 2-norm of each output.

    Raises:
        ExportError: the program fails, or its outputs differ.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outputs = loaded(*program_arguments(example))
            outputs_of_one = loaded(*program_arguments(first_rows(example, 1)))
        except Exception as error:
            raise ExportError(f"the program does not run: {error_line(error)}") from error
    model_tensors = _output_tensors(expected)
    tensors = _output_tensors(outputs)
    if [t.shape for t in model_tensors] != [t.shape for t in tensors]:
        raise ExportError("the program's outputs have other shapes than the model's")
    distances = [_distance(a, b) for a, b in zip(model_tensors, tensors, strict=True)]
    # NumPy's maximum is NaN if any distance is; Python's depends on their order.
    error = np.max(distances, initial=0.0)
    # `not <=` refuses NaN, too.
    if not error <= tolerance:
        raise ExportError(
            f"the program's outputs differ from the model's by {error:.2g} of their size, more "
            f"than rounding explains ({tolerance:.2g})"
        )
    if [t.dtype for t in _output_tensors(outputs_of_one)] != [t.dtype for t in model_tensors]:
        raise ExportError("the program's outputs have other dtypes than the model's")


def _output_tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _distance(expected: Tensor, output: Tensor) -> float:
    """Return the 2-norm of the difference relative to the expected values, where these are finite.

    It is infinite or NaN if an output is not finite where the expected one is.
    """
    # The outputs may be float16, whose squares overflow in a norm.
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a = expected.detach().to(CPU_DEVICE, wide).flatten()
    b = output.detach().to(wide).flatten()
    # A model that has diverged is exported, too.
    finite = a.isfinite()
    a = a[finite]
    b = b[finite]
    # Equal values first, because zeros would give 0 / 0.
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a))
