"""Record a training of Lightning's Trainer, or of a loop with Fabric.

    from runner.integrations.lightning import PrecisionCallback

    trainer = L.Trainer(callbacks=[PrecisionCallback()])

Fabric has no steps of its own, so its loop names them:

    from runner.integrations.lightning import FabricRecord

    with FabricRecord(fabric, model, optimizer) as record:
        for batch in loader:
            fabric.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            record.step()
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from runner.core import ConfigError
from runner.integrations.loop_record import LoopRecord
from runner.integrations.recorder import Recorder
from runner.integrations.training_source import (
    PrecisionRequest,
    RecordSettings,
    TrainingSource,
    check_only_callback,
    check_sharding,
    missing_package,
    torch_optimizer,
)

try:
    from lightning.fabric import Fabric
    from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.data import extract_batch_size
except ImportError as error:
    raise missing_package(__name__, "lightning", "lightning") from error

_VALIDATION = re.compile(r"(?:val|valid|validation)[_/.-](.+)")
"""Names that modules give to the metrics of a validation."""
_REASONS = {"bf16-mixed": "Lightning replaces 16-mixed by bf16-mixed on a CPU."}


class PrecisionCallback(Callback):
    """Records every optimizer step of a Trainer as a run of this runner.

    Metrics that the module logs under names that begin with `val_`, `val/`, `valid_` or
    `validation_` are recorded under `val/`.

    Args:
        options: keyword arguments, see runner.integrations.training_source.RecordSettings.

    Raises:
        ConfigError: an option that is not known or has a wrong value.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.settings = RecordSettings.checked(type(self).__name__, options)
        self.recorder: Recorder | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the record of a training.

        Raises:
            ConfigError: the Trainer has several such callbacks, shards its weights, or the run's
                folder cannot be used.
        """
        check_only_callback(trainer.callbacks, PrecisionCallback)  # type: ignore[attr-defined]
        if not trainer.optimizers:
            raise ConfigError(
                "PrecisionCallback records optimizer steps, and configure_optimizers returned no "
                "optimizer. Return one, or leave the callback out."
            )
        check_sharding("PrecisionCallback", _strategy_names(trainer.strategy))
        self.recorder = None
        if not trainer.is_global_zero:
            return
        precision = str(trainer.precision)
        source = TrainingSource(
            trainer="lightning",
            request=PrecisionRequest(f"Trainer(precision={precision!r})", precision, _REASONS),
            model=pl_module,
            optimizer=torch_optimizer(trainer.optimizers[0]),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            arguments={
                "precision": trainer.precision,
                "strategy": type(trainer.strategy).__name__,
                "max_epochs": trainer.max_epochs,
                "max_steps": trainer.max_steps,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "gradient_clip_val": trainer.gradient_clip_val,
                "hparams": dict(pl_module.hparams),
            },
            seed=_seed(),
            start_step=trainer.global_step,
            planned_steps=max(0, trainer.max_steps),
        )
        self._step = trainer.global_step
        self.recorder = Recorder(source, self.settings)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Watch the dtypes of the first batch, and count the examples of each."""
        if self.recorder is None:
            return
        self.recorder.begin_trace()
        # Lightning refuses batches without tensors, whose number of examples cannot be seen.
        with suppress(Exception):
            self.recorder.reader.add_examples(extract_batch_size(batch))

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Add the loss of a micro-batch."""
        if self.recorder is None:
            return
        # Manual optimization may take several steps in one batch, each after a backward.
        self._end_step(trainer)
        # Lightning has multiplied it by the loss scale, and by itself it divides the loss of each
        # micro-batch by accumulate_grad_batches, which the last step of an epoch may not reach.
        mean = loss.detach() * trainer.accumulate_grad_batches
        micro_batch = trainer.fit_loop.batch_idx if pl_module.automatic_optimization else None
        self.recorder.reader.add_loss(mean, micro_batch, is_scaled=True)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Read the gradients, which Lightning has unscaled and not clipped yet."""
        if self.recorder is not None:
            reader = self.recorder.reader
            # A second optimizer that steps after the same backward belongs to the same step.
            reader.read_gradients(torch_optimizer(optimizer), is_added=reader.is_step_read)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Record the step that has ended, if the batch was the last one of a step."""
        if self.recorder is not None:
            self.recorder.end_trace()
        self._end_step(trainer)

    def _end_step(self, trainer: Trainer) -> None:
        if self.recorder is None or not self.recorder.reader.is_step_read:
            return
        self._step += 1
        # training_step may return None, which leaves the batch out: Lightning counts a step.
        if not self.recorder.reader.losses:
            self.recorder.reader.discard_step()
            return
        self.recorder.end_step(self._step, trainer.current_epoch + 1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metrics that the module has logged for the validation."""
        if self.recorder is None or trainer.sanity_checking:
            return
        metrics = validation_metrics(trainer.callback_metrics)
        self.recorder.add_evaluation(self._step, trainer.current_epoch + 1, metrics)

    # The recorder stays after the end: Trainer.validate() is often called after fit().
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run."""
        if self.recorder is not None:
            self.recorder.finish()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the run as stopped or failed."""
        if self.recorder is not None:
            self.recorder.finish(exception)


class FabricRecord(LoopRecord):
    """Records every optimizer step of a loop with Fabric as a run of this runner.

    Args:
        fabric: whose `backward` the loop calls.
        model: as fabric.setup returned it.
        optimizer: as fabric.setup returned it.
        start_step: optimizer steps before this loop, of one that is resumed.
        options: further keyword arguments, see runner.integrations.training_source.RecordSettings.

    Raises:
        ConfigError: an option that is not known or has a wrong value, a model or an optimizer that
            fabric.setup did not return, or a strategy that shards gradients.
    """

    backward_call = "fabric.backward(loss)"

    def __init__(
        self, fabric: Fabric, model: Any, optimizer: Any, start_step: int = 0, **options: Any
    ) -> None:
        settings = RecordSettings.checked(type(self).__name__, options)
        if not isinstance(model, _FabricModule) or not isinstance(optimizer, _FabricOptimizer):
            raise ConfigError(
                "FabricRecord(fabric, model, optimizer) takes what fabric.setup returned. Type "
                "model, optimizer = fabric.setup(model, optimizer) first."
            )
        check_sharding("FabricRecord", _strategy_names(fabric.strategy))
        plugin = fabric.strategy.precision
        precision = str(plugin.precision)
        source = TrainingSource(
            trainer="fabric",
            request=PrecisionRequest(f"Fabric(precision={precision!r})", precision, _REASONS),
            model=model.module,
            optimizer=torch_optimizer(optimizer),
            scaler=getattr(plugin, "scaler", None),
            arguments={"precision": precision, "strategy": type(fabric.strategy).__name__},
            seed=_seed(),
            start_step=start_step,
        )
        super().__init__(fabric, optimizer, source, settings, fabric.is_global_zero)


def _strategy_names(strategy: object) -> list[str]:
    """Return the names of a strategy's class and of those that it is derived from."""
    return [kind.__name__ for kind in type(strategy).__mro__]


def _seed() -> int | None:
    """Return the seed of the last seed_everything; None without one."""
    # Lightning keeps it in the environment, for the processes that it starts.
    text = os.environ.get("PL_GLOBAL_SEED", "")
    return int(text) if text.isdecimal() else None


def validation_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a validation under the runner's names, `val/<name>`.

    Args:
        metrics: everything that the module has logged so far; others are left out.
    """
    values: dict[str, float] = {}
    for name, value in metrics.items():
        match = _VALIDATION.fullmatch(name)
        if match:
            values[f"val/{match[1]}"] = float(value)
    return values
