"""Make a batch of random numbers in the shapes that a spec gives for its data."""

import torch

from runner.core import RunnerError, RunSpec, batch_layout
from runner.data.loader import Batch
from runner.data.task_target import build_task
from runner.training.tasks.classification import Binary, Classification
from runner.training.tasks.language import CausalLM, Language, Seq2Seq, TokenClassification
from runner.training.tasks.regression import Regression
from runner.training.tasks.segmentation import Segmentation


class ForecastUnavailable(RunnerError):
    """Error: the spec does not say enough to predict a run's memory before it runs."""

    exit_status = 2


def example_batch(spec: RunSpec, size: int, device: torch.device) -> Batch:
    """Make a batch of random numbers in the shapes of data.meta.

    Args:
        spec: its data.meta and its task decide about the shapes and dtypes.
        size: examples.
        device: where the batch is made; the meta device makes shapes without memory.

    Returns:
        (inputs, targets), [size, ...] each; the inputs of a seq2seq task by field.

    Raises:
        ForecastUnavailable: data.meta does not give the shapes.
    """
    meta = spec.data.get("meta") or {}
    task = build_task(spec.task)
    missing = [f"data.meta.{key}" for key in ("input", "classes") if not meta.get(key)]
    if missing:
        raise ForecastUnavailable(
            f"the shape of a batch is not known without {' and '.join(missing)}, as in "
            "data.meta.input=[3,32,32] data.meta.classes=10, or [128] and 50257 for text."
        )
    shape = meta["input"]
    classes = meta["classes"]
    if isinstance(task, Language):
        # Inputs and targets of a plain language model are one sequence, shifted by a token.
        is_shifted = not isinstance(task, Seq2Seq | CausalLM | TokenClassification)
        tokens = torch.randint(classes, (size, shape[0] + is_shifted), device=device)
        if is_shifted:
            return tokens[:, :-1], tokens[:, 1:]
        if not isinstance(task, Seq2Seq):
            return tokens, tokens
        target_field = task.target_field or batch_layout.TARGET_FIELDS[0]
        fields = (*(task.input_fields or ("input_ids",)), target_field)
        return batch_layout.KeywordInputs(dict.fromkeys(fields, tokens)), tokens
    dtype = _input_dtype(spec)
    if dtype.is_floating_point or dtype.is_complex:
        inputs = torch.randn(size, *shape, dtype=dtype, device=device)
    else:
        # Two tokens are in every vocabulary.
        inputs = torch.randint(2, (size, *shape), dtype=dtype, device=device)
    if isinstance(task, Classification | Segmentation):
        pixels = shape[-2:] if isinstance(task, Segmentation) else ()
        return inputs, torch.randint(classes, (size, *pixels), device=device)
    if isinstance(task, Regression | Binary):
        dtype = dtype if dtype.is_floating_point else torch.float32
        return inputs, torch.rand(size, classes, dtype=dtype, device=device)
    raise ForecastUnavailable(f"the targets of {type(task).__name__} have no shape in data.meta.")


def _input_dtype(spec: RunSpec) -> torch.dtype:
    """Return the dtype of the inputs that are not those of a language model.

    Raises:
        ForecastUnavailable: data.meta.dtype is no dtype of torch.
    """
    usual = "int64" if spec.task.get("kind") == "sequence_classification" else "float32"
    name = (spec.data.get("meta") or {}).get("dtype") or usual
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ForecastUnavailable(
            f"data.meta.dtype={name} is no dtype. Type float32, or int64 for tokens."
        )
    return dtype
