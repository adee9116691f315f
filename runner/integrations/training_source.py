"""Describe a training of another trainer: its model, its optimizer, what it was asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Never, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.integrations.precision_label import PrecisionRequest
from runner.integrations.step_reader import scale_value
from runner.precision.loss_scale import LossScale, NoLossScale
from runner.precision.registry import load_precision, precision_names
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.tasks.model_loss import ModelLoss


@dataclass(frozen=True)
class TrainingSource:
    """A training that another trainer runs.

    Attributes:
        trainer: the library's name, for example "transformers".
        request: the precision that it was asked for.
        model: without the trainer's wrappers.
        optimizer: torch's own, without the trainer's wrapper.
        scaler: scales the loss; None for none.
        arguments: the trainer's settings, for config.yaml and MLflow's params.
        seed: of the training; None where it is not known.
        start_step: optimizer steps before this training; 0 unless it is resumed.
        planned_steps: of the whole training; 0 where it is not known.
    """

    trainer: str
    request: PrecisionRequest
    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    start_step: int = 0
    planned_steps: int = 0

    @property
    def version_text(self) -> str:
        """Return the library's name and version."""
        package = "lightning" if self.trainer == "fabric" else self.trainer
        return f"{self.trainer} {version(package)}"

    @property
    def device(self) -> torch.device:
        """Return the device of the model's first parameter."""
        return next((param.device for param in self.model.parameters()), torch.device("cpu"))

    def train_state(self, label: str) -> TrainState:
        """Return the training in the form that the runner's own callbacks read.

        Args:
            label: of the precision that the steps have.
        """
        known = label if label in precision_names() else "32-true"
        has_scale = self.scaler is not None and self.scaler.is_enabled()
        scale = TrainerLossScale(self.scaler) if has_scale and self.scaler else NoLossScale()
        return TrainState(
            self.model,
            load_precision(known),
            ModelLoss(),
            scale,
            [ScheduledOptimizer(self.optimizer)],
            self.device,
            step=self.start_step,
        )


@final
class TrainerLossScale(LossScale):
    """The loss scale of a trainer's GradScaler, which the trainer itself applies.

    Args:
        scaler: an enabled one.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    @property
    def value(self) -> Tensor:
        return scale_value(self.scaler)

    def multiply(self, loss: Tensor) -> Never:
        raise _not_ours()

    def unscale(self, grads: Sequence[Tensor]) -> Never:
        raise _not_ours()

    def step(self, optimizer: Optimizer, found_inf: Tensor | None) -> Never:
        raise _not_ours()

    def update(self, found_infs: Sequence[Tensor | None]) -> Never:
        raise _not_ours()


def _not_ours() -> AssertionError:
    return AssertionError("the trainer applies its own loss scale; the record only reads it")
