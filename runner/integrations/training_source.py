"""Describe a training of another trainer: its model, its optimizer, what it was asked for.

Beside it the errors that the modules of all trainers raise, of a training that cannot be recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.integrations.precision_label import PrecisionRequest
from runner.integrations.steps import scale_value
from runner.precision.loss_scale import LossScale, NoLossScale
from runner.precision.registry import load_precision, precision_names
from runner.training.state import ScheduledOptimizer, TrainState
from runner.training.tasks.model_loss import ModelLoss
from runner.utils.accelerator import Accelerator
from runner.utils.errors import ConfigError, Unavailable

_SHARDING = {
    *("FSDP", "DEEPSPEED", "MEGATRON_LM"),  # of Accelerate
    *("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"),  # of Lightning
}


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
    def accelerator(self) -> Accelerator:
        """Return the device of the model's first parameter."""
        first = next(self.model.parameters(), torch.empty(0))
        return Accelerator(first.device)

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """Return the scaler if it is enabled; None where the loss is not scaled."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def train_state(self, label: str) -> TrainState:
        """Return the training in the form that the runner's own callbacks read.

        Args:
            label: of the precision that the steps have.
        """
        scaler = self.loss_scaler
        scale = NoLossScale() if scaler is None else TrainerLossScale(scaler)
        return TrainState(
            self.model,
            load_precision(label if label in precision_names() else "32-true"),
            ModelLoss(),  # the trainer computes the loss, and no callback of a record asks for it
            scale,
            [ScheduledOptimizer(self.optimizer)],
            self.accelerator.device,
            step=self.start_step,
        )


@final
class TrainerLossScale(LossScale):
    """The scale of a trainer's enabled GradScaler: its value is read, the trainer applies it."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    @property
    def value(self) -> Tensor:
        return scale_value(self.scaler)


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return torch's optimizer inside a library's wrapper, which calls it `optimizer`."""
    return getattr(optimizer, "optimizer", optimizer)


def check_only_callback(callbacks: Sequence[object], kind: type) -> None:
    """Raise ConfigError where several of a Trainer's callbacks are of a kind that records it."""
    count = sum(isinstance(callback, kind) for callback in callbacks)
    if count > 1:
        raise ConfigError(
            f"The Trainer has {count} {kind.__name__}s, and each step would be recorded {count} "
            "times. Pass one in callbacks=[...]."
        )


def check_sharding(owner: str, strategy: Sequence[str], leave_out: str = "it") -> None:
    """Raise ConfigError for a training whose processes shard the gradients.

    Args:
        owner: name of the class that records trainings.
        strategy: the library's name of how the training is distributed, and names of which this
            is a kind.
        leave_out: what the user may leave out.
    """
    if _SHARDING.intersection(strategy):
        raise ConfigError(
            f"{owner} does not record a training with {strategy[0]}: each process has a part of "
            f"every gradient only. Leave {leave_out} out, or train on one device or with DDP."
        )


def missing_package(module: str, package: str, extra: str) -> Unavailable:
    """Return the error of a module whose library is not installed.

    Args:
        module: the module that was imported.
        package: the library that it needs.
        extra: of this project, that installs it.
    """
    return Unavailable(
        f"{module} needs the package {package}, which is not installed here.",
        f'Type pip install {package}; in a checkout pip install -e ".[{extra}]" does the same, '
        f"with a wheel pip install '<the wheel's path>[{extra}]'.",
    )
