"""Export a trained model as a program of plain torch operations (model.pt2).

The program loads without the classes that the model was made from.
"""

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.precision.casting import cast_nest
from runner.precision.layers.exportable import Plain8bit, PlainFloat8, exportable_copy
from runner.precision.precision import CPU_DEVICE, Precision
from runner.utils.files import os_error_reason, write_with_torch
from runner.utils.layout import EXPORTED_MODEL
from runner.utils.quiet_import import quiet_imports

ROWS = 4
"""Rows of the batch that is traced and compared: torch.export takes one row for a constant."""


class ExportError(Exception):
    """The model cannot be exported; one line says why."""


@dataclass(frozen=True)
class ExportedModel:
    """What was written, and what a reader of it must know.

    Attributes:
        path: of model.pt2.
        facts: `inputs` and `outputs`, lists of {name, dtype, shape} with -1 for the batch, and
            `torch`, the version that wrote it, `one_tensor`, whether the output is a single
            tensor and no nest; all JSON.
    """

    path: Path
    facts: dict[str, Any]


def export(model: nn.Module, precision: Precision, example: Tensor, folder: Path) -> ExportedModel:
    """Write the model as the evaluation runs it, on the CPU_DEVICE, for any number of rows.

    Call it inside `precision.session`. The program takes inputs as the data gives them and gives
    outputs as the task gets them, in `precision.loss_dtype`. The model, its modes and the process
    stay as they were.

    Args:
        model: converted, on its device.
        precision: casts the inputs and surrounds the forward.
        example: a batch of inputs [N, ...], N from 1, on the model's device.
        folder: where model.pt2 is written; made if need be.

    Raises:
        ExportError: it cannot be run, traced, saved or loaded, or the program computes otherwise.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    path = folder / EXPORTED_MODEL
    with _refusing(path):
        example = _rows(example)
        with _evaluating(model, precision, example.device), quiet_imports():
            live = _Evaluated(model, precision, example.device)(example)
            _refuse_lstm(model, precision, example.device)
            plain = exportable_copy(model)
            program = _trace(_Evaluated(plain, precision, CPU_DEVICE), example.to(CPU_DEVICE))
            folder.mkdir(parents=True, exist_ok=True)
            with write_with_torch(path) as file:
                torch.export.save(program, file)
            loaded = torch.export.load(path).module()
        facts = _facts(example, live)
        _compare(loaded, example, live, _tolerance(plain, precision, example.device))
        return ExportedModel(path, facts)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn any error inside into an ExportError, and remove the file."""
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            path.unlink()
        raise ExportError(line(error)) from error


class _Evaluated(nn.Module):
    """A model with what surrounds its forward in an evaluation."""

    def __init__(self, model: nn.Module, precision: Precision, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._precision, self._device = precision, device
        self.training = model.training

    def forward(self, inputs: Tensor) -> Any:
        with self._precision.forward(self._device):
            output = self.model(self._precision.cast(inputs))
        return cast_nest(output, self._precision.loss_dtype)


@contextmanager
def _evaluating(model: nn.Module, precision: Precision, device: torch.device) -> Iterator[None]:
    """Put the model in evaluation mode without gradients; restore modes and random states after."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.no_grad())
        stack.callback(_restore, modes)
        model.eval()
        stack.enter_context(precision.eval_context(model))
        yield


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _rows(example: Tensor) -> Tensor:
    """Return ROWS rows of the batch; a shorter batch is repeated."""
    if not isinstance(example, Tensor) or example.ndim < 1 or not len(example):
        kind = type(example).__name__
        raise ExportError(f"its input is no tensor with a batch of examples, but a {kind}")
    return example[torch.arange(ROWS, device=example.device) % len(example)]


def _refuse_lstm(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Refuse the one layer that runs here by the kernels of runner.precision.emulation.float16
    alone, and so would not run where the program is loaded."""
    lent = precision.kernels() == "float32_accumulate"
    lent = lent and isinstance(precision.forward(device), torch.autocast)
    if lent and any(isinstance(module, nn.LSTM) for module in model.modules()):
        raise ExportError("torch has no float16 kernel on a CPU for an LSTM under autocast")


def _trace(module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim.AUTO},)
    program = torch.export.export(module, (example,), dynamic_shapes=shapes)
    if not program.range_constraints:  # of the one dimension that may vary
        raise ValueError(f"its forward takes {ROWS} rows for a constant, so it fits no other batch")
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            _name_dtypes(part)
    program.example_inputs = None  # the data stay out of the file
    return program


def _name_dtypes(part: torch.fx.GraphModule) -> None:
    """Write down the dtype of tensors that the forward creates, which was the default one."""
    for node in part.graph.nodes:
        made, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
        if schema is None or not isinstance(made, Tensor) or node.kwargs.get("dtype") is not None:
            continue
        takes = {argument.name: i for i, argument in enumerate(schema.arguments)}
        fresh = not any("Tensor" in str(argument.type) for argument in schema.arguments)
        if fresh and takes.get("dtype", 0) >= len(node.args) > 0:
            node.kwargs = {**node.kwargs, "dtype": made.dtype}
    part.recompile()


def _tolerance(plain: nn.Module, precision: Precision, device: torch.device) -> float:
    """Return the relative error that is allowed: half the digits of the compute dtype."""
    eps = torch.finfo(precision.compute).eps
    if device.type != "cpu":
        eps = max(eps, 2**-10)  # TF32, and other orders of sums
    for module in plain.modules():  # where a last bit moves a value to the next of the few
        if isinstance(module, Plain8bit | PlainFloat8):
            eps = max(eps, module.relative_step)
    return math.sqrt(eps)


def _compare(loaded: Any, example: Tensor, live: Any, tolerance: float) -> None:
    """Run the program on the batch and on its first row.

    Raises:
        ExportError: it fails, or differs from the live outputs.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = loaded(example.to(CPU_DEVICE))
            single = loaded(example[:1].to(CPU_DEVICE))
        except Exception as error:
            raise ExportError(f"the program does not run: {line(error)}") from error
    wanted, made = _leaves(live), _leaves(found)
    if [t.shape for t in wanted] != [t.shape for t in made]:
        raise ExportError("the program's outputs have other shapes than the model's")
    distances = [_distance(a, b) for a, b in zip(wanted, made, strict=True)]
    error = np.max(distances, initial=0.0)  # NaN if any is
    if not error <= tolerance:
        raise ExportError(
            f"the program's outputs differ from the model's by {error:.2g} of their size, more "
            f"than rounding explains ({tolerance:.2g})"
        )
    if [t.dtype for t in _leaves(single)] != [t.dtype for t in wanted]:
        raise ExportError("the program's outputs have other dtypes than the model's")


def _leaves(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _distance(wanted: Tensor, found: Tensor) -> float:
    """Return the 2-norm of the difference relative to the wanted values, where these are finite.

    It is infinite or NaN if a found value is not finite where the wanted one is.
    """
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = wanted.detach().to(CPU_DEVICE, wide).flatten(), found.detach().to(wide).flatten()
    finite = a.isfinite()
    a, b = a[finite], b[finite]
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(a))


def _facts(example: Tensor, live: Any) -> dict[str, Any]:
    leaves = _leaves(live)
    for dtype in {t.dtype for t in (example, *leaves)}:
        if not hasattr(np, _name(dtype)):
            raise ExportError(f"MLflow's signatures know no {_name(dtype)}")
    if any(t.ndim == 0 or len(t) != ROWS for t in leaves):
        raise ExportError("its outputs have no batch dimension")
    facts = {
        "file": EXPORTED_MODEL,
        "inputs": [_spec("inputs", example)],
        "outputs": [_spec(f"output_{i}", tensor) for i, tensor in enumerate(leaves)],
        "one_tensor": isinstance(live, Tensor),
        "torch": str(torch.__version__),
    }
    json.dumps(facts)
    return facts


def _spec(name: str, tensor: Tensor) -> dict[str, Any]:
    return {"name": name, "dtype": _name(tensor.dtype), "shape": [-1, *tensor.shape[1:]]}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def line(error: Exception) -> str:
    """Return the kind of an error and its first line; of an ExportError its message alone."""
    if isinstance(error, ExportError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return os_error_reason(error)
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
