"""Export a trained model as a program of plain torch operations (model.pt2).

The program loads without the classes that the model was made from.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.checkpoint.program_comparison import compare, output_tensors, tolerance_of
from runner.checkpoint.program_inputs import (
    TRACED_ROWS,
    ExportError,
    batch_of_arguments,
    error_line,
    first_rows,
    named_tensors,
    shortened,
    token_names,
)
from runner.checkpoint.program_trace import TracedShapes, trace, traced_shapes
from runner.precision.casting import cast_nest
from runner.precision.contract import CPU_DEVICE, Precision
from runner.precision.layers.exportable import exportable_copy
from runner.utils.files import write_with_torch
from runner.utils.import_warnings import suppress_import_warnings
from runner.utils.layout import EXPORTED_MODEL
from runner.utils.tensors import dtype_name

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
        ExportError: the model cannot be run, traced, saved or loaded, or the program's outputs
            differ from the model's.
    """
    # torch.compile's wrapper has the model in `_orig_mod`.
    model = getattr(model, "_orig_mod", model)
    path = folder / EXPORTED_MODEL
    with _as_export_errors(path):
        example = first_rows(example, TRACED_ROWS)
        write = partial(_write_program, model, precision, example, path, call)
        lengths = token_names(example)
        if lengths:
            # Some forwards fix the length of their sequences in ways that fail only when traced or
            # run. They are written once more, for the length of the batch.
            with suppress(Exception):
                return write(lengths)
        return write([])


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
        live = _EvaluationForward(model, precision, device, call)
        expected = live.of_batch(example)
        _refuse_lstm(model, precision, device)
        plain = exportable_copy(model)
        traced = _EvaluationForward(plain, precision, CPU_DEVICE, call)
        program = trace(_Program(traced, type(example)), example, lengths)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_with_torch(path) as file:
            torch.export.save(program, file)
        # The file is compared, not the program in memory: users get the file.
        loaded = torch.export.load(path).module()
        pairs = [(example, expected)]
        shapes = traced_shapes(program)
        named = zip(named_tensors(example), shapes.inputs, strict=True)
        free = [name for name, shape in named if name in lengths and shape[1] == -1]
        if free:
            shorter = shortened(example, free)
            pairs.append((shorter, live.of_batch(shorter)))
    facts = _facts(example, expected, shapes)
    for inputs, wanted in pairs:
        compare(loaded, inputs, wanted, tolerance_of(plain, precision, device))
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
        return cast_nest(_plain_container(output), self._precision.loss_dtype)


def _plain_container(output: Any) -> Any:
    """Return a library's mapping of outputs as a dict of its tensors with a batch of examples.

    Its class would have to be there when the program is loaded. Any other output is returned as it
    is.
    """
    if not isinstance(output, Mapping) or type(output) is dict:
        return output
    tensors = {name: part for name, part in output.items() if isinstance(part, Tensor)}
    return {name: part for name, part in tensors.items() if part.ndim > 0}


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


def _facts(example: Any, expected: Any, shapes: TracedShapes) -> dict[str, Any]:
    """Return the facts of ExportedModel.

    Raises:
        ExportError: MLflow cannot describe the inputs or outputs.
    """
    inputs = named_tensors(example)
    outputs = output_tensors(expected)
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
