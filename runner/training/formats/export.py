"""Export a trained model as a program of plain torch operations (model.pt2).

The program loads without the classes that the model was made from, and takes plain containers of
tensors. Read here in this order: export and write the program, trace it, describe it in facts,
compare it with the model, inputs.

| inputs of a batch | arguments of the program |
| --- | --- |
| a tensor | the tensor |
| a dict, KeywordInputs | one plain dict |
| PositionalInputs | the tensors, by position |
"""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_symbols
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from runner.core import (
    ConversionPlan,
    Precision,
    batch_layout,
    errors,
    files,
    layout,
    tensor_facts,
    terminal,
)
from runner.precision.layers.experts import Experts

# Rows of the batch that is traced and compared: torch.export takes one row for a constant.
_TRACED_ROWS = 4
# Least relative error of a device's operations: TF32 has ten bits, and sums another order.
_DEVICE_EPS = 2**-10
_MESSAGE_CHARACTERS = 300
Forward = Callable[[nn.Module, Any], Any]
"""Returns what the task takes of a model's output for the inputs of a batch."""


class ExportError(Exception):
    """A model that cannot be exported, or inputs that no program can take; one line says why."""


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


def error_line(error: Exception) -> str:
    """Return the kind of an error and its first line; of an ExportError its message alone."""
    if isinstance(error, ExportError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return files.os_error_reason(error)
    text = errors.first_line(error)[:_MESSAGE_CHARACTERS]
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def export(
    model: nn.Module,
    precision: Precision,
    example: Any,
    folder: Path,
    call: Forward = lambda model, inputs: model(inputs),
    plan: ConversionPlan = ConversionPlan(),
) -> ExportedModel:
    """Write the model as the evaluation runs it, on the CPU, for any number of rows.

    Call it inside `precision.session`. The program takes inputs as the data gives them (a tensor,
    a plain dict of tensors by field, or several tensors by position) and gives outputs as the task
    gets them, cast by `precision.loss_pair`. The model, its modes, the random states and the
    process's settings are the same before and after.

    Args:
        model: converted, on its device.
        precision: casts the inputs and surrounds the forward.
        example: a batch of inputs [N, ...], N from 1, on the model's device: a tensor, a dict of
            tensors, or PositionalInputs.
        folder: where model.pt2 is written; made if it is missing.
        call: returns what the task takes of the output of a model for inputs of the example's
            kind.
        plan: by which the model was converted and is called.

    Raises:
        ExportError: the precision replaces layers, the model cannot be run, traced, saved or
            loaded, or the program's outputs differ from the model's.
    """
    # torch.compile's wrapper has the model in `_orig_mod`.
    model = getattr(model, "_orig_mod", model)
    path = folder / layout.EXPORTED_MODEL

    def evaluate(device: torch.device, model: nn.Module, inputs: Any) -> Any:
        """Return a model's output with the casts and contexts of an evaluation."""
        with precision.forward(device, plan):
            output = call(model, precision.cast(inputs, plan))
        # A library's mapping becomes a dict of its tensors with a batch of examples: its class
        # would have to be there when the program is loaded.
        if isinstance(output, Mapping) and type(output) is not dict:
            tensors = {name: part for name, part in output.items() if isinstance(part, Tensor)}
            output = {name: part for name, part in tensors.items() if part.ndim > 0}
        return precision.loss_pair(output, None)[0]

    # Any error, because a model's forward is the user's code, and an export must not end a run that
    # has trained its weights.
    try:
        check_layers(model, precision)
        example = _first_rows(example, _TRACED_ROWS)
        write = partial(_write_program, model, precision, example, path, evaluate)
        # Inputs that look like sequences: whole numbers [N, T], T from 2.
        lengths = [
            name
            for name, tensor in _named_tensors(example).items()
            if tensor.ndim == 2 and tensor.shape[1] > 1 and not tensor.is_floating_point()
        ]
        if lengths:
            # Some forwards fix the length of their sequences in ways that fail only when traced or
            # run. They are written once more, for the length of the batch.
            with suppress(Exception):
                return write(lengths)
        return write([])
    except Exception as error:
        with suppress(OSError):
            path.unlink()
        raise ExportError(error_line(error)) from error


def check_layers(model: nn.Module, precision: Precision) -> None:
    """Refuse layers that no program of plain operations can hold, and names that are source code.

    Raises:
        ExportError: the model has one.
    """
    # torch.fx writes any other name into Python source as it is, and runs that.
    for module in model.modules():
        for name in (*module._modules, *module._parameters, *module._buffers):
            if not (name.isidentifier() or name.isdecimal()):
                raise ExportError(
                    f"torch.export takes names of letters, digits and _, not {name[:99]!r}"
                )
    if precision.converts_layers:
        raise ExportError(
            f"torch.export cannot write the layers of precision={precision.name} "
            f"({precision.storage_format} weights, {precision.compute_format})"
        )
    if any(isinstance(module, Experts) for module in model.modules()):
        raise ExportError("torch.export cannot write the additions of an adapter to experts")
    # An LSTM is the only layer whose float16 kernel comes from this package: torch itself has
    # kernels for the others, which run where the program is loaded. See
    # runner.precision.emulation.cpu_kernels.
    device = next((parameter.device for parameter in model.parameters()), tensor_facts.CPU_DEVICE)
    if precision.kernels(model, device) != "float32_accumulate":
        return
    is_autocast = isinstance(precision.forward(tensor_facts.CPU_DEVICE), torch.autocast)
    if is_autocast and any(isinstance(module, nn.LSTM) for module in model.modules()):
        raise ExportError("torch has no float16 kernel on a CPU for an LSTM under autocast")


def _write_program(
    model: nn.Module,
    precision: Precision,
    example: Any,
    path: Path,
    evaluate: Callable[..., Any],
    lengths: list[str],
) -> ExportedModel:
    """Trace, save, load and compare a program; see `export`.

    Args:
        model: converted, on its device.
        precision: casts the inputs and surrounds the forward.
        example: of _TRACED_ROWS rows.
        path: of the file.
        evaluate: computes a model's output of inputs on a device.
        lengths: names of inputs [N, T] whose T may differ from the example's.
    """
    device = next(iter(_named_tensors(example).values())).device
    # Fake tensors would log a traceback of what the export's error says.
    silent = terminal.suppress_warnings(logging.ERROR)
    with _evaluation_mode(model, precision, device), silent:
        expected = evaluate(device, model, example)
        program = _trace(_ProgramForward(_on_cpu(model), evaluate, type(example)), example, lengths)
        shapes = _traced_shapes(program, [*_named_tensors(example)])
        with files.write_with_torch(path) as file:
            torch.export.save(program, file)
        # The file is compared, not the program in memory: users get the file.
        loaded = torch.export.load(path).module()
        pairs = [(example, expected)]
        shorter = _shortened(example, shapes[0])
        if shorter is not None:
            pairs.append((shorter, evaluate(device, model, shorter)))
    facts = _facts(example, expected, *shapes)
    # Half the digits of the compute dtype, for the square root halves the exponent.
    eps = torch.finfo(precision.compute).eps
    tolerance = math.sqrt(eps if device.type == "cpu" else max(eps, _DEVICE_EPS))
    for inputs, outputs in pairs:
        _compare(loaded, inputs, outputs, tolerance)
    return ExportedModel(path, facts)


class _ProgramForward(nn.Module):
    """A model's evaluation on the CPU, from the arguments of the program."""

    def __init__(self, model: nn.Module, evaluate: Callable[..., Any], kind: type) -> None:
        super().__init__()
        self.model = model
        self._evaluate = evaluate
        self._kind = kind
        self.training = model.training

    def forward(self, *arguments: Any) -> Any:
        inputs = arguments[0]
        if issubclass(self._kind, dict):
            inputs = self._kind(inputs)
        elif self._kind is batch_layout.PositionalInputs:
            inputs = batch_layout.PositionalInputs(arguments)
        try:
            return self._evaluate(tensor_facts.CPU_DEVICE, self.model, inputs)
        except GuardOnDataDependentSymNode as error:
            # torch.export prints the graph up to here for torch's own error.
            what = "its forward decides by the data what it computes"
            raise ExportError(f"{what}, which torch.export cannot write") from error


def _on_cpu(model: nn.Module) -> nn.Module:
    """Return a model on the CPU: the given one where it is there, else a copy."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device == tensor_facts.CPU_DEVICE for tensor in tensors):
        return model
    # Tensors are copied straight to the CPU: a second model may not fit on the device. A subclass
    # of Tensor may hold more than its numbers, and is copied by its own __deepcopy__.
    copies = {}
    for tensor in tensors:
        if type(tensor) in (Tensor, nn.Parameter):
            copies[id(tensor)] = tensor.detach().to(tensor_facts.CPU_DEVICE)
        if type(tensor) is nn.Parameter:
            copies[id(tensor)] = nn.Parameter(copies[id(tensor)], tensor.requires_grad)
    return copy.deepcopy(model, copies).to(tensor_facts.CPU_DEVICE)


@contextmanager
def _evaluation_mode(
    model: nn.Module, precision: Precision, device: torch.device
) -> Iterator[None]:
    """Put the model in evaluation mode without gradients; restore modes and random states after."""
    # One by one: a user's module may be in evaluation mode while the model trains.
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            model.eval()
            with precision.eval_context(model):
                yield
        finally:
            for module, training in modes:
                module.training = training


def _trace(module: nn.Module, example: Any, lengths: list[str]) -> torch.export.ExportedProgram:
    """Trace a module's forward to a program that takes any number of rows.

    Args:
        module: its forward takes the arguments of `_program_arguments`.
        example: a batch of inputs.
        lengths: names of inputs [N, T, ...] whose T may differ, too, where the forward allows it.
    """
    arguments = _program_arguments(example)
    # AUTO permits a forward that fixes the number of rows, which _traced_shapes refuses.
    free = torch.export.Dim.AUTO
    named = _named_tensors(example)
    sizes = [{0: free, 1: free} if name in lengths else {0: free} for name in named]
    shapes = (dict(zip(named, sizes, strict=True)),) if isinstance(example, dict) else (*sizes,)
    # One entry for `*arguments`.
    program = torch.export.export(module, arguments, dynamic_shapes=(shapes,))
    # A region under autocast is a graph of its own inside the program.
    for graph in program.graph_module.modules():
        if isinstance(graph, torch.fx.GraphModule):
            _set_default_dtypes(graph)
    # The program would be saved with the batch, and the user's data stay out of the file.
    program.example_inputs = None
    return program


def _traced_shapes(
    program: torch.export.ExportedProgram, names: list[str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the shapes of a program's inputs and outputs, with -1 for sizes that may differ.

    Args:
        program: traced.
        names: of its inputs.

    Raises:
        ValueError: its inputs have a fixed number of rows.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [_sizes(values[name]) for name in signature.user_inputs]
    outputs = [values.get(name) for name in signature.user_outputs]
    fixed = [name for name, sizes in zip(names, inputs, strict=True) if sizes[0] != -1]
    if fixed:
        several = f" of {', '.join(fixed)}" if len(names) > 1 else ""
        raise ValueError(f"its forward takes {_TRACED_ROWS} rows{several} for a constant")
    return inputs, [_sizes(value) for value in outputs if isinstance(value, Tensor)]


def _sizes(value: Tensor) -> list[int]:
    return [-1 if free_symbols(size) else int(size) for size in value.shape]


def _set_default_dtypes(graph_module: torch.fx.GraphModule) -> None:
    """Write down the dtype of tensors that the forward creates."""
    # In a true precision it is torch's default dtype that the precision set here, which the process
    # that loads the program does not have.
    for node in graph_module.graph.nodes:
        created = node.meta.get("val")
        schema = getattr(node.target, "_schema", None)
        if schema is None or not isinstance(created, Tensor):
            continue
        # With a tensor among its arguments, an operation takes the dtype from that one.
        takes_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
        names = [argument.name for argument in schema.arguments]
        # A dtype that is given by its name or its position stays.
        position = names.index("dtype") if "dtype" in names else 0
        is_free = node.kwargs.get("dtype") is None and position >= len(node.args) > 0
        if is_free and not takes_tensor:
            node.kwargs = {**node.kwargs, "dtype": created.dtype}
    graph_module.recompile()


def _facts(
    example: Any, expected: Any, input_shapes: list[list[int]], output_shapes: list[list[int]]
) -> dict[str, Any]:
    """Return the facts of ExportedModel.

    Raises:
        ExportError: MLflow cannot describe the inputs or outputs.
    """
    inputs = _named_tensors(example)
    outputs = _output_tensors(expected)
    for dtype in {t.dtype for t in (*inputs.values(), *outputs)}:
        # MLflow's signatures have NumPy's dtypes, which lack bfloat16 and FP8.
        if not hasattr(np, tensor_facts.dtype_name(dtype)):
            raise ExportError(f"MLflow's signatures know no {tensor_facts.dtype_name(dtype)}")
    if any(t.shape[:1] != (_TRACED_ROWS,) for t in outputs):
        raise ExportError("its outputs have no batch dimension")
    names = [f"output_{i}" for i in range(len(outputs))]
    if isinstance(expected, dict) and len(expected) == len(outputs):
        names = [str(name) for name in expected]
    return {
        "inputs": _tensor_specs(inputs, [*inputs.values()], input_shapes),
        "outputs": _tensor_specs(names, outputs, output_shapes),
        "one_tensor": isinstance(example, Tensor) and isinstance(expected, Tensor),
        "fields": isinstance(example, dict),
        "one_output": isinstance(expected, Tensor),
        "torch": str(torch.__version__),
    }


def _tensor_specs(
    names: Iterable[str], tensors: list[Tensor], shapes: list[list[int]]
) -> list[dict[str, Any]]:
    """Return name, dtype and shape of each tensor, with -1 for sizes that may differ."""
    # An output that is a constant or an input is no node of its own in the program.
    if len(shapes) != len(tensors):
        shapes = [[-1, *tensor.shape[1:]] for tensor in tensors]
    rows = zip(names, tensors, shapes, strict=True)
    return [
        {"name": name, "dtype": tensor_facts.dtype_name(tensor.dtype), "shape": shape}
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
            outputs = loaded(*_program_arguments(example))
            outputs_of_one = loaded(*_program_arguments(_first_rows(example, 1)))
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
            f"the program's outputs differ from the model's by {error:.2g}, above {tolerance:.2g}"
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
    a = expected.detach().to(tensor_facts.CPU_DEVICE, wide).flatten()
    b = output.detach().to(wide).flatten()
    # A model that has diverged is exported, too.
    finite = a.isfinite()
    a = a[finite]
    b = b[finite]
    # Equal values first, because zeros would give 0 / 0.
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a))


def _named_tensors(inputs: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch's inputs by name, in order.

    A single tensor has the name inputs; tensors by position are input_0, input_1, ...

    Raises:
        ExportError: an input is no tensor with a batch of examples, or they differ in their number.
    """
    if isinstance(inputs, dict):
        named = {str(name): value for name, value in inputs.items()}
    elif type(inputs) is batch_layout.PositionalInputs:
        named = {f"input_{i}": value for i, value in enumerate(inputs)}
    else:
        named = {"inputs": inputs}
    if not named:
        raise ExportError("its forward takes no field of a batch")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or not len(value):
            which = "input" if value is inputs else f"input {name}"
            kind = type(value).__name__
            raise ExportError(f"its {which} is no tensor with a batch of examples, but a {kind}")
    if len({len(value) for value in named.values()}) > 1:
        sizes = ", ".join(f"{name}: {len(value)}" for name, value in named.items())
        raise ExportError(f"its inputs differ in their number of examples ({sizes})")
    return named


def _first_rows(inputs: Any, count: int) -> Any:
    """Return `count` rows of each tensor, in the inputs' own container; a short batch is repeated.

    Raises:
        ExportError: as _named_tensors.
    """
    _named_tensors(inputs)
    return tree_map(lambda t: t[torch.arange(count, device=t.device) % len(t)], inputs)


def _program_arguments(inputs: Any) -> tuple[Any, ...]:
    """Return the arguments of the program for inputs, on the CPU."""
    tensors = [tensor.to(tensor_facts.CPU_DEVICE) for tensor in _named_tensors(inputs).values()]
    return (dict(zip(inputs, tensors, strict=True)),) if isinstance(inputs, dict) else (*tensors,)


def _shortened(inputs: Any, shapes: list[list[int]]) -> Any:
    """Return a batch whose sequences are cut to half of their length, 2 and up; None without any.

    Args:
        inputs: of the batch that was traced.
        shapes: of the program's inputs, see _traced_shapes.
    """
    tensors = _named_tensors(inputs)
    free = [name for name, shape in zip(tensors, shapes, strict=True) if -1 in shape[1:2]]
    for name in free:
        length = tensors[name].shape[1]
        # Contiguous, as the tensors of a batch are: some forwards view them in another shape.
        tensors[name] = tensors[name][:, : max(length // 2, 2)].contiguous()
    return tree_unflatten([*tensors.values()], tree_structure(inputs)) if free else None
