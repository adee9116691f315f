"""Record a training of transformers.Trainer: loss scale, gradient norm and dtypes of every step.

    from runner.integrations.transformers import PrecisionCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[PrecisionCallback()])
    trainer.train()

transformers hands its callbacks neither the Trainer nor the loss of a step, and calls none of them
between the backward and the clipping. So the callback finds its Trainer on the stack, and watches
the calls of two methods of that one object: `training_step` and `train`.
"""

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from runner.core import ConfigError
from runner.integrations.recorder import Recorder
from runner.integrations.training_source import (
    PrecisionRequest,
    RecordSettings,
    TrainingSource,
    check_only_callback,
    check_sharding,
    missing_package,
    torch_optimizer,
    watch_method,
)

try:
    from accelerate.utils import find_batch_size
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise missing_package(__name__, "'transformers[torch]'", "hf,accelerate") from error

_NOT_METRICS = ("runtime", "per_second", "_time")
"""Ends of names in an evaluation of the Trainer's that say how fast it was."""


class PrecisionCallback(TrainerCallback):
    """Records every optimizer step of a Trainer as a run of this runner.

    Args:
        options: keyword arguments, see runner.integrations.training_source.RecordSettings.

    Raises:
        ConfigError: an option that is not known or has a wrong value.
    """

    def __init__(self, **options: Any) -> None:
        self.settings = RecordSettings.checked(type(self).__name__, options)
        self.recorder: Recorder | None = None
        self._trainer: Trainer | None = None
        self._end_step_watch: Callable[[], None] = lambda: None

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Watch the calls of Trainer.train, so that the run ends as the training does."""
        trainer = _calling_trainer(self)
        if trainer is not None:
            self._trainer = trainer
            watch_method(trainer, "train", self._around_train)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the record of a training.

        Raises:
            ConfigError: the Trainer has several such callbacks, shards its weights, or the run's
                folder cannot be used.
        """
        trainer = _calling_trainer(self)
        if trainer is None:
            raise ConfigError(
                "PrecisionCallback works with transformers.Trainer and its subclasses only, and "
                "was called by something else. For a loop of your own take "
                "runner.integrations.accelerate.PrecisionRecord."
            )
        self._trainer = trainer
        error = "The Trainer began another training before this one ended."
        self._finish(RuntimeError(error))
        self.recorder = None
        check_only_callback(trainer.callback_handler.callbacks, PrecisionCallback)
        kind = trainer.accelerator.distributed_type
        check_sharding("PrecisionCallback", [kind.value])
        if not state.is_world_process_zero:
            return
        assert trainer.model is not None
        source = TrainingSource(
            trainer="transformers",
            request=_request(args, trainer),
            model=trainer.model,
            optimizer=torch_optimizer(trainer.optimizer),
            scaler=trainer.accelerator.scaler,
            arguments=args.to_dict(),
            seed=args.seed,
            start_step=state.global_step,
            planned_steps=state.max_steps,
        )
        self.recorder = Recorder(source, self.settings)
        self._end_step_watch = watch_method(trainer, "training_step", self._around_step)

    def _around_train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call Trainer.train, and close the run where it does not finish."""
        try:
            return train(*args, **kwargs)
        except BaseException as error:
            self._finish(error)
            raise

    def _around_step(
        self, step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call Trainer.training_step, which is one micro-batch, and read what it computed."""
        assert self.recorder is not None
        assert self._trainer is not None
        reader = self.recorder.reader
        # The number of examples cannot be seen without a tensor, of a scalar, without any field.
        with suppress(TypeError, IndexError, ValueError):
            reader.add_examples(find_batch_size(inputs) or 0)
        self.recorder.begin_trace()
        try:
            loss = step(model, inputs, *args, **kwargs)
        except BaseException as error:
            # Here, too: auto_find_batch_size begins another training after an error, and the calls
            # of `train` are not watched where the callback was added later.
            self._finish(error)
            raise
        self.recorder.end_trace()
        # The Trainer divides each micro-batch's loss by their number, so the step's is their sum.
        reader.add_loss(loss)
        # Now: the Trainer clips, and thereby unscales, as soon as this returns.
        if self._trainer.accelerator.sync_gradients:
            reader.read_gradients(torch_optimizer(self._trainer.optimizer))
        return loss

    def _finish(self, error: BaseException | None = None) -> None:
        self._end_step_watch()
        # The recorder stays: Trainer.evaluate() is often called after train().
        if self.recorder is not None:
            self.recorder.finish(error)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the step that has ended."""
        if self.recorder is not None:
            self.recorder.end_step(state.global_step, math.ceil(state.epoch or 0))

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """Record an evaluation under val/ names."""
        if self.recorder is None or self._trainer is None:
            return
        epoch = math.ceil(state.epoch or 0)
        values = evaluation_metrics(metrics or {}, self._trainer.eval_dataset)
        self.recorder.add_evaluation(state.global_step, epoch, values)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the run."""
        self._finish()


def _calling_trainer(callback: TrainerCallback) -> Trainer | None:
    """Return the Trainer on the stack that has a callback; None where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and callback in owner.callback_handler.callbacks:
            return owner
        frame = frame.f_back
    return None


def _request(args: TrainingArguments, trainer: Trainer) -> PrecisionRequest:
    """Return the precision that TrainingArguments ask for, and why another one may run."""
    loaded = (
        "from_pretrained loads weights in their checkpoint's own dtype; for float32 type "
        "from_pretrained(..., dtype=torch.float32), and if this is meant, "
        "PrecisionCallback(expected={!r})."
    )
    reasons = {label: loaded.format(label) for label in ("bf16-true", "16-true")}
    if args.torch_compile and args.tf32 is None:
        reasons["tf32"] = "TrainingArguments(torch_compile=True) switches TF32 on by itself."
    if args.fp16:
        if trainer.accelerator.device.type == "cpu":
            reasons["32-true"] = "Accelerate runs fp16 on GPUs only, and on a CPU says nothing."
        return PrecisionRequest("TrainingArguments(fp16=True)", "16-mixed", reasons)
    if args.bf16:
        return PrecisionRequest("TrainingArguments(bf16=True)", "bf16-mixed", reasons)
    if args.tf32:
        return PrecisionRequest("TrainingArguments(tf32=True)", "tf32", reasons)
    return PrecisionRequest("TrainingArguments without fp16 and bf16", "32-true", reasons)


def evaluation_metrics(metrics: Mapping[str, Any], datasets: Any) -> dict[str, float]:
    """Return an evaluation of the Trainer's under the runner's names.

    Args:
        metrics: by names that begin with `eval_`, times among them.
        datasets: the Trainer's eval_dataset; a dict of several names each metric after its set.

    Returns:
        Numbers by `val/<metric>`; of several sets `val/<set>/<metric>`, of the first one
        `val/<metric>`, too.
    """
    sets = list(datasets) if isinstance(datasets, Mapping) else []
    # The Trainer times each set alone, so that the time names the set: the name of one set, or of
    # its metric, may begin with the name of another set.
    timed = sorted((one for one in sets if f"eval_{one}_runtime" in metrics), key=len)
    values: dict[str, float] = {}
    for name, value in metrics.items():
        key = name.removeprefix("eval_")
        if key == name or key.endswith(_NOT_METRICS) or not isinstance(value, int | float):
            continue
        owner = next((one for one in reversed(timed) if key.startswith(f"{one}_")), None)
        if owner is None:
            values[f"val/{key}"] = float(value)
            continue
        metric = key.removeprefix(f"{owner}_")
        values[f"val/{owner}/{metric}"] = float(value)
        if owner == sets[0]:
            values[f"val/{metric}"] = float(value)
    return values
