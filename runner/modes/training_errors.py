"""Explain the errors that the training loop raises.

Checks before the first step are in startup.py. The guard that judges the records is in
training/callbacks/guard.py.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.core import (
    ConfigError,
    RunContext,
    RunnerError,
    TrainState,
    errors,
    fmt,
    model_call,
    module_tape,
    training_loop,
)
from runner.data.stream_loader import (
    DatasetLoader,
    StreamLoader,
    all_targets,
    samples_of_step,
    targets_of_steps,
)
from runner.data.workers import (
    PREFETCH,
    is_dataset_error,
    is_process_death,
    worker_failure,
    worker_message,
)
from runner.diagnostics.data_checks import label_problem

# Texts of PyTorch's errors: a backward without a gradient; labels and tokens out of range, in the
# loss, in an embedding on a CPU, and in either of them on a GPU.
_NO_GRADIENT = ("does not require grad and does not have a grad_fn", "received a gradient")
_BAD_LABEL = re.compile(r"Target -?\d+ is out of bounds")
_BAD_INDEX = "index out of range in self"
_DEVICE_ASSERT = "device-side assert"
# DDP raises it in the step after one that left parameters out.
_UNUSED = "Expected to have finished reduction in the prior iteration"
# A state that the forward keeps from step to step causes it.
_GRAPH_OF_BEFORE = "backward through the graph a second time"
# A batch norm raises it for one example without height and width.
_ONE_VALUE = "Expected more than 1 value per channel when training"


_GRADIENT_BREAKERS = (
    "Leave out what cuts it after that: .detach(), .data, .item(), .numpy(), argmax, round, "
    "torch.no_grad(), torch.inference_mode()."
)


@dataclass(frozen=True)
class TrainingErrors:
    """Explains what the training loop or an evaluation in it raises.

    Errors that are known are labels outside the classes, loading processes that die, operations
    that the precision lacks, losses without a gradient and batch norms with one example.

    Attributes:
        run: the run.
        state: its model is trained or evaluated.
        train: loader of the training set.
        evaluated: loaders of the sets that are evaluated, by their labels.
    """

    run: RunContext
    state: TrainState
    train: DatasetLoader
    evaluated: Mapping[str, DatasetLoader]

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Return the context in which known errors are explained; a traceback goes to error.txt.

        Raises:
            DataError: in place of what the data causes.
            ConfigError: in place of what the settings or a missing gradient cause in the first
                step.
            ModelError: in place of what the settings cause after steps have been trained.
        """
        start_step = self.state.step
        try:
            yield
        except RunnerError:
            raise  # its message says already what to change
        except Exception as error:
            try:
                self._raise(error, start_step)
            except RuntimeError as later:
                # torch reports a dead loading process wherever the main thread is, here as well.
                if later is error or not is_process_death(later):
                    raise
                self._raise(later, start_step)

    def _raise(self, error: Exception, start_step: int) -> NoReturn:
        """Raise what explains an error, or the error itself.

        Args:
            error: what was raised.
            start_step: optimizer steps before the loop began.
        """
        from runner.modes.error_rules import Failure, precision_advice

        run = self.run
        state = self.state
        run.signals.check()  # an interrupt reaches the processes that load data, too
        text = str(error)
        if any(part in text for part in _NO_GRADIENT):
            raise ConfigError(f"{self._no_gradient_reason()} {run.save_traceback()}") from error
        if _UNUSED in text:
            # torch lists the places of the parameters after a colon.
            listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
            trained = [n for n, p in state.plain_model.named_parameters() if p.requires_grad]
            names = [trained[int(place)] for place in listed[1].split()] if listed else []
            raise ConfigError(
                f"strategy=ddp waits for the gradient of every parameter, and a step has none of "
                f"{fmt.first_names(names) or 'some'}. Type strategy.find_unused_parameters=true, "
                f"or train.freeze=[<those that never train>]. {run.save_traceback()}"
            ) from error
        if _ONE_VALUE in text:
            advice = _larger_batch(run, self.train)
        elif _GRAPH_OF_BEFORE in text:
            advice = "It uses a tensor of an earlier step with its graph: keep it as x.detach()."
        else:
            advice = precision_advice(Failure(error, state.plain_model, run.precision))
        if advice:
            # In the first step the settings do not fit (exit status 2); after steps that were
            # trained, the same error ends a run that had begun (exit status 1).
            kind = ConfigError if state.step <= start_step + 1 else errors.ModelError
            model = run.invocation.option_name("model", run.spec.model)
            when = "step" if state.model.training else "the evaluation after step"
            raise kind(
                f"model={model} fails in {when} {state.step} with precision={run.precision.name}: "
                f"{type(error).__name__}: {text.strip().rstrip('.')}. {advice} "
                f"{run.save_traceback()}"
            ) from error
        explanation = self._explain_data_error(error)
        if explanation is None:
            raise error
        raise errors.DataError(f"{explanation}\n{run.save_traceback()}".rstrip()) from error

    def _no_gradient_reason(self) -> str:
        """Return why the loss has no gradient: found by one more forward, module by module, which
        changes nothing."""
        state = self.state
        model = state.plain_model
        inputs, _ = next(next(iter(self.evaluated.values())).epoch(0))
        without_grad: list[str] = []
        with_gradient: list[str] = []

        def note(name: str, output: Any) -> None:
            if not torch.is_grad_enabled():
                without_grad.append(name)
            if _requires_grad(output):
                with_gradient.append(name)

        with (
            module_tape.ModuleTape() as tape,
            training_loop.evaluation_mode(state),
            torch.enable_grad(),
            state.forward_context(),
        ):
            for name, module in model.named_modules():
                tape.watch_calls(name, module, end=note)
            output = model_call.call_model(model, state.cast(inputs))
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        start = "The loss has no gradient, so nothing can train."
        if _requires_grad(output):
            return f"{start} The output has one: the task's loss cuts it. {_GRADIENT_BREAKERS}"
        if without_grad:
            return (
                f"{start} {type(model).__name__}.forward runs {without_grad[0]} with gradients "
                "switched off. Leave torch.no_grad() and torch.inference_mode() out of what trains."
            )
        if with_gradient:
            last = with_gradient[-1]
            return f"{start} The last module whose output has one is {last}. {_GRADIENT_BREAKERS}"
        return (
            f"{start} No parameter that trains takes part in {type(model).__name__}.forward "
            f"({', '.join(names[:4])}), or under torch.no_grad(). Use them, or set requires_grad."
        )

    def _explain_data_error(self, error: Exception) -> str | None:
        """Return what an error of the loop means; None for one that the data does not cause."""
        from runner.diagnostics.saved_batch import save_batch

        run = self.run
        training = self.state.model.training
        step = self.state.step
        text = str(error)
        reason = worker_failure(error)
        if reason and not training:
            failed = [label for label, loader in self.evaluated.items() if loader.has_failed]
            return worker_message(reason, f"the {[*failed, *self.evaluated][0]} set")
        if reason:
            ahead = 1  # it raised: the batch is the next one
            if not is_dataset_error(error):
                # It was killed: any batch that the workers load in advance may be the cause.
                ahead = -(-PREFETCH * self.train.options.workers // run.spec.train.accumulate)
            steps = f"step {step + 1}" if ahead == 1 else f"steps {step + 1} to {step + ahead}"
            message = worker_message(reason, f"the train set for {steps}")
            saved = save_batch(run, self.train, range(step + 1, step + 1 + ahead), reason)
            return f"{message}\n{saved}"
        # A label or token that the model has no output or embedding for.
        is_bad = _BAD_LABEL.search(text) or _BAD_INDEX in text
        reason = errors.first_line(text)
        if is_bad and not training:
            # The sets are evaluated one after the other: the first with such a sample failed.
            sample = ""
            for label, loader in self.evaluated.items():
                sample = _first_bad_sample(run, all_targets(loader), reason)
                if sample.startswith(" Sample"):
                    return f"In the evaluation of the {label} set: {reason}.{sample}"
            return f"In the evaluation: {reason}.{sample}"
        first = step
        if not is_bad:
            if _DEVICE_ASSERT not in text:
                return None
            # A GPU reports it late, and the host reads records at most two blocks after the device.
            first = max(self.train.start.step + 1, step - 2 * run.spec.train.log_every)
        steps = range(first, step + 1)
        where = f"step {step}" if len(steps) == 1 else f"one of steps {first} to {step}"
        samples = [samples_of_step(self.train, run.spec.train.accumulate, n) for n in steps]
        sample = _first_bad_sample(run, targets_of_steps(self.train, samples), reason)
        message = f"At {where}: {reason}.{sample}"
        return f"{message}\n{save_batch(run, self.train, steps, message)}"


def _larger_batch(run: RunContext, loader: DatasetLoader) -> str:
    """Return the batch size that leaves a batch norm two examples in every batch."""
    least = 2 * run.strategy.rank.world_size
    if isinstance(loader, StreamLoader):
        return (
            "In training a batch norm needs two examples in each process. Type train.batch_size="
            f"{max(loader.batch_size, least)}, and have the stream yield a multiple of it."
        )
    examples = loader.epoch_examples
    sizes = range(max(loader.batch_size, least), examples + 1)
    fitting = next((size for size in sizes if not 0 < examples % size < least), least)
    last = examples % loader.batch_size
    rest = f", the last one {last}" if last else ""
    return (
        "In training a batch norm needs two examples in each process: an epoch has "
        f"{examples} examples, a batch {loader.batch_size}{rest}. Type train.batch_size={fitting}."
    )


def _first_bad_sample(
    run: RunContext, portions: Iterator[tuple[list[int], Any]], reason: str
) -> str:
    """Return a sentence with the first sample whose label is no class, or another cause.

    Args:
        run: the run.
        portions: samples and their targets.
        reason: the error's text.
    """
    classes = (run.spec.data.get("meta") or {}).get("classes")
    if not classes and _BAD_INDEX not in reason:
        return " Labels go from 0 to the number of the model's outputs less one."
    with suppress(Exception):  # an error of the explanation must not hide the one it explains
        for samples, target in portions:
            wrong = run.task.misplaced(target, classes) if classes else None
            if classes and wrong is not None and wrong.any():
                first = int(wrong.nonzero()[0])
                return f" Sample {samples[first]}: {label_problem(target[first], classes)}"
    if _BAD_INDEX in reason:
        return " An embedding has no more rows than the largest number among its inputs."
    return ""


def _requires_grad(nest: Any) -> bool:
    # torch does not know every mapping (ModelOutput).
    leaves = tree_leaves(dict(nest) if isinstance(nest, Mapping) else nest)
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
