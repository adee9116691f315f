"""Make a batch of random numbers in the shapes that a spec gives for its data."""

import torch

from runner.config.schema import RunSpec
from runner.data.loader import Batch
from runner.data.task_target import build_task
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import CausalLM, Language, TokenClassification
from runner.training.tasks.regression import Regression
from runner.utils.errors import RunnerError


class ForecastUnavailable(RunnerError):
    """Error: the spec does not say enough to predict a run's memory before it runs."""


def example_batch(spec: RunSpec, size: int, device: torch.device) -> Batch:
    """Make a batch of random numbers in the shapes of data.meta.

    Args:
        spec: its data.meta and its task decide about the shapes and dtypes.
        size: examples.
        device: where the batch is made; the meta device makes shapes without memory.

    Returns:
        (inputs, targets), [size, ...] each.

    Raises:
        ForecastUnavailable: data.meta does not give the shapes.
    """
    meta = spec.data.get("meta") or {}
    task = build_task(spec.task)
    missing = [f"data.meta.{key}" for key in ("input", "classes") if not meta.get(key)]
    if missing:
        raise ForecastUnavailable(
            f"the shape of a batch is not known without {' and '.join(missing)}."
        )
    shape = meta["input"]
    classes = meta["classes"]
    dtype = getattr(torch, meta.get("dtype", "float32"))
    if isinstance(task, CausalLM | TokenClassification):
        tokens = torch.randint(classes, (size, shape[0]), device=device)
        return tokens, tokens
    if isinstance(task, Language) and not task.passes_target:
        # Inputs and targets of a language model are one sequence, shifted by a token.
        tokens = torch.randint(classes, (size, shape[0] + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(size, *shape, dtype=dtype, device=device)
    if isinstance(task, Classification):
        return inputs, torch.randint(classes, (size,), device=device)
    if isinstance(task, Regression):
        return inputs, torch.randn(size, classes, dtype=dtype, device=device)
    raise ForecastUnavailable(f"the targets of {type(task).__name__} have no shape in data.meta.")
