"""Make the callbacks that read a training's records, with the guard; write its checkpoints."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner.core import (
    LoadedCheckpoint,
    Room,
    RunCallback,
    RunContext,
    RunHandle,
    TrainState,
    checkpoint_file,
    fmt,
    run_result,
    step_records,
    training_loop,
)
from runner.data.fingerprint import learned_facts
from runner.data.loader import restored_random_state
from runner.data.stream_loader import DatasetLoader, StreamLoader, reads_of, samples_of_step
from runner.diagnostics.data_checks import explain_uncounted_labels
from runner.training import state_dict
from runner.training.callbacks.guard import Guard
from runner.training.callbacks.progress import progress
from runner.training.callbacks.runner_callbacks import Checkpointing, MetricLogger, RunSummary
from runner.training.formats.writers import AsyncCheckpointWriter, ShardedCheckpointWriter
from runner.training.own_state import OwnState
from runner.training.state_dict import checkpoint_state_dict


class TrainingCallbacks:
    """The callbacks of a training, and its checkpoints, which hold the callbacks' states.

    Attributes:
        run: the run.
        state: of the training.
        own_state: what the model changes by itself, for checkpoints and warnings.
        planned_steps: optimizer steps of the whole training.
        callbacks: in the order in which they read a record.
        handle: passed to the callbacks.
        summary: best, last and speed, for the run's result.
        guard: stops a run whose numbers are wrong.
        user: calls the user's callbacks; None where the config has none.
        writer: writes the checkpoints.
    """

    def __init__(
        self, run: RunContext, state: TrainState, loader: DatasetLoader, start_step: int
    ) -> None:
        self.run = run
        self.state = state
        # A process that is not the first takes part in gathering; without shards it writes nothing.
        strategy = run.strategy
        keep = run.spec.checkpoint.keep
        self.writer: AsyncCheckpointWriter | ShardedCheckpointWriter
        if strategy.shards or not strategy.rank.is_main:
            self.writer = ShardedCheckpointWriter(run.checkpoint_folder, keep, run.say, strategy)
        else:
            self.writer = AsyncCheckpointWriter(run.checkpoint_folder, keep, run.say)
        self.own_state = OwnState(state)
        state.hooks.add(self.own_state)
        # The copy of the weights must be complete before the optimizer changes them.
        state.hooks.call_before_update(self.writer.wait_for_copy)
        spec = run.spec
        task = run.task
        self._loader = loader
        # The first may be after the first step, when nothing has changed between steps.
        self._attribute_checks_left = 2
        self._untrained: list[str] = []
        self.planned_steps = training_loop.total_steps(spec.train, loader)
        self.summary = RunSummary(task.quality, task.direction)
        self.guard = _guard(run, loader, start_step)
        self.handle = RunHandle("", state, run)
        self.callbacks: list[RunCallback] = [
            self.summary,
            MetricLogger(run.tracker, state, run.accelerator),
            progress(run.console, self.planned_steps, run.label),
            self.guard,
        ]
        for room in Room.installed:
            self.callbacks += room.callbacks(run, state)
        self.user = None
        if spec.callbacks:
            if run.strategy.rank.world_size > 1:
                names = ", ".join(spec.callbacks)
                run.say(f"callbacks: {names} (called in the main process only)")
            from runner.training.callbacks.user_callbacks import UserCallbacks

            self.user = UserCallbacks(run.user_callbacks, state, run)
            self.callbacks.append(self.user)
        # Checkpoints come last: what the guard refuses is not saved.
        every = spec.checkpoint.every_steps
        if every or spec.checkpoint.best:
            due = partial(training_loop.is_evaluation_step, spec.train, loader)
            quality = task.quality if spec.checkpoint.best else None
            self.callbacks.append(Checkpointing(self._save, every, due, quality, task.direction))

    def dispatch(self, record: Sequence[step_records.StepRecord] | step_records.EvalRecord) -> None:
        """Pass a record to every callback, in order."""
        for callback in self.callbacks:
            callback.dispatch(record, self.handle)
        if isinstance(record, step_records.EvalRecord):
            self.name_untrained()

    def name_untrained(self) -> None:
        """Warn of parameters with a gradient that no optimizer updates, where they are others than
        before."""
        trained = {id(p) for p in self.state.trainable_parameters}
        named = self.state.plain_model.named_parameters()
        names = [name for name, p in named if p.grad is not None and id(p) not in trained]
        if names and names != self._untrained:
            self.run.say(
                f"warning: {fmt.first_names(names)}: no optimizer trains what has gradients "
                "here. Have "
                "the model's constructor make and unfreeze all parameters that are to train."
            )
        self._untrained = names

    def should_stop(self) -> bool:
        """Return whether a callback ends the training; all processes must ask after each record.

        Raises:
            HookError: a callback of the user's failed.
        """
        if self.user is not None:
            self.user.agree()
        return any(callback.stop_reason for callback in self.callbacks)

    def should_finish(self) -> bool:
        """Return whether the next step is to be the last one."""
        # It is evaluated, after which the user's callbacks end the training.
        return self.user is not None and self.user.is_stopping

    def end(self) -> None:
        """Tell the callbacks that the training has ended; all processes must call it.

        Raises:
            HookError: a callback of the user's fails.
        """
        if self.user is None or self.guard.stop_reason:
            return
        run = self.run
        # A run that a signal has stopped is resumed, and ends then.
        if run.strategy.all_reduce_max(run.signals.number or 0):
            return
        result = self.summary.result_values()
        end = step_records.TrainingEnd(
            self.state.step, self.planned_steps, result["metrics"], result["best"], self.early_end
        )
        for callback in self.callbacks:
            callback.on_end(end, self.handle)

    @property
    def early_end(self) -> str:
        """Return what ended the training before its last step; empty for a signal or nothing."""
        reasons = [callback.stop_reason for callback in self.callbacks]
        is_cut = self.state.step < self.planned_steps and not self.run.signals.is_stop_requested()
        if self.run.spec.train.max_seconds and is_cut:
            reasons.append(run_result.TIME_LIMIT)
        return next(filter(None, reasons), "")

    @property
    def failure_message(self) -> str:
        """Why the guard stopped the run, and the last good checkpoint; empty where it did not."""
        reason = self.guard.stop_reason
        paths = checkpoint_file.checkpoints_in(self.run.checkpoint_folder) if reason else []
        # Where every step was skipped, the weights are those that the run began with.
        if not paths or self.state.skipped == self.state.step:
            return reason
        return f"{reason}\nThe last good weights: init.weights={fmt.relative_path(paths[-1])}"

    def restore(self, saved: LoadedCheckpoint) -> list[str]:
        """Restore everything but the weights, which the model was built with.

        Returns:
            Sentences that say which parts of the checkpoint could not be restored as they were.
        """
        run = self.run
        messages = state_dict.restore(self.state, saved, run.spec, self.callbacks)
        # An init_scale typed again with the first run's value leaves the config unchanged: the
        # scale continues, and a user who expected it to begin again reads why.
        key = "precision.loss_scale.init_scale"
        typed = (run.spec.precision.get("loss_scale") or {}).get("init_scale")
        before = saved.content["loss_scale"].get("scale")
        now = self.state.scale.state_dict().get("scale")
        if run.invocation.overrides_key(key) and now and now == before != typed:
            text = f"the loss scale continues at {now:g}: {key}={typed} is where the run began"
            messages.append(text)
        if isinstance(self._loader, StreamLoader):
            messages.append(
                f"the stream is read again up to example {self.state.position} of pass "
                f"{self.state.epoch}: that it yields the same examples is not checked"
            )
        if self.user is not None:
            self.user.agree()
        from runner.training.callbacks.user_callbacks import UserCallbacks

        states = saved.content["callbacks"].get(UserCallbacks.key, {})
        nodes = run.spec.callbacks
        for name in nodes:
            if name not in states:
                messages.append(f"callbacks.{name} begins here: the checkpoint has no state of it")
        for name in states:
            if name not in nodes:
                messages.append(f"callbacks.{name} is not called any more: its state is dropped")
        # Checkpoints of later steps would be taken for this run's newest ones.
        if run.strategy.rank.is_main:
            checkpoint_file.rename_superseded(run.checkpoint_folder, self.state.step)
        return messages

    def weights_are_valid(self) -> bool:
        """Return whether the weights may be saved; all processes must ask, and agree.

        Those of which one is not finite must not replace a good checkpoint.
        """
        state = self.state
        # Parameters only: a buffer may be a mask, which holds infinities.
        every = [p.detach() for p in state.plain_model.parameters()]
        params = state.strategy.local_shards(every)
        # Weights of one byte hold codes, for which isfinite has no meaning or no kernel.
        floats = [p for p in params if p.itemsize > 1 and (p.is_floating_point() or p.is_complex())]
        valid = self.guard.weights_are_good
        if valid and floats and not torch.stack([p.isfinite().all().cpu() for p in floats]).all():
            valid = False
            self.run.say(
                f"warning: the weights of step {state.step} are not finite and are not saved."
            )
        return not self.run.strategy.all_reduce_max(not valid)

    def _checkpoint_content(self) -> dict[str, Any]:
        if self._attribute_checks_left:
            self._attribute_checks_left -= 1
            names = self.own_state.unsaved_attributes()
            if names:
                self._attribute_checks_left = 0
                self.run.say(
                    f"warning: {fmt.first_names(names, 6)}: no checkpoint holds what the model "
                    "changes "
                    "in attributes. Have it register_buffer them, or return get_extra_state(); an "
                    "optimizer keeps them in its state or param_groups."
                )
        # Metrics of an earlier step would be taken for those of the weights in the file.
        is_evaluated = self.summary.evaluated == self.state.step
        metrics = self.summary.metrics if is_evaluated else {}
        rest = state_dict.state_dict(self.state, self.callbacks)
        rest["device"] = self.run.device_name
        rest["learned"] = learned_facts(self._loader.dataset)
        reads = reads_of(self._loader, self.state.epoch, self.state.position)
        rest["reads"] = [[*read] for read in reads]
        invocation = self.run.invocation
        return checkpoint_state_dict(
            self.state, self.run.spec, invocation.choices, metrics, rest, invocation.is_trusted
        )

    def _save(self, best: bool) -> None:
        if self.weights_are_valid():
            # Only an update changes these, so their copy is waited for before the next one.
            changed_by_update = [*self.state.trainable_parameters, *self.state.optimizer_tensors()]
            if self.state.evaluated is not None:
                changed_by_update += self.state.evaluated.tensors()
            self.writer.save(self._checkpoint_content(), best, changed_by_update)

    def save_last(self) -> Path | None:
        """Write the last checkpoint and wait for it; return its path, None for invalid weights."""
        content = self._checkpoint_content() if self.weights_are_valid() else None
        return self.writer.finish(content)

    def close(self) -> None:
        """Close the callbacks and wait for the writer, however the training ended."""
        for callback in self.callbacks:
            callback.close()
        self.writer.finish()


def _guard(run: RunContext, loader: DatasetLoader, start_step: int) -> Guard:
    """Return the callback that judges the records, with what it saves and how it says so.

    Args:
        run: the run.
        loader: yields the training batches, whose samples the guard saves.
        start_step: the step that the run starts or is resumed at.
    """

    def save(record: step_records.StepRecord, why: str) -> str:
        from runner.diagnostics.saved_batch import save_batch

        steps = range(record.step, record.step + 1)
        return save_batch(run, loader, steps, why, record.loss_scale, start_step)

    def cause(record: step_records.StepRecord) -> str | None:
        # A data set may draw random numbers, and what explains an error must not hide it.
        with restored_random_state(), suppress(Exception):
            samples = samples_of_step(loader, run.spec.train.accumulate, record.step)
            return explain_uncounted_labels(loader, samples, run.task)
        return None

    return Guard(run.spec, run.precision, run.say, save, cause)
