"""Build optimizers and schedulers, and distribute the parameters among them."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.config.schema import RunSpec
from runner.config.targets import build_group, instantiate, locate
from runner.distributed.strategy import is_sharded
from runner.precision.layers.conv1d import linear_classes
from runner.precision.precision import Precision
from runner.training.sparse_gradients import check_optimizer, sparse_parameters
from runner.training.state import ScheduledOptimizer
from runner.utils.errors import ConfigError
from runner.utils.modules import matches_pattern


def parameters_by_optimizer(
    node: Mapping[str, Any], model: nn.Module, named: dict[str, nn.Parameter]
) -> list[tuple[str, Mapping[str, Any], list[nn.Parameter]]]:
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
        return [("optimizer", node, list(named.values()))]
    stray = [key for key, part in node.items() if not isinstance(part, Mapping)]
    if stray:
        names = ", ".join(key for key in node if key not in stray)
        raise ConfigError(
            *(f"optimizer.{k} belongs to one of {names}. Type optimizer.<name>.{k}." for k in stray)
        )
    free = dict(named)
    shares: list[tuple[str, Mapping[str, Any], list[nn.Parameter]]] = []
    for key, part in optimizer_nodes(node):
        match = part.get("match")
        taken = {name: p for name, p in free.items() if _is_match(match, name, p, model)}
        if not taken:
            raise ConfigError(
                f"optimizer.{key}.match={match} takes no parameter of the model. "
                f"Left for it: {_first_names(free) or 'none'}."
            )
        free = {name: p for name, p in free.items() if name not in taken}
        shares.append((f"optimizer.{key}", part, list(taken.values())))
    # A parameter without an optimizer would stay at its initial value, unnoticed.
    if free:
        raise ConfigError(
            f"No optimizer takes: {_first_names(free)}. Give one of them match: null."
        )
    return shares


def _first_names(named: Mapping[str, nn.Parameter]) -> str:
    return ", ".join(list(named)[:6])


def optimizer_nodes(node: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and nodes of several optimizers in the order in which they are built."""
    # One that takes every parameter comes last, or it would leave none to the others. Checkpoints
    # hold the optimizers in this order.
    return sorted(node.items(), key=lambda item: item[1].get("match") is None)


def _is_match(match: Any, name: str, param: nn.Parameter, model: nn.Module) -> bool:
    if match is None:
        return True
    if match != "matrices":
        patterns = [match] if isinstance(match, str) else match
        return any(matches_pattern(pattern, name) for pattern in patterns)
    if param.ndim != 2:
        return False
    # Muon is made for the matrices of hidden layers (Jordan et al., 2024), and leaves embeddings
    # and the output layer to another optimizer.
    owner = model.get_submodule(name.rpartition(".")[0])
    linears = [module for module in model.modules() if isinstance(module, linear_classes())]
    is_output_layer = owner in linears[-1:]
    return not isinstance(owner, nn.Embedding) and not is_output_layer


def embedding_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of embedding tables, also those that another layer shares."""
    parameters: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            parameters.update(module.parameters())
    return parameters


def build_optimizer(
    key: str,
    node: Mapping[str, Any],
    params: list[nn.Parameter],
    embeddings: Collection[nn.Parameter] = (),
) -> Optimizer:
    """Return an optimizer of a config node, with torch's fused kernel where it has one.

    Args:
        key: of its node, for messages.
        node: its target and keywords; a `fused` in it decides.
        params: that it updates.
        embeddings: those whose state a low-bit optimizer (runner.training.lowbit_optimizers) keeps
            in 32 bits, in a group of their own.

    Raises:
        ConfigError: the target refuses its keywords.
    """
    target = locate(node["_target_"])
    if node.get("fused") is None and _may_be_fused(target, params):
        # A refusal (of this device, dtype or combination of keywords) is no error: the plain call
        # below works, or raises the reason.
        with suppress(RuntimeError, TypeError, ValueError):
            return instantiate({**node, "fused": True}, params, key=key)
    if not getattr(target, "wide_embeddings", False):
        return build_group(key, node, params)
    wide = {id(p) for p in embeddings}
    low_bit_params = [p for p in params if id(p) not in wide]
    wide_params = [p for p in params if id(p) in wide]
    groups: list[dict[str, Any]] = []
    if low_bit_params:
        groups.append({"params": low_bit_params})
    if wide_params:
        groups.append({"params": wide_params, "optim_bits": 32})
    return build_group(key, node, groups)


def _may_be_fused(target: Any, params: list[nn.Parameter]) -> bool:
    """Return whether to try an optimizer's fused kernel.

    False for what torch would refuse only in the first step.
    """
    # torch refuses fused complex parameters, and those of torch_xla, only in the first step.
    if not all(p.is_floating_point() and p.device.type != "xla" for p in params):
        return False
    # torch's fused kernels take sharded parameters in these two optimizers only.
    if any(map(is_sharded, params)):
        return target in (torch.optim.Adam, torch.optim.AdamW)
    return "fused" in signature(target).parameters


RUN_LENGTH_KEYWORDS = ("T_max", "total_steps", "total_iters")
"""Keywords of torch's schedulers that say how long a run is; null means the run's own length."""


def build_scheduler(node: Mapping[str, Any], optimizer: Optimizer, steps: int) -> Any:
    """Build a schedule that counts applied optimizer steps; None for a constant rate."""
    if not node.get("_target_"):
        return None
    filled = dict(node)
    for key in RUN_LENGTH_KEYWORDS:
        if key in filled and filled[key] is None:
            filled[key] = steps
    return build_group("scheduler", filled, optimizer)


def build_scheduled_optimizers(
    spec: RunSpec, model: nn.Module, precision: Precision, steps: int
) -> list[ScheduledOptimizer]:
    """Build the optimizers over the trainable parameters, each with its schedule.

    Args:
        spec: its optimizer node holds one `_target_`, or several under names of their own.
        model: converted and on its device.
        precision: refuses optimizers that cannot work in it.
        steps: optimizer steps of the whole run.

    Raises:
        ConfigError: nothing is trainable, or an optimizer gets nothing or cannot work here.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError(_nothing_trains(precision))
    embeddings = embedding_parameters(model)
    sparse = sparse_parameters(model)
    optimizers = [
        _build_checked(key, node, params, embeddings, sparse)
        for key, node, params in parameters_by_optimizer(spec.optimizer, model, named)
    ]
    precision.check_optimizers(optimizers)
    # LBFGS evaluates the loss several times in one step: neither clipping nor a second optimizer
    # has a place in that.
    has_lbfgs = any(isinstance(o, torch.optim.LBFGS) for o in optimizers)
    if has_lbfgs and (len(optimizers) > 1 or spec.train.clip_norm is not None):
        raise ConfigError("optimizer=lbfgs works alone and without train.clip_norm.")
    return [ScheduledOptimizer(o, build_scheduler(spec.scheduler, o, steps)) for o in optimizers]


def _build_checked(
    key: str,
    node: Mapping[str, Any],
    params: list[nn.Parameter],
    embeddings: Collection[nn.Parameter],
    sparse: Mapping[str, nn.Parameter],
) -> Optimizer:
    """Return one optimizer; raise ConfigError where it refuses its parameters' sparse gradients."""
    ids = {id(p) for p in params}
    tables = {name: p for name, p in sparse.items() if id(p) in ids}
    if not tables:
        return build_optimizer(key, node, params, embeddings)
    # torch's fused kernels refuse sparse gradients, in the first step only. A fused=true that was
    # typed is passed on, and refused below.
    chosen = dict(node)
    if takes_keyword(node, "fused") and not node.get("fused"):
        chosen["fused"] = False

    def build(some: list[nn.Parameter]) -> Optimizer:
        return build_optimizer(key, chosen, some, embeddings)

    first_table = next(iter(tables.values()))
    check_optimizer(key, build, list(tables), first_table.dtype)
    return build(params)


def takes_keyword(node: Mapping[str, Any], keyword: str) -> bool:
    """Return whether a node's target takes a keyword."""
    return keyword in signature(locate(node["_target_"])).parameters


def _nothing_trains(precision: Precision) -> str:
    if not precision.freezes:
        return "The model has no trainable parameter: every one is frozen."
    return (
        f"Nothing is left to train: precision={precision.name} freezes the weights that it "
        "quantises, and the model has no other trainable parameter. Type adapter=lora, "
        "precision=bnb-int8-training, or precision.ignore_modules=[<module>] for one that trains."
    )


def check_arguments(spec: RunSpec) -> None:
    """Raise ConfigError for what optimizers and the adapter refuse, before anything is built.

    Each optimizer is built over a parameter of its own, so that a wrong keyword stops a sweep's job
    before its data and its model are loaded.
    """
    if spec.adapter.get("_target_"):
        build_group("adapter", spec.adapter)
    _check_scheduler(spec.scheduler)
    nodes = {"optimizer": spec.optimizer} if "_target_" in spec.optimizer else spec.optimizer
    for key, node in nodes.items():
        if isinstance(node, Mapping):
            name = key if key == "optimizer" else f"optimizer.{key}"
            build_optimizer(name, node, [nn.Parameter(torch.zeros(2, 2))])


def _check_scheduler(node: Mapping[str, Any]) -> None:
    """Raise ConfigError for a schedule whose step() needs more than the step's number."""
    if not node.get("_target_"):
        return
    target = locate(node["_target_"])
    step = getattr(target, "step", None)
    parameters = signature(step).parameters if step else {}
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    needed: list[str] = []
    for name, parameter in parameters.items():
        is_required = parameter.default is Parameter.empty and parameter.kind in positional
        if name != "self" and is_required:
            needed.append(name)
    if needed:
        raise ConfigError(
            f"scheduler: {node['_target_']} needs {', '.join(needed)} in each step(), and "
            "schedules here follow the optimizer's steps, without a metric. Type "
            "scheduler=cosine, scheduler=linear or scheduler=onecycle, or the _target_ of another "
            "torch.optim.lr_scheduler class; "
            "train.early_stop=<evaluations> watches the validation."
        )
