"""The state of a run: everything that changes while the run trains."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from runner.distributed.strategy import Single, Strategy
from runner.precision.contract import NO_PLAN, ConversionPlan, Precision
from runner.precision.gradients import parameters_of
from runner.precision.loss_scale import HostFlag, LossScale
from runner.precision.weight_updates import Nearest, WideForward
from runner.training.model_call import call_model, plain_module
from runner.training.own_state import OwnState, SkippedSteps
from runner.training.tasks.task import Task
from runner.training.weight_average import WeightAverage
from runner.utils.reproducibility import saved_forward_state

EvaluationCall = Callable[[str, Mapping[str, float], tuple[Any, Any]], Mapping[str, float]]
"""Takes the label of a set, its metrics and its first batch, and returns further metrics."""


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
        # Of a group without a name, or of several optimizers, the optimizer's own name counts.
        for group in self.optimizer.param_groups:
            words = [self.name, group.get("name", "")]
            self.group_names.append(".".join(word for word in words if word))

    @property
    def lr(self) -> float:
        """Return the learning rate in force, of the first parameter group."""
        return self.optimizer.param_groups[0]["lr"]

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
        average: of the weights, for the evaluations; None averages nothing.
        clip_value: largest magnitude of each element of the gradients; None does not clip.
        strategy: how the processes of the run share the model.
        step: attempted optimizer steps.
        epoch: passes over the data that were begun.
        position: examples of this pass that were taken, in all processes.
        skipped: skipped steps, as far as the records have arrived on the host.
        last_evaluation_step: the step after which the last evaluation ran; 0 before the first.
        stagnant_share: the share of parameter elements that had a gradient and that a step did not
            change, the last in which evaluation.Stagnation counted; None before that.
        term_names: of the values that the task returns beside its loss; None before a step.
        widened: parameters of 16 bits, to whose gradients micro-batches are added in float32.
        loss_weights: of the losses that the model returns beside the task's, by their names.
        seed: of the run, the same in all processes.
        plan: by which the model was converted and is called.
        evaluation_hook: is called after the evaluation of each set; None for none.
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
    average: WeightAverage | None = None
    term_names: tuple[str, ...] | None = None
    widened: Collection[Tensor] = ()
    loss_weights: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    plan: ConversionPlan = NO_PLAN
    _update_hook: Callable[[], None] | None = field(default=None, init=False)
    evaluation_hook: EvaluationCall | None = field(default=None, init=False)

    def set_update_hook(self, hook: Callable[[], None]) -> None:
        """Set the function that each step calls just before weights and optimizer state change.

        Checkpoints wait there until their copy of the weights is complete, and the memory forecast
        separates the backward from the update.
        """
        self._update_hook = hook

    def set_evaluation_hook(self, hook: EvaluationCall) -> None:
        """Set the function that is called after the evaluation of each set."""
        self.evaluation_hook = hook

    def cast_at_each_use(self) -> None:
        """Have autocast cast weights at each use: the forward changes some between two uses."""
        self.plan = replace(self.plan, caches_casts=False)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the precision's context around a forward."""
        return self.precision.forward(self.device, self.plan)

    def backward_context(self) -> AbstractContextManager[Any]:
        """Return the precision's context around a backward."""
        return self.precision.backward(self.device, self.plan)

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
        if not self.evaluates_others:
            yield
            return
        # A checkpoint may still be copying the weights that others take the place of.
        self.run_update_hook()
        # A forward leaves gathered copies, which are those of before.
        self.strategy.drop_gathered_weights()
        optimizers = [part.optimizer for part in self.optimizers]
        with self.average.swapped_in() if self.average else evaluating(optimizers):
            try:
                yield
            finally:
                self.strategy.drop_gathered_weights()

    @property
    def evaluates_others(self) -> bool:
        """Return whether other weights are evaluated than those that train."""
        return self.average is not None or any(has_modes(p.optimizer) for p in self.optimizers)

    def evaluated_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the weights that are evaluated in place of others."""
        if self.average is not None:
            return self.average.state_dict()
        trained = {id(p) for p in self.trainable_parameters}
        with self.evaluated_weights():
            named = self.plain_model.state_dict(keep_vars=True)
            weights = {n: p.detach().clone() for n, p in named.items() if id(p) in trained}
        return {"decay": 0.0, "weights": weights}

    def run_update_hook(self) -> None:
        """Call the update hook, if one is set."""
        if self._update_hook is not None:
            self._update_hook()

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
    def own_state(self) -> OwnState:
        """Return what the model changes by itself, from the first use on."""
        return OwnState(self.plain_model, self.strategy.rank.world_size, self.optimizers)

    @cached_property
    def skipped_steps(self) -> SkippedSteps | None:
        """Return what undoes the forwards of skipped steps; None where no step is skipped."""
        return None if self.scale.value is None else SkippedSteps(self.plain_model)

    @cached_property
    def wide_forward(self) -> WideForward | None:
        """Return what has the model's own writes follow precision.update; None without a rule."""
        model = self.plain_model
        is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
        if is_compiled or self.precision.update == Nearest.name:
            return None
        optimizers: list[Any] = [part.optimizer for part in self.optimizers]
        stores = [o.weight_store for o in optimizers if hasattr(o, "weight_store")]
        return WideForward(model, self.precision.update, stores)

    def end_first_step(self) -> None:
        """Note what the model changes by itself in a step; own_state was used before it."""
        counts_all = self.own_state.end_first_step()
        if self.skipped_steps is not None:
            # A skipped step has left no change to compare.
            trusts_versions = counts_all and not self.skipped_steps.found_inf
            self.skipped_steps = SkippedSteps(self.plain_model, trusts_versions)

    def end_second_step(self) -> Collection[str]:
        """Return the names of the tensors that the model writes by precision.update; without any,
        follow its writes no longer. In the first step a moving average may be a copy."""
        kept = self.wide_forward.kept if self.wide_forward else {}
        self.wide_forward = self.wide_forward if kept else None
        return kept

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


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has train() and eval(), which give its parameters the weights
    that train and those that are evaluated."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluating(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Return the context in which optimizers that have modes are in evaluation mode."""
    moded: list[Any] = [optimizer for optimizer in optimizers if has_modes(optimizer)]
    weights = [p.detach() for p in parameters_of(*moded)]
    copies = [weight.clone() for weight in weights]
    for optimizer in moded:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in moded:
            optimizer.train()
        # What train() computes back is rounded, and an evaluation must not change the training.
        for weight, copy in zip(weights, copies, strict=True):
            weight.copy_(copy)


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters whose gradients are sparse, by name."""
    tables = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            tables[f"{name}.weight".lstrip(".")] = module.weight
    return {name: p for name, p in tables.items() if p.requires_grad}


@contextmanager
def saved_state(state: TrainState) -> Iterator[None]:
    """Return a context at whose end what a computation changes is restored, and its gradients are
    dropped."""
    model = state.plain_model
    # Scales of FP8, which are no buffers.
    scales = tree_map_only(Tensor, Tensor.clone, state.precision.state_dict(model))
    with ExitStack() as stack:
        stack.callback(state.precision.load_state_dict, model, scales)
        stack.enter_context(saved_forward_state(model, state.device))
        stack.callback(nn.Module.zero_grad, model)
        yield
