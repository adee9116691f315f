"""The state of a run: everything that changes while the run trains."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.core.base.tensor_facts import HostFlag
from runner.core.loop.model_call import call_model, plain_module
from runner.core.loop.strategy import Single, Strategy
from runner.core.loop.task import Task
from runner.core.policy.loss_scale import LossScale
from runner.core.policy.precision import ConversionPlan, Precision

EvaluationCall = Callable[[str, Mapping[str, float], tuple[Any, Any]], Mapping[str, float]]
"""Takes the label of a set, its metrics and its first batch, and returns further metrics."""


_NOTHING = nullcontext()


class StepHook:
    """What else happens in each optimizer step; nothing, but for the methods that are overridden.

    The methods are called in the order in which they stand here.
    """

    def begin(self, step: int) -> None:
        """Act before the first forward of a step, whose number is given."""

    def around_forwards(self) -> AbstractContextManager[object]:
        """Return the context from the first forward of a step to the last backward."""
        return _NOTHING

    def before_update(self) -> None:
        """Act before weights and optimizer state change, by a step or for an evaluation."""

    def end(self, found_infs: Sequence[Tensor | None]) -> None:
        """Act after the optimizers have stepped.

        Args:
            found_infs: of each optimizer, 1 where its step was skipped and 0 elsewhere; scalars on
                the device, None for a precision without a loss scale.
        """

    def saved_content(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the hook, by the keys of its content; not copied."""
        return {}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restore what saved_content returned, from the content of a checkpoint."""


class _BeforeUpdate(StepHook):
    """Calls a function before each update."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def before_update(self) -> None:
        self._call()


Hook = TypeVar("Hook", bound=StepHook)


class StepHooks(StepHook):
    """The hooks of a training's steps as one, which calls them in the order of their addition."""

    def __init__(self) -> None:
        self._hooks: list[StepHook] = []
        self._select_methods()

    def _select_methods(self) -> None:
        # A call of a method that does nothing would cost host time in each step.
        def overridden(name: str) -> list[Callable[..., Any]]:
            own = getattr(StepHook, name)
            return [getattr(h, name) for h in self._hooks if getattr(type(h), name) is not own]

        self._begins = overridden("begin")
        self._contexts = overridden("around_forwards")
        self._updates = overridden("before_update")
        self._ends = overridden("end")

    def add(self, *hooks: StepHook) -> None:
        """Call hooks in each step from now on."""
        self._hooks += hooks
        self._select_methods()

    def call_before_update(self, call: Callable[[], None]) -> StepHook:
        """Call a function before each update from now on; return its hook.

        Checkpoints wait there until their copy of the weights is complete, and the memory forecast
        separates the backward from the update.
        """
        hook = _BeforeUpdate(call)
        self.add(hook)
        return hook

    def remove(self, hook: StepHook) -> None:
        """Call a hook no longer."""
        self._hooks.remove(hook)
        self._select_methods()

    def find(self, kind: type[Hook]) -> Hook | None:
        """Return the hook of a class; None without one."""
        return next((hook for hook in self._hooks if isinstance(hook, kind)), None)

    def begin(self, step: int) -> None:
        for begin in self._begins:
            begin(step)

    def around_forwards(self) -> AbstractContextManager[object]:
        return self._entered() if self._contexts else _NOTHING

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            yield

    def before_update(self) -> None:
        for before_update in self._updates:
            before_update()

    def end(self, found_infs: Sequence[Tensor | None]) -> None:
        for end in self._ends:
            end(found_infs)

    def saved_content(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for hook in self._hooks:
            content |= hook.saved_content()
        return content

    def restore(self, content: Mapping[str, Any]) -> None:
        for hook in self._hooks:
            hook.restore(content)


class EvaluatedWeights(ABC):
    """Weights that are evaluated in place of those that train.

    Attributes:
        decay: of an average; 0 for other weights.
    """

    decay: float = 0.0

    @abstractmethod
    def swapped_in(self) -> AbstractContextManager[None]:
        """Return a context in which the model has these weights."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the decay, and the weights by the names that the model's state dict has."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore an average from what a checkpoint holds of it."""

    def tensors(self) -> Sequence[Tensor]:
        """Return the tensors that are held for them beside the model's and the optimizers' own."""
        return ()

    def describe(self) -> str:
        """Return one line about them; empty where there is nothing to say."""
        return ""


@dataclass
class ScheduledOptimizer:
    """An optimizer with its schedule and its own parameters.

    Attributes:
        optimizer: over a part of the model's parameters, or all of them.
        scheduler: counts applied steps; None for a constant learning rate.
        pending_found_inf: the found-inf flag of the last step until the schedule has read it; None
            without a schedule. A schedule counts applied steps only, and a read of the flag right
            after its step would make the host wait for the device.
        params: the optimizer's parameters, in the order of its groups.
        name: where a run has several optimizers; empty for the only one.
        planned_steps: steps of the whole run, which the schedule was built for.
        group_names: of the optimizer's groups of parameters; empty where no setting made them.
        takes_closure: whether its step must be given a function that evaluates the loss.
        reads_gradients: whether such a step begins with the gradients that are there, as SAM's
            does, and not with an evaluation, as LBFGS's.
    """

    optimizer: Optimizer
    scheduler: Any = None
    pending_found_inf: HostFlag | None = None
    params: list[Tensor] = field(default_factory=list)
    name: str = ""
    planned_steps: int = 0
    group_names: list[str] = field(default_factory=list, init=False)
    takes_closure: bool = False
    reads_gradients: bool = False

    def __post_init__(self) -> None:
        self.params = [p for group in self.optimizer.param_groups for p in group["params"]]
        # A group without a name, or one of several optimizers, goes by the optimizer's own name.
        for group in self.optimizer.param_groups:
            words = [self.name, group.get("name", "")]
            self.group_names.append(".".join(word for word in words if word))

    @property
    def lr(self) -> float:
        """Return the learning rate in force, of the first parameter group."""
        return self.optimizer.param_groups[0]["lr"]

    def full_rates(self) -> list[float]:
        """Return the learning rate of each group of parameters that the schedule changes."""
        # Schedules keep the rate that they begin from; one that goes up, the highest.
        groups = self.optimizer.param_groups
        return [g.get("max_lr") or g.get("initial_lr", g["lr"]) for g in groups]

    def end_step(self, found_inf: Tensor | None) -> None:
        """Advance the schedule after a step, or keep the found-inf flag that decides about it."""
        # Without a flag the step was applied for certain. With one the schedule waits for the flag,
        # which is copied to the host in the background.
        if self.scheduler is not None and found_inf is not None:
            self.pending_found_inf = HostFlag(found_inf)
        elif self.scheduler is not None:
            self.scheduler.step()

    def advance_schedule(self) -> None:
        """Advance the schedule if the last step was applied, waiting for its found-inf flag."""
        # The flag is set only where a scheduler exists, so the scheduler needs no check here.
        if self.pending_found_inf is not None and not self.pending_found_inf.is_set:
            self.scheduler.step()
        self.pending_found_inf = None


@dataclass
class TrainState:
    """The model of a run, what trains it, and how far the training has come.

    Attributes:
        model: converted and on its device, inside the wrappers of the strategy.
        precision: its contexts and casts surround the forward and the backward.
        task: loss and metrics.
        scale: the loss scale; a null object for a precision without one.
        optimizers: each with its schedule; empty for a model that is only evaluated.
        device: where the model computes.
        clip_norm: largest 2-norm of all gradients together; None does not clip.
        evaluated: the weights that are evaluated; None for those that train.
        clip_value: largest magnitude of each element of the gradients; None does not clip.
        strategy: how the processes of the run share the model.
        step: attempted optimizer steps.
        epoch: passes over the data that were begun.
        position: examples of this pass that were taken, in all processes.
        skipped: skipped steps, as far as the records have arrived on the host.
        last_evaluation_step: the step after which the last evaluation ran; 0 before the first.
        stagnant_share: the share of parameter elements that had a gradient and that a step did not
            change, the last in which evaluation.Stagnation counted; None before that.
        widened: parameters of 16 bits, to whose gradients micro-batches are added in float32.
        loss_weights: of the losses that the model returns beside the task's, by their names.
        hooks: of the steps.
        plan: by which the model was converted and is called.
    """

    model: nn.Module
    precision: Precision
    task: Task
    scale: LossScale
    optimizers: list[ScheduledOptimizer]
    device: torch.device
    clip_norm: float | None = None
    strategy: Strategy = field(default_factory=Single)
    step: int = 0
    epoch: int = 0
    position: int = 0
    skipped: int = 0
    last_evaluation_step: int = 0
    stagnant_share: float | None = None
    clip_value: float | None = None
    evaluated: EvaluatedWeights | None = None
    widened: Collection[Tensor] = ()
    loss_weights: dict[str, float] = field(default_factory=dict)
    hooks: StepHooks = field(default_factory=StepHooks)
    plan: ConversionPlan = ConversionPlan()

    def cast_at_each_use(self) -> None:
        """Have autocast cast weights at each use: the forward changes some between two uses."""
        self.plan = replace(self.plan, caches_casts=False)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the precision's context around a forward."""
        return self.precision.forward(self.device, self.plan)

    def cast(self, inputs: Any) -> Any:
        """Return a batch's model inputs in the dtypes that the model needs."""
        return self.precision.cast(inputs, self.plan)

    def call(self, inputs: Any) -> Any:
        """Return the model's output for a batch's inputs, under the precision's context."""
        with self.forward_context():
            return call_model(self.model, self.cast(inputs))

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Return the context in which the model has the weights that are evaluated.

        They are those of train.ema, or of the eval() of optimizers that have it, as schedule-free
        ones do; else those that train.
        """
        if self.evaluated is None:
            yield
            return
        self.release_weights()
        with self.evaluated.swapped_in():
            try:
                yield
            finally:
                self.strategy.drop_gathered_weights()

    def release_weights(self) -> None:
        """Wait for copies of the weights and drop gathered ones, before others take their place."""
        # A checkpoint may still be copying the weights.
        self.hooks.before_update()
        # A forward leaves gathered copies, which are those of before.
        self.strategy.drop_gathered_weights()

    @property
    def plain_model(self) -> nn.Module:
        """Return the module inside the wrappers of torch.compile and DDP."""
        return plain_module(self.model)

    def record_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Note that the current step was evaluated, for schedules that follow the quality."""
        self.last_evaluation_step = self.step
        for scheduled in self.optimizers:
            if hasattr(scheduled.scheduler, "step_evaluation"):
                scheduled.scheduler.step_evaluation(metrics[self.task.quality])

    def named_rates(self) -> dict[str, float]:
        """Return the learning rate in force of each named group of parameters; empty for most runs.

        Groups that share a name, as those with and without weight decay, share the rate, too.
        """
        rates: dict[str, float] = {}
        for scheduled in self.optimizers:
            groups = scheduled.optimizer.param_groups
            for name, group in zip(scheduled.group_names, groups, strict=False):
                if name:
                    rates[name] = group["lr"]
        return rates

    # These lists are cached: a step reads them, and a walk over the modules costs host time.
    @cached_property
    def trainable_parameters(self) -> list[Tensor]:
        """Return the parameters that the optimizers update, in the optimizers' order."""
        return [p for scheduled in self.optimizers for p in scheduled.params]

    @cached_property
    def complex_parameters(self) -> list[Tensor]:
        """Return the trainable parameters with a complex dtype."""
        return [p for p in self.trainable_parameters if p.is_complex()]

    @cached_property
    def sparse_gradient_parameters(self) -> list[Tensor]:
        """Return the trainable parameters whose gradients are sparse."""
        return [*sparse_parameters(self.plain_model).values()]

    @cached_property
    def takes_closure(self) -> bool:
        """Return whether the only optimizer evaluates the loss by itself, as LBFGS does."""
        return len(self.optimizers) == 1 and self.optimizers[0].takes_closure

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizers' state."""
        for scheduled in self.optimizers:
            for values in scheduled.optimizer.state.values():
                for value in values.values():
                    if isinstance(value, Tensor):
                        yield value


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters whose gradients are sparse, by name."""
    tables = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            tables[f"{name}.weight".lstrip(".")] = module.weight
    return {name: p for name, p in tables.items() if p.requires_grad}
