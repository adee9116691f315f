"""Build a run's precision, and refuse what it cannot do, before data and model take time."""

import torch

from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.distributed.strategy import Strategy
from runner.precision.contract import Precision
from runner.utils.errors import ConfigError


def build_precision(spec: RunSpec, device: torch.device, strategy: Strategy) -> Precision:
    """Build the precision of a run that can do in it what its settings ask for.

    Args:
        spec: its precision node is called; its mode and its adapter must suit the precision.
        device: that the run computes on.
        strategy: how the processes of the run share the model.

    Raises:
        ConfigError: a value is not allowed, packed weights would train, gradients would be rounded,
            or the adapter cannot be added in the precision.
        Unavailable: this machine or the strategy lacks what the precision needs.
    """
    precision: Precision = build_group("precision", spec.precision)
    precision.require(device)
    precision.require_strategy(strategy)
    adapter_node = spec.adapter if spec.adapter.get("_target_") else None
    if spec.mode == "train" and precision.trained_in and adapter_node is None:
        raise ConfigError(
            f"mode=train with precision={precision.name}: its weights are packed and do not train. "
            f"Type precision={precision.trained_in} to train weights for it, mode=evaluate "
            "checkpoint=<run> to evaluate trained ones, or adapter=lora init.weights=<run> to tune "
            "an adapter."
        )
    if strategy.reduce_dtype is not None and precision.storage is torch.float64:
        raise ConfigError(
            f"strategy.reduce_dtype={strategy.reduce_dtype} would round the float64 gradients of "
            f"precision={precision.name}. Allowed here: null. Type strategy.reduce_dtype=null."
        )
    # Other modes add nothing: they load a run's adapter, or merge it where it does not fit.
    if adapter_node is not None and spec.mode in ("train", "plan", "explain"):
        adapter = build_group("adapter", adapter_node)
        # An adapter of the user's own may lack it.
        if hasattr(adapter, "check_precision"):
            adapter.check_precision(precision)
    return precision
