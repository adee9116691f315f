"""Export a trained model as a program of plain torch operations (model.pt2).

The program loads without the classes that the model was made from.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves, tree_map

from runner.checkpoint.program_inputs import (
    InputError,
    batch_of_arguments,
    first_rows,
    named_tensors,
    program_arguments,
)
from runner.precision.casting import cast_nest
from runner.precision.contract import CPU_DEVICE, Precision
from runner.precision.layers.exportable import Plain8bit, PlainFloat8, exportable_copy
from runner.utils.files import os_error_reason, write_with_torch
from runner.utils.import_warnings import suppress_import_warnings
from runner.utils.layout import EXPORTED_MODEL
from runner.utils.tensors import dtype_name

TRACED_ROWS = 4
"""Rows of the batch that is traced and compared: torch.export takes one row for a constant."""
_DEVICE_EPS = 2**-10
"""Least relative error of a device's operations: TF32 has ten bits, and sums another order."""
_MESSAGE_CHARACTERS = 300

Forward = Callable[[nn.Module, Any], Any]
"""Returns what the task takes of a model's output for the inputs of a batch."""


class ExportError(Exception):
    """A model that cannot be exported; one line says why."""


@dataclass(frozen=True)
class ExportedModel:
    """An exported model's file, and the facts that a reader of it needs.

    Attributes:
        path: of model.pt2.
        facts: `inputs` and `outputs`, lists of {name, dtype, shape} with -1 for the batch,
            `torch`, the version that wrote it, `one_tensor`, whether input and output are single
            tensors, and `fields`, whether the program takes the inputs by name; all JSON.
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
        ExportError: the model cannot be run, traced, saved or loaded, or the program's outputs
            differ from the model's.
    """
    # torch.compile's wrapper has the model in `_orig_mod`.
    model = getattr(model, "_orig_mod", model)
    path = folder / EXPORTED_MODEL
    with _as_export_errors(path):
        example = first_rows(example, TRACED_ROWS)
        device = next(iter(named_tensors(example).values())).device
        with _evaluation_mode(model, precision, device), suppress_import_warnings():
            live = _EvaluationForward(model, precision, device, call)
            expected = live.of_batch(example)
            _refuse_lstm(model, precision, device)
            plain = exportable_copy(model)
            traced = _EvaluationForward(plain, precision, CPU_DEVICE, call)
            program = _trace(_Program(traced, type(example)), example)
            folder.mkdir(parents=True, exist_ok=True)
            with write_with_torch(path) as file:
                torch.export.save(program, file)
            # The file is compared, not the program in memory: users get the file.
            loaded = torch.export.load(path).module()
        facts = _facts(example, expected)
        _compare(loaded, example, expected, _tolerance(plain, precision, device))
        return ExportedModel(path, facts)


@contextmanager
def _as_export_errors(path: Path) -> Iterator[None]:
    """Turn any error inside into an ExportError, and remove the file."""
    # Any, because a model's forward is the user's code, and an export must not end a run that has
    # trained its weights.
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            path.unlink()
        raise ExportError(error_line(error)) from error


class _EvaluationForward(nn.Module):
    """A model with the casts and contexts that surround its forward in an evaluation."""

    def __init__(
        self, model: nn.Module, precision: Precision, device: torch.device, call: Forward
    ) -> None:
        super().__init__()
        self.model = model
        self._precision = precision
        self._device = device
        self._call = call
        self.training = model.training

    def of_batch(self, inputs: Any) -> Any:
        """Return the output for inputs as the data give them."""
        with self._precision.forward(self._device):
            output = self._call(self.model, self._precision.cast(inputs))
        return cast_nest(output, self._precision.loss_dtype)


class _Program(nn.Module):
    """The forward that is traced, with arguments that need no class of the runner."""

    def __init__(self, evaluated: _EvaluationForward, kind: type) -> None:
        super().__init__()
        self.evaluated = evaluated
        self._kind = kind
        self.training = evaluated.training

    def forward(self, *arguments: Any) -> Any:
        return self.evaluated.of_batch(batch_of_arguments(self._kind, arguments))


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


def _refuse_lstm(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Refuse an LSTM whose float16 kernel comes from this package.

    Raises:
        ExportError: the model has one.
    """
    # The only layer of its kind: torch itself has kernels for the others, which run where the
    # program is loaded. See runner.precision.emulation.float16.
    if precision.kernels() != "float32_accumulate":
        return
    is_autocast = isinstance(precision.forward(device), torch.autocast)
    if is_autocast and any(isinstance(module, nn.LSTM) for module in model.modules()):
        raise ExportError("torch has no float16 kernel on a CPU for an LSTM under autocast")


def _trace(module: nn.Module, example: Any) -> torch.export.ExportedProgram:
    """Trace a module's forward to a program that takes any number of rows.

    Raises:
        ValueError: the forward fixes the number of rows.
    """
    arguments = program_arguments(example)
    # AUTO permits a forward that fixes the number of rows, which is refused below in one line.
    shapes = tree_map(lambda _: {0: torch.export.Dim.AUTO}, arguments)
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


def _tolerance(plain: nn.Module, precision: Precision, device: torch.device) -> float:
    """Return the relative error that is allowed: half the digits of the compute dtype."""
    eps = torch.finfo(precision.compute).eps
    if device.type != "cpu":
        eps = max(eps, _DEVICE_EPS)
    # A last bit that differs in the input of such a layer may move a value to the next of the few
    # values that its format has.
    for module in plain.modules():
        if isinstance(module, Plain8bit | PlainFloat8):
            eps = max(eps, module.relative_step)
    # The square root halves the exponent, that is, the number of digits.
    return math.sqrt(eps)


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
    wanted = _tensors(expected)
    found = _tensors(outputs)
    if [t.shape for t in wanted] != [t.shape for t in found]:
        raise ExportError("the program's outputs have other shapes than the model's")
    distances = [_distance(a, b) for a, b in zip(wanted, found, strict=True)]
    # NumPy's maximum is NaN if any distance is; Python's depends on their order.
    error = np.max(distances, initial=0.0)
    # `not <=` refuses NaN, too.
    if not error <= tolerance:
        raise ExportError(
            f"the program's outputs differ from the model's by {error:.2g} of their size, more "
            f"than rounding explains ({tolerance:.2g})"
        )
    if [t.dtype for t in _tensors(outputs_of_one)] != [t.dtype for t in wanted]:
        raise ExportError("the program's outputs have other dtypes than the model's")


def _tensors(outputs: Any) -> list[Tensor]:
    """Return the tensors of nested containers."""
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _distance(wanted: Tensor, found: Tensor) -> float:
    """Return the 2-norm of the difference relative to the wanted values, where these are finite.

    It is infinite or NaN if a found value is not finite where the wanted one is.
    """
    # The outputs may be float16, whose squares overflow in a norm.
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a = wanted.detach().to(CPU_DEVICE, wide).flatten()
    b = found.detach().to(wide).flatten()
    # A model that has diverged is exported, too.
    finite = a.isfinite()
    a = a[finite]
    b = b[finite]
    # Equal values first, because zeros would give 0 / 0.
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a))


def _facts(example: Any, expected: Any) -> dict[str, Any]:
    """Return the facts of ExportedModel.

    Raises:
        ExportError: MLflow cannot describe the inputs or outputs.
    """
    inputs = named_tensors(example)
    outputs = _tensors(expected)
    for dtype in {t.dtype for t in (*inputs.values(), *outputs)}:
        # MLflow's signatures have NumPy's dtypes, which lack bfloat16 and FP8.
        if not hasattr(np, dtype_name(dtype)):
            raise ExportError(f"MLflow's signatures know no {dtype_name(dtype)}")
    if any(t.ndim == 0 or len(t) != TRACED_ROWS for t in outputs):
        raise ExportError("its outputs have no batch dimension")
    facts = {
        "file": EXPORTED_MODEL,
        "inputs": [_tensor_spec(name, tensor) for name, tensor in inputs.items()],
        "outputs": [_tensor_spec(f"output_{i}", tensor) for i, tensor in enumerate(outputs)],
        "one_tensor": isinstance(example, Tensor) and isinstance(expected, Tensor),
        "fields": isinstance(example, dict),
        "torch": str(torch.__version__),
    }
    # Fails here, as an ExportError, rather than when the facts are recorded.
    json.dumps(facts)
    return facts


def _tensor_spec(name: str, tensor: Tensor) -> dict[str, Any]:
    return {"name": name, "dtype": dtype_name(tensor.dtype), "shape": [-1, *tensor.shape[1:]]}


def error_line(error: Exception) -> str:
    """Return the kind of an error and its first line; of an ExportError its message alone."""
    if isinstance(error, ExportError | InputError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return os_error_reason(error)
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0][:_MESSAGE_CHARACTERS]}"
