"""Record a training loop with Accelerate.

The record's own calls in a loop:

    from runner.integrations.accelerate import PrecisionRecord

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with PrecisionRecord(accelerator, model, optimizer) as record:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                record.step()
"""

from typing import Any

from runner.core import ConfigError
from runner.integrations.loop_record import LoopRecord
from runner.integrations.training_source import (
    PrecisionRequest,
    RecordSettings,
    TrainingSource,
    check_sharding,
    missing_package,
    torch_optimizer,
)

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise missing_package(__name__, "accelerate", "accelerate") from error

_LABELS = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8-mixed"}


class PrecisionRecord(LoopRecord):
    """Records every optimizer step of a loop with Accelerate as a run of this runner.

    Args:
        accelerator: whose `backward` the loop calls.
        model: as accelerator.prepare returned it.
        optimizer: as accelerator.prepare returned it.
        start_step: optimizer steps before this loop, of one that is resumed.
        options: further keyword arguments, see runner.integrations.training_source.RecordSettings.

    Raises:
        ConfigError: an option that is not known or has a wrong value, an optimizer that
            accelerator.prepare did not return, or processes that shard gradients.
    """

    backward_call = "accelerator.backward(loss)"

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        start_step: int = 0,
        **options: Any,
    ) -> None:
        settings = RecordSettings.checked(type(self).__name__, options)
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise ConfigError(
                "PrecisionRecord(accelerator, model, optimizer) takes what accelerator.prepare "
                "returned. Type model, optimizer = accelerator.prepare(model, optimizer) first."
            )
        check_sharding("PrecisionRecord", [accelerator.distributed_type.value])
        precision = accelerator.mixed_precision
        reasons = {}
        if precision == "fp16" and accelerator.device.type == "cpu":
            reasons["32-true"] = "Accelerate runs fp16 on GPUs only, and on a CPU says nothing."
        setting = f"Accelerator(mixed_precision={precision!r})"
        source = TrainingSource(
            trainer="accelerate",
            request=PrecisionRequest(setting, _LABELS.get(precision, precision), reasons),
            model=accelerator.unwrap_model(model),
            optimizer=torch_optimizer(optimizer),
            scaler=accelerator.scaler,
            arguments={
                "mixed_precision": precision,
                "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            },
            start_step=start_step,
        )
        super().__init__(accelerator, optimizer, source, settings, accelerator.is_main_process)

    @property
    def micro_batch(self) -> int | None:
        """Return Accelerate's number of the micro-batch, which is 0 for the last one of a pass."""
        return self.owner.step

    @property
    def is_step_complete(self) -> bool:
        """Return whether Accelerate's optimizer steps after this micro-batch."""
        return self.owner.sync_gradients
