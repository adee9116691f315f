"""Assemble what a model is trained or evaluated with: its optimizers and the training state.

Every mode and the memory forecast build their state here, so that they cannot drift apart: a replay
that assembled its optimizer in another order than training would not be bit-exact.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.core import (
    ConfigError,
    ConversionPlan,
    Precision,
    RunSpec,
    TrainState,
    errors,
    fmt,
    refuse,
    run_context,
    targets,
    tensor_facts,
    train_state,
)
from runner.precision.weight_updates import Nearest
from runner.precision.wide_step import (
    STATE_DTYPES,
    attach_update,
    check_state_dtype,
    stuck_averages,
)
from runner.training.own_state import own_hooks
from runner.training.parameter_groups import (
    NamedParameters,
    divide_parameters,
    entry_options,
    group_problems,
    matched_names,
)
from runner.training.schedules import Node, build_scheduler, check_scheduler
from runner.training.weight_average import OptimizerModes, WeightAverage, has_modes


def parameters_by_optimizer(
    node: Node, model: nn.Module, named: NamedParameters
) -> list[tuple[str, Node, NamedParameters]]:
    """Return each optimizer's key, node and parameters; a parameter goes to the first match.

    Args:
        node: the config's optimizer node: one with a `_target_`, or several by names of their own.
        model: the owner of the parameters, for `match: matrices`.
        named: the trainable parameters by name.

    Raises:
        ConfigError: an optimizer gets no parameter, a parameter no optimizer, or a setting belongs
            to none of several optimizers.
    """
    if "_target_" in node:
        return [("optimizer", node, named)]
    keys = fmt.grouped((isinstance(part, Mapping), key) for key, part in node.items())
    refuse(
        f"optimizer.{key} belongs to one of {', '.join(keys.get(True, ()))}. "
        f"Type optimizer.<name>.{key}."
        for key in keys.get(False, ())
    )
    free = dict(named)
    shares = []
    for key, part in optimizer_nodes(node):
        matched = matched_names(f"{key}.match", part.get("match"), named, model)
        share = {name: free.pop(name) for name in [*free] if name in matched}
        if not share:
            raise ConfigError(
                f"{key}.match={part.get('match')} takes no parameter of the model. "
                f"Left for it: {fmt.first_names([*free]) or 'none'}."
            )
        shares.append((key, part, share))
    # A parameter without an optimizer would stay at its initial value, unnoticed.
    if free:
        raise ConfigError(
            f"No optimizer takes: {fmt.first_names([*free])}. Give one of them match: null."
        )
    return shares


def optimizer_nodes(node: Node) -> list[tuple[str, Node]]:
    """Return the key and the node of each optimizer in the order in which they are built.

    Args:
        node: the config's optimizer node: one with a `_target_`, or several by names of their own.
    """
    if "_target_" in node:
        return [("optimizer", node)]
    nodes = [(f"optimizer.{k}", part) for k, part in node.items() if isinstance(part, Mapping)]
    # One that takes every parameter comes last, or it would leave none to the others. Checkpoints
    # hold the optimizers in this order.
    return sorted(nodes, key=lambda item: item[1].get("match") is None)


def embedding_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of embedding tables, also those that another layer shares."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return {p for table in tables for p in table.parameters()}


def build_optimizer(
    key: str,
    node: Node,
    params: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
    embeddings: Collection[nn.Parameter] = (),
) -> Optimizer:
    """Return an optimizer of a config node, with torch's fused kernel where it has one, and in
    training mode where it has modes.

    Args:
        key: of its node, for messages.
        node: its target and keywords; a `fused` in it decides.
        params: that it updates, or groups of them with options of their own.
        embeddings: those whose state a low-bit optimizer (runner.training.lowbit_optimizers) keeps
            in 32 bits, in groups of their own.

    Raises:
        ConfigError: the target refuses its keywords.
    """
    target = targets.locate(node["_target_"])
    node = targets.without_runner_keys("optimizer", node)
    # What is no group is one of the parameters.
    groups = [group for group in params if isinstance(group, dict)] or [{"params": [*params]}]
    every = [p for group in groups for p in group["params"]]
    if node.get("fused") and _loses_updates(target, every):
        raise ConfigError(
            f"{key}.fused=true: before torch 2.14 the fused SGD of a CPU leaves most elements of "
            f"16-bit weights as they were, and this is torch {tensor_facts.TORCH_VERSION}. "
            f"Type {key}.fused=false."
        )
    if node.get("fused") is None and _may_be_fused(target, every):
        # A refusal (of this device, dtype or combination of keywords) is no error: the plain call
        # below works, or raises the reason.
        with suppress(RuntimeError, TypeError, ValueError):
            # An optimizer writes its options into the groups, and keeps them where it refuses.
            copies = [{**group} for group in groups]
            return _in_training_mode(targets.instantiate({**node, "fused": True}, copies, key=key))
    if not getattr(target, "wide_embeddings", False):
        return _in_training_mode(targets.build_group(key, node, params))
    wide = {*embeddings}
    divided = []
    for group in groups:
        for is_wide, options in ((False, {}), (True, {"optim_bits": 32})):
            part = [p for p in group["params"] if (p in wide) is is_wide]
            if part:
                divided.append({**group, "params": part, **options})
    return targets.build_group(key, node, divided)


def _in_training_mode(optimizer: Any) -> Optimizer:
    if has_modes(optimizer):
        optimizer.train()
    return optimizer


def _may_be_fused(target: Any, params: list[nn.Parameter]) -> bool:
    """Return whether to try an optimizer's fused kernel.

    False for what torch would refuse only in the first step, or computes wrongly.
    """
    # torch refuses fused complex parameters only in the first step.
    if not all(p.is_floating_point() for p in params) or _loses_updates(target, params):
        return False
    # torch's fused kernels take sharded parameters in these two optimizers only.
    if any(map(tensor_facts.is_sharded, params)):
        return target in (torch.optim.Adam, torch.optim.AdamW)
    return "fused" in signature(target).parameters


def _loses_updates(target: Any, params: list[nn.Parameter]) -> bool:
    """Return whether an optimizer's fused kernel leaves elements of parameters as they were."""
    is_narrow_on_cpu = any(p.element_size() == 2 and p.device.type == "cpu" for p in params)
    return target is torch.optim.SGD and is_narrow_on_cpu and tensor_facts.TORCH_VERSION < (2, 14)


def build_scheduled_optimizers(
    spec: RunSpec, model: nn.Module, precision: Precision, steps: int, direction: str | None = None
) -> list[train_state.ScheduledOptimizer]:
    """Build the optimizers over the trainable parameters, each with its schedule.

    Args:
        spec: its optimizer node holds one `_target_`, or several under names of their own.
        model: converted and on its device.
        precision: refuses optimizers that cannot work in it.
        steps: optimizer steps of the whole run.
        direction: max or min, of the task's quality, which a schedule may follow.

    Raises:
        ConfigError: nothing is trainable, or an optimizer gets nothing or cannot work here.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        if not precision.freezes:
            raise ConfigError("The model has no trainable parameter: every one is frozen.")
        raise ConfigError(
            f"Nothing is left to train: precision={precision.name} freezes the weights that it "
            "quantises, and the model has no other trainable parameter. Type adapter=lora, "
            "precision=bnb-int8-training, or precision.ignore_modules=[<module that trains>]."
        )
    embeddings = embedding_parameters(model)
    sparse = train_state.sparse_parameters(model)
    shares = parameters_by_optimizer(spec.optimizer, model, named)
    # Neither clipping, nor a second optimizer, nor a step that is skipped has a place between the
    # evaluations of one step.
    clips = spec.train.clip_norm is not None or spec.train.clip_value is not None
    scales = precision.scale(torch.device("cpu")).value is not None
    scheduled = []
    for key, node, share in shares:
        groups = divide_parameters(key, node, model, share)
        optimizer = _build_checked(key, node, groups, embeddings, sparse)
        takes_closure, reads_gradients = closure_calls(key, node, optimizer)
        if takes_closure and (len(shares) > 1 or clips or scales):
            raise ConfigError(
                f"{key}={type(optimizer).__name__.lower()} evaluates the loss several times "
                "in a step: it works alone and without train.clip_norm and train.clip_value, and "
                "without a loss scale. Type precision=32-true or precision=bf16-mixed."
            )
        is_wide = precision.update != Nearest.name or state_dtype(key, node) is not None
        is_wide |= has_modes(optimizer) and spec.train.ema is not None
        if is_wide and (has_modes(optimizer) or takes_closure):
            raise ConfigError(
                f"{key}: {type(optimizer).__name__} moves its weights by itself, to those that it "
                "evaluates. Leave precision.update, optimizer.state_dtype and train.ema out, or "
                "type optimizer=adamw."
            )
        attach_rules(key, node, optimizer, precision.update, spec.seed)
        part = train_state.ScheduledOptimizer(
            optimizer,
            build_scheduler(spec.scheduler, optimizer, steps, direction),
            # The only optimizer of a run needs no name: its metrics are those without one.
            name=key.partition(".")[2],
            planned_steps=steps,
            takes_closure=takes_closure,
            reads_gradients=reads_gradients,
        )
        scheduled.append(part)
    precision.check_optimizers([part.optimizer for part in scheduled])
    return scheduled


def closure_calls(key: str, node: Node, optimizer: Optimizer) -> tuple[bool, bool]:
    """Return whether an optimizer's step needs a function that evaluates the loss, as those of
    LBFGS and SAM do, and whether it begins with gradients that are there already, as SAM's does.

    Steps on a small parameter show it: many classes declare `closure=None`, and need one.

    Args:
        key: of the optimizer's node.
        node: its target and keywords.
        optimizer: made of the node.
    """
    closure = signature(type(optimizer).step).parameters.get("closure")
    is_optional = closure is None or closure.default is not closure.empty
    if is_optional and type(optimizer).__module__.startswith(("torch.optim.", "runner.")):
        return False, False

    def stepped(has_gradient: bool, gives_closure: bool) -> Tensor | None:
        p = nn.Parameter(torch.ones(2, 2))
        tried = build_optimizer(key, node, [p])

        def evaluate() -> Tensor:
            p.grad = p.detach().clone()  # of half the sum of squares
            return p.detach().square().sum() / 2

        if has_gradient:
            evaluate()
        try:
            tried.step(evaluate) if gives_closure else tried.step()  # type: ignore[call-overload]
        except Exception:  # of whatever type a class raises for what it lacks
            return None
        return p.detach()

    with torch.random.fork_rng(devices=[]):  # a step may draw numbers, and training must not differ
        if stepped(has_gradient=True, gives_closure=False) is not None:
            return False, False
        after = stepped(has_gradient=True, gives_closure=True)
        alone = stepped(has_gradient=False, gives_closure=True)
    takes_closure = after is not None or not is_optional
    return takes_closure, after is not None and (alone is None or not torch.equal(alone, after))


def state_dtype(key: str, node: Node) -> torch.dtype | None:
    """Return the dtype in which an optimizer is asked to keep its state; None for its own.

    Raises:
        ConfigError: the name of the dtype is not known.
    """
    # A class with a parameter of that name gets the value itself.
    name = targets.runner_values("optimizer", node).get("state_dtype")
    if name is None:
        return None
    if not isinstance(name, str) or name not in STATE_DTYPES:
        allowed = f"{', '.join(STATE_DTYPES)}, or null for the optimizer's own"
        raise ConfigError(f"{key}.state_dtype={name} is not known. Allowed: {allowed}.")
    return STATE_DTYPES[name]


def describe_state_dtypes(
    node: Node, optimizers: Sequence[train_state.ScheduledOptimizer]
) -> Iterator[str]:
    """Yield a line for each optimizer.state_dtype, and a warning of averages that it freezes.

    Args:
        node: the config's optimizer node.
        optimizers: made of the node.
    """
    for (key, part), scheduled in zip(optimizer_nodes(node), optimizers, strict=True):
        dtype = state_dtype(key, part)
        if dtype is None:
            continue
        name = type(scheduled.optimizer).__name__
        kept = tensor_facts.dtype_name(dtype)
        place = f"{key}.state_dtype"
        yield f"{place}: {name} keeps its state in {kept}, and computes its steps in float32"
        stuck = stuck_averages(dtype, scheduled.optimizer)
        if stuck:
            yield (
                f"warning: {place}={kept}: with {', '.join(stuck)} a step takes less from a "
                "running average than half a unit of its last place, so that it never falls. Type "
                f"smaller ones, as DeepSeek-V3's betas=[0.9,0.95], or {place}=null."
            )


def attach_rules(key: str, node: Node, optimizer: Optimizer, update: str, seed: int = 0) -> None:
    """Have an optimizer step by precision.update and keep its state in optimizer.state_dtype.

    Args:
        key: of its node, for messages.
        node: its target and keywords.
        optimizer: made of the node; changed in place.
        update: value of precision.update.
        seed: of stochastic rounding.

    Raises:
        ConfigError: the optimizer cannot follow one of the two.
    """
    dtype = state_dtype(key, node)
    if dtype is not None:
        check_state_dtype(f"{key}.state_dtype", optimizer, dtype)
    attach_update(optimizer, update, dtype, seed)


def _build_checked(
    key: str,
    node: Node,
    groups: list[dict[str, Any]],
    embeddings: Collection[nn.Parameter],
    sparse: NamedParameters,
) -> Optimizer:
    """Return one optimizer; raise ConfigError where it refuses its parameters' sparse gradients."""
    ids = {id(p) for group in groups for p in group["params"]}
    tables = {name: p for name, p in sparse.items() if id(p) in ids}
    # What is not divided is passed as parameters, which an optimizer of one's own may want.
    params = groups[0]["params"] if [*groups[0]] == ["params"] else groups
    if not tables:
        return build_optimizer(key, node, params, embeddings)
    # torch's fused kernels refuse sparse gradients, in the first step only. A fused=true that was
    # typed is passed on, and refused below.
    chosen = dict(node)
    takes_fused = "fused" in signature(targets.locate(node["_target_"])).parameters
    if takes_fused and not node.get("fused"):
        chosen["fused"] = False
    _check_sparse(key, chosen, tables)
    return build_optimizer(key, chosen, params, embeddings)


def _check_sparse(key: str, node: Node, tables: NamedParameters) -> None:
    """Raise ConfigError where an optimizer refuses sparse gradients.

    Args:
        key: of its node.
        node: its target and keywords.
        tables: by name, the parameters whose gradients are sparse.
    """
    # torch's optimizers refuse them in a step only, when a model and its data have been loaded. So
    # two steps are tried here on a table of two rows; the second one uses the state of the first.
    invariants = torch.sparse.check_sparse_tensor_invariants
    if not invariants.is_enabled():
        invariants.disable()  # else torch warns of the tensors that its own optimizers make
    dtype = next(iter(tables.values())).dtype
    table = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    optimizer = build_optimizer(key, node, [table])
    # LBFGS flattens all gradients to one vector, and its step needs a function of the loss.
    if closure_calls(key, node, optimizer)[0]:
        return
    try:
        for _ in range(2):
            table.grad = torch.ones_like(table).to_sparse(1)  # of rows, as an embedding's is
            optimizer.step()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = errors.first_line(error)
        raise ConfigError(
            f"{key}: {type(optimizer).__name__} refuses the sparse gradients of "
            f"{', '.join(tables)}: {reason}. Type optimizer=sgd optimizer.weight_decay=0 or "
            "optimizer=adagrad optimizer.weight_decay=0, or build the embedding with sparse=False."
        ) from error


def check_arguments(spec: RunSpec) -> None:
    """Raise ConfigError for what optimizers refuse, before anything is built.

    Each optimizer is built over a parameter of its own, so that a wrong keyword stops a sweep's job
    before its data and its model are loaded.
    """
    check_scheduler(spec.scheduler)
    dummy = [nn.Parameter(torch.zeros(2, 2))]
    for key, node in optimizer_nodes(spec.optimizer):
        rates = [options["lr"] for options in (node, *entry_options(node)) if "lr" in options]
        wrong = [rate for rate in rates if isinstance(rate, float) and not isfinite(rate)]
        refuse(f"{key}.lr={rate} is out of range. Allowed: a finite number." for rate in wrong)
        optimizer = build_optimizer(key, node, dummy)
        refuse(group_problems(key, node, optimizer))
        attach_rules(key, node, optimizer, Nearest.name)
        # Constructors check their own keywords alone, so each group's options are tried as such.
        for i, options in enumerate(entry_options(node)):
            build_optimizer(f"{key}.groups.{i}", {**node, **options}, dummy)


def build_state(
    setup: run_context.TrainingSetup,
    model: nn.Module,
    total_steps: int | None = None,
    plan: ConversionPlan = ConversionPlan(),
) -> TrainState:
    """Build the state that the training step and the evaluation work on.

    The model is not compiled here: prepare_model does that after the first forward, which must
    still show the dtypes of each module.

    Args:
        setup: the parts of the run.
        model: converted and on its device; sharded, where the strategy shards. Another strategy
            wraps it if it is to be trained.
        total_steps: optimizer steps of the whole run, which schedules need; None builds no
            optimizers, for a model that is only evaluated.
        plan: by which the model was converted.

    Raises:
        ConfigError: nothing is trainable, or an optimizer or the strategy does not fit the model or
            the precision.
    """
    spec = setup.spec
    precision = setup.precision
    wrapped = model
    optimizers = []
    evaluated = None
    widened = ()
    if total_steps is not None:
        if not setup.strategy.shards:
            wrapped = setup.strategy.wrap(model, setup.device)
        direction = setup.task.direction
        optimizers = build_scheduled_optimizers(spec, model, precision, total_steps, direction)
        plain_optimizers = [part.optimizer for part in optimizers]
        params = [part.params for part in optimizers]
        if spec.train.ema is not None:
            evaluated = WeightAverage(model, params, spec.train.ema)
        elif any(map(has_modes, plain_optimizers)):
            evaluated = OptimizerModes(model, plain_optimizers)
        # FSDP adds them in float32 by itself.
        if spec.train.accumulate_float32 and not setup.strategy.shards:
            widened = tensor_facts.narrow_parameters(chain.from_iterable(params))
    state = TrainState(
        wrapped,
        precision,
        setup.task,
        precision.scale(setup.device),
        optimizers,
        setup.device,
        spec.train.clip_norm,
        setup.strategy,
        clip_value=spec.train.clip_value,
        evaluated=evaluated,
        widened=widened,
        plan=plan,
    )
    if optimizers:
        state.hooks.add(*own_hooks(state, spec.seed))
    if isinstance(evaluated, WeightAverage):
        # After the undo of skipped steps: running statistics are averaged, too.
        state.hooks.add(evaluated)
    return state
