"""Prepare a model for the loop: memory format, activation checkpointing, torch.compile.

All of it happens in place: modules keep their names, parameters and class names.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runner.config.schema import CUDA_GRAPHS, RunSpec
from runner.precision.precision import Precision
from runner.utils.errors import ConfigError
from runner.utils.modules import repeated_blocks, select_modules

SHAPES = 8  # of its inputs that a block is compiled for, in training and evaluation together
COMPILERS = ("c++", "g++", "clang++", "cl")


def check_compile_options(
    spec: RunSpec, precision: Precision, device: torch.device, model: nn.Module
) -> None:
    """Raise ConfigError for what prepare_model cannot do to this model, before it computes."""
    problems = [*_compile_problems(spec, precision, device)] if spec.train.compile else []
    what, typed = spec.train.activation_checkpointing, "train.activation_checkpointing"
    if what and precision.no_recompute_reason:
        problems.append(
            f"{typed}={str(what).lower()} computes forwards twice, and precision={precision.name} "
            f"{precision.no_recompute_reason}"
        )
    if (what is True or spec.train.compile == "regional") and not repeated_blocks(model):
        problems.append(
            f"{typed}=true and train.compile=regional take the repeated blocks of a model, and "
            "this one has none: members of one class, in a ModuleList, ModuleDict or Sequential, "
            f"that hold modules of their own. Type {typed}=[<module>] or train.compile=default."
        )
    if what and what is not True:
        modules_to_compile(model, what)
    if problems:
        raise ConfigError(*problems)


def _compile_problems(spec: RunSpec, precision: Precision, device: torch.device) -> Iterator[str]:
    mode, typed = str(spec.train.compile).lower(), f"train.compile={spec.train.compile}"
    if precision.no_recompute_reason:
        why = precision.no_recompute_reason
        yield f"{typed.lower()} compiles forwards, and precision={precision.name} {why}"
    if mode == "reduce-overhead" and device.type != "cuda":
        yield (
            f"{typed} replays CUDA graphs, and this run is on {device.type}. "
            "Type train.compile=default."
        )
    if mode in CUDA_GRAPHS and device.type == "cuda" and spec.train.accumulate > 1:
        yield (
            f"{typed} replays CUDA graphs, in whose memory gradients of several micro-batches do "
            "not add up (pytorch/pytorch#169545). Type train.accumulate=1, "
            "train.compile=max-autotune-no-cudagraphs or train.compile=default."
        )
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), *COMPILERS))):
        yield (
            f"{typed.lower()} needs a C++ compiler, and none of {', '.join(COMPILERS)} is on the "
            "PATH. Install one (apt install g++), set CXX=<path>, or type train.compile=false."
        )


def prepare_model(
    spec: RunSpec, precision: Precision, device: torch.device, model: nn.Module
) -> None:
    """Change a model, on its device and converted, into the form that the loop runs.

    Each shape of an input is compiled for itself: so what a run computes does not depend on the
    shapes that it has seen before, and a resumed run computes the same.
    """
    train = spec.train
    if train.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if what := train.activation_checkpointing:
        blocks = repeated_blocks(model) if what is True else modules_to_compile(model, what)
        _recompute(blocks, partial(precision.forward, device))
    if train.compile:
        regional = train.compile == "regional"
        mode = None if train.compile is True or regional else str(train.compile)
        blocks = repeated_blocks(model) if regional else [model]
        torch.compiler.reset()
        torch._dynamo.config.recompile_limit = SHAPES * len(blocks)
        for block in blocks:
            block.compile(mode=mode, dynamic=False)


def modules_to_compile(model: nn.Module, patterns: Any) -> list[nn.Module]:
    """Return the outermost modules that patterns name; of a list or dict of modules, its members.

    Raises:
        ConfigError: a pattern matches none.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    names = {name for name, module in model.named_modules()}
    found = select_modules("train.activation_checkpointing", patterns, names)
    callable_ = {
        name
        for name in found
        if not isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict)
    }
    return [model.get_submodule(name) for name in sorted(callable_) if not _inside(name, callable_)]


def _inside(name: str, names: set[str]) -> bool:
    """Whether another of the names holds this one."""
    parts = name.split(".")
    return bool(name) and any(".".join(parts[:cut]) in names for cut in range(len(parts)))


def _recompute(blocks: list[nn.Module], again: Callable[[], Any]) -> None:
    """Have modules keep their inputs alone for the backward, and compute the rest anew there.

    Args:
        blocks: changed in place, each into a subclass of its own class, under the same name.
        again: context around the second forward, which the backward runs.
    """
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for block in blocks:
        kind = type(block)
        if kind not in made:
            made[kind] = _recomputing(kind, again)
        block.__class__ = made[kind]


def _recomputing(kind: type[nn.Module], again: Callable[[], Any]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        once = partial(kind.forward, self)
        if torch.compiler.is_compiling():  # one graph holds both forwards, in one context
            return checkpoint(once, *args, use_reentrant=False, **kwargs)
        return checkpoint(once, *args, use_reentrant=False, context_fn=_contexts, **kwargs)

    def _contexts() -> tuple[Any, Any]:
        return nullcontext(), again()

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
