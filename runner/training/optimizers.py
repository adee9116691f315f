"""Build optimizers and schedulers, and distribute the parameters among them."""

from collections.abc import Collection, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.config.schema import RunSpec
from runner.config.targets import build_group, locate, target_arguments
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
    """Return each optimizer's key, node and parameters; a parameter goes to the first match."""
    if "_target_" in node:
        return [("optimizer", node, list(named.values()))]
    if stray := [key for key, part in node.items() if not isinstance(part, Mapping)]:
        names = ", ".join(key for key in node if key not in stray)
        raise ConfigError(
            *(f"optimizer.{k} belongs to one of {names}. Type optimizer.<name>.{k}." for k in stray)
        )
    left, shares = dict(named), []
    for key, part in optimizer_nodes(node):
        taken = {n: p for n, p in left.items() if _takes(part.get("match"), n, p, model)}
        if not taken:
            raise ConfigError(
                f"optimizer.{key}.match={part.get('match')} takes no parameter of the model. "
                f"Left for it: {', '.join(list(left)[:6]) or 'none'}."
            )
        left = {n: p for n, p in left.items() if n not in taken}
        shares.append((f"optimizer.{key}", part, list(taken.values())))
    if left:
        names = ", ".join(list(left)[:6])
        raise ConfigError(f"No optimizer takes: {names}. Give one of them match: null.")
    return shares


def optimizer_nodes(node: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and nodes of several optimizers in the order in which they are made: one
    that takes every parameter comes last."""
    return sorted(node.items(), key=lambda item: item[1].get("match") is None)


def _takes(match: Any, name: str, param: nn.Parameter, model: nn.Module) -> bool:
    if match is None:
        return True
    if match != "matrices":
        patterns = [match] if isinstance(match, str) else match
        return any(matches_pattern(pattern, name) for pattern in patterns)
    if param.ndim != 2:
        return False
    module = model.get_submodule(name.rpartition(".")[0])
    linears = [m for m in model.modules() if isinstance(m, linear_classes())]
    return not isinstance(module, nn.Embedding) and module not in linears[-1:]


def embedding_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of embedding tables, those that a table shares with another layer included."""
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {p for table in tables for p in table.parameters()}


def build_optimizer(
    key: str,
    node: Mapping[str, Any],
    params: list[nn.Parameter],
    wide: Collection[nn.Parameter] = (),
) -> Optimizer:
    """One optimizer, fused where torch has a fused kernel for these parameters and the config
    does not say otherwise. torch refuses fused complex parameters, and those of torch_xla, only at
    the first step.

    Args:
        key: of its node, for messages.
        node: its target and keywords.
        params: that it updates.
        wide: those whose state a low-bit optimizer (runner.training.lowbit_optimizers) keeps in
            32 bits, in a group of their own.
    """
    target = locate(node["_target_"])
    fusible = all(p.is_floating_point() and p.device.type != "xla" for p in params)
    takes_fused = fusible and "fused" in signature(target).parameters
    if any(map(is_sharded, params)):  # torch parts these fused kernels only
        takes_fused = fusible and target in (torch.optim.Adam, torch.optim.AdamW)
    if takes_fused and target_arguments(node).get("fused") is None:
        try:
            return target(params, **{**target_arguments(node), "fused": True})
        except (RuntimeError, TypeError, ValueError):
            pass  # not for this device, dtype or combination of keywords; the plain call tells why
    if getattr(target, "wide_embeddings", False):
        kept = {id(p) for p in wide}
        groups = [
            {"params": [p for p in params if id(p) not in kept]},
            {"params": [p for p in params if id(p) in kept], "optim_bits": 32},
        ]
        return build_group(key, node, [group for group in groups if group["params"]])
    return build_group(key, node, params)


def build_scheduler(node: Mapping[str, Any], optimizer: Optimizer, steps: int) -> Any:
    """Build a schedule that counts applied optimizer steps; None for a constant rate."""
    if not node.get("_target_"):
        return None
    filled = {k: steps if k in RUN_LENGTH_KEYWORDS and v is None else v for k, v in node.items()}
    return build_group("scheduler", filled, optimizer)


# Keywords of schedulers that say how long a run is; null means the run's own length.
RUN_LENGTH_KEYWORDS = ("T_max", "total_steps", "total_iters")


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
    wide, sparse = embedding_parameters(model), sparse_parameters(model)
    optimizers = [
        _build_checked(key, node, params, wide, sparse)
        for key, node, params in parameters_by_optimizer(spec.optimizer, model, named)
    ]
    precision.check_optimizers(optimizers)
    closure = any(isinstance(o, torch.optim.LBFGS) for o in optimizers)
    if closure and (len(optimizers) > 1 or spec.train.clip_norm is not None):
        raise ConfigError("optimizer=lbfgs works alone and without train.clip_norm.")
    return [ScheduledOptimizer(o, build_scheduler(spec.scheduler, o, steps)) for o in optimizers]


def _build_checked(
    key: str,
    node: Mapping[str, Any],
    params: list[nn.Parameter],
    wide: Collection[nn.Parameter],
    sparse: Mapping[str, nn.Parameter],
) -> Optimizer:
    """One optimizer; raises ConfigError where it refuses the sparse gradients of its parameters."""
    mine = {id(p) for p in params}
    rows = {name: p for name, p in sparse.items() if id(p) in mine}
    if not rows:
        return build_optimizer(key, node, params, wide)
    # torch's fused kernels refuse sparse gradients, in the first step only.
    plain = {"fused": False} if takes_keyword(node, "fused") else {}
    chosen = {**node, **({} if node.get("fused") else plain)}

    def build(some: list[nn.Parameter]) -> Optimizer:
        return build_optimizer(key, chosen, some, wide)

    check_optimizer(key, build, list(rows), next(iter(rows.values())).dtype)
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
    """Raise ConfigError for what optimizers and the adapter refuse, before anything is built."""
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
    needed = [
        name
        for name, parameter in (signature(step).parameters if step else {}).items()
        if name != "self"
        and parameter.default is Parameter.empty
        and parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            f"scheduler: {node['_target_']} needs {', '.join(needed)} in each step(), and "
            "schedules here follow the optimizer's steps, without a metric. Type "
            "scheduler=cosine, scheduler=linear or scheduler=onecycle, or the _target_ of another "
            "torch.optim.lr_scheduler class; "
            "train.early_stop=<evaluations> watches the validation."
        )
