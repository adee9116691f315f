"""A batch of random numbers in the shapes that a spec tells of its data."""

import torch

from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.data.loader import Batch
from runner.training.tasks.classification import Classification
from runner.training.tasks.language import Language
from runner.training.tasks.regression import Regression
from runner.utils.errors import RunnerError


class ForecastUnavailable(RunnerError):
    """The memory of a run cannot be predicted before it runs."""


def example_batch(spec: RunSpec, size: int, device: torch.device) -> Batch:
    """Make a batch of random numbers in the shapes of data.meta.

    Raises:
        ForecastUnavailable: data.meta does not give the shapes.
    """
    meta, task = spec.data.get("meta") or {}, build_group("task", spec.task)
    if missing := [f"data.meta.{key}" for key in ("input", "classes") if not meta.get(key)]:
        raise ForecastUnavailable(
            f"the shape of a batch is not known without {' and '.join(missing)}."
        )
    shape, classes = meta["input"], meta["classes"]
    dtype = getattr(torch, meta.get("dtype", "float32"))
    if isinstance(task, Language):
        tokens = torch.randint(classes, (size, shape[0] + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]
    inputs = torch.randn(size, *shape, dtype=dtype, device=device)
    if isinstance(task, Classification):
        return inputs, torch.randint(classes, (size,), device=device)
    if isinstance(task, Regression):
        return inputs, torch.randn(size, classes, dtype=dtype, device=device)
    raise ForecastUnavailable(f"the targets of {type(task).__name__} have no shape in data.meta.")
