"""Prepare a model for the loop: memory format, activation checkpointing, torch.compile.

All of it happens in place: modules keep their names, parameters and class names.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from runner.core import Precision, RunSpec, accelerators, module_tree, refuse, tensor_facts

MAX_SHAPES_PER_BLOCK = 8
"""Shapes of its inputs that a block is compiled for, in training and evaluation together; torch
runs further ones without compilation."""

EAGER_ROUNDING = "emulate_precision_casts"
"""Setting of torch._inductor.config that keeps the roundings of bfloat16 and float16 between fused
operations. Products and sums keep the compiler's own order."""

CXX_COMPILERS = ("c++", "g++", "clang++", "cl")
"""Names under which a C++ compiler is found, which torch.compile needs."""


def check_compile_options(
    spec: RunSpec, precision: Precision, device: torch.device, model: nn.Module
) -> None:
    """Raise ConfigError for what prepare_model cannot do to this model, before it computes."""
    problems = []
    if spec.train.compile:
        problems.extend(_compile_problems(spec, precision, device))
    choice = spec.train.activation_checkpointing
    key = "train.activation_checkpointing"
    if choice and precision.no_recompute_reason:
        problems.append(
            f"{key}={str(choice).lower()} computes forwards twice, and "
            f"precision={precision.name} {precision.no_recompute_reason}"
        )
    needs_blocks = choice is True or spec.train.compile == "regional"
    if needs_blocks and not module_tree.repeated_blocks(model):
        problems.append(
            f"{key}=true and train.compile=regional take the repeated blocks of a model, and "
            "this one has none: members of one class, in a ModuleList, ModuleDict or Sequential, "
            f"that hold modules of their own. Type {key}=[<module>] or train.compile=default."
        )
    _checkpointed_blocks(choice, model)  # raises for a pattern that matches nothing
    refuse(problems)


def _compile_problems(spec: RunSpec, precision: Precision, device: torch.device) -> Iterator[str]:
    """Yield a sentence for each reason why this run cannot be compiled."""
    mode = str(spec.train.compile).lower()
    typed = f"train.compile={spec.train.compile}"
    if precision.no_recompute_reason:
        reason = precision.no_recompute_reason
        yield f"{typed.lower()} compiles forwards, and precision={precision.name} {reason}"
    if device.type == "cuda":
        if mode in spec.train.CUDA_GRAPH_MODES and spec.train.accumulate > 1:
            yield (
                f"{typed} replays CUDA graphs, in whose memory gradients of several micro-batches "
                "do not add up (pytorch/pytorch#169545). Type train.accumulate=1, "
                "train.compile=max-autotune-no-cudagraphs or train.compile=default."
            )
    elif mode == "reduce-overhead":
        yield (
            f"{typed} replays CUDA graphs, and this run is on {device.type}. "
            "Type train.compile=default."
        )
    if spec.train.compile_rounding == "eager":
        if accelerators.is_tpu(device):
            yield (
                "train.compile_rounding=eager is an option of torch's compiler for CPUs and GPUs, "
                "and a TPU has its own. Type train.compile_rounding=fused."
            )
        elif device.type == "cpu" and tensor_facts.TORCH_VERSION < (2, 13):
            yield (
                "train.compile_rounding=eager changes nothing on a CPU before torch 2.13, and this "
                f"is torch {tensor_facts.TORCH_VERSION}. Type train.compile_rounding=fused."
            )
    candidates = (os.environ.get("CXX", "c++"), *CXX_COMPILERS)
    if not any(map(shutil.which, candidates)):
        names = ", ".join(CXX_COMPILERS)
        yield (
            f"{typed.lower()} needs a C++ compiler, and none of {names} is on the "
            "PATH. Install one (apt install g++), set CXX=<path>, or type train.compile=false."
        )


def prepare_model(
    spec: RunSpec, precision: Precision, device: torch.device, model: nn.Module
) -> None:
    """Change a model, on its device and converted, into the form that the loop runs."""
    train = spec.train
    if train.channels_last:
        layout = torch.channels_last
        # Module.to takes weights of 5 dimensions, too, which have no such layout.
        model._apply(lambda t: t.to(memory_format=layout) if t.ndim == 4 else t)
    choice = train.activation_checkpointing
    # Before the compilation, which then sees both forwards.
    if choice:
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            # A block of transformers that is computed a second time would append its keys to the
            # cache of the first time. Only generation reads such caches.
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False
        # The backward runs the second forward, when the contexts of the first one are closed.
        second_context = partial(precision.forward, device)
        # One subclass per class, so that blocks of one kind still share a compiled graph.
        subclass = cache(partial(_checkpointing_class, second_context=second_context))
        for block in _checkpointed_blocks(choice, model):
            block.__class__ = subclass(type(block))
    if not train.compile:
        return
    blocks = _compiled_blocks(train.compile, model)
    mode = None if train.compile in (True, "regional") else str(train.compile)
    options = None
    if train.compile_rounding == "eager":
        # It holds for this compilation alone, and is part of the key of cached compiled code.
        # torch.compile takes either a mode or options.
        from torch._inductor import list_mode_options

        options = {**list_mode_options(mode or "default"), EAGER_ROUNDING: True}
        mode = None
    # What an earlier model of this process compiled counts towards the limit, too.
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = MAX_SHAPES_PER_BLOCK * len(blocks)
    for block in blocks:
        # Each shape is compiled for itself. With dynamic shapes the kernel would depend on the
        # shapes seen before, and a resumed run, which has seen others, would round differently.
        block.compile(mode=mode, options=options, dynamic=False)


def _checkpointed_blocks(choice: Any, model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forwards train.activation_checkpointing computes twice.

    Raises:
        ConfigError: a pattern matches none.
    """
    if not choice:
        return []
    return (
        module_tree.repeated_blocks(model) if choice is True else outermost_modules(model, choice)
    )


def _compiled_blocks(choice: bool | str, model: nn.Module) -> list[nn.Module]:
    """Return the modules that train.compile compiles, each as a whole."""
    if not choice:
        return []
    return module_tree.repeated_blocks(model) if choice == "regional" else [model]


def compiled_modules(choice: bool | str, model: nn.Module) -> set[str]:
    """Return the names of the modules that train.compile compiles, and of those within them."""
    blocks = {id(part) for block in _compiled_blocks(choice, model) for part in block.modules()}
    return {name for name, module in model.named_modules() if id(module) in blocks}


def fused_rounding(spec: RunSpec) -> str:
    """Return how this run's fused operations round half precision between them.

    Returns:
        "eager", "fused", or "" for a run that does not compile.
    """
    if not spec.train.compile:
        return ""
    from torch._inductor import config

    # An environment variable of torch, TORCHINDUCTOR_EMULATE_PRECISION_CASTS, sets it, too.
    return "eager" if getattr(config, EAGER_ROUNDING) else spec.train.compile_rounding


def outermost_modules(model: nn.Module, patterns: Any) -> list[nn.Module]:
    """Return the modules that patterns name and that no other named module holds.

    A ModuleList or ModuleDict has no forward; its members stand for it.

    Raises:
        ConfigError: a pattern matches none.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    names = {name for name, module in model.named_modules()}
    matches = module_tree.select_modules("train.activation_checkpointing", patterns, names)
    modules = {name: model.get_submodule(name) for name in matches}
    containers = nn.ModuleList | nn.ModuleDict
    with_forward = {name for name in modules if not isinstance(modules[name], containers)}
    # An inner module would be computed a third time, inside the second forward of the outer one.
    return [modules[name] for name in sorted(module_tree.outermost_names(with_forward))]


def _checkpointing_class(
    kind: type[nn.Module], second_context: Callable[[], AbstractContextManager[Any]]
) -> type[nn.Module]:
    """Return a subclass whose forward keeps its inputs only, and is computed again in the backward.

    Args:
        kind: class of a module.
        second_context: returns the context around the second forward.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        original = partial(kind.forward, self)
        # A compiled graph holds both forwards, in one context.
        if torch.compiler.is_compiling():
            return checkpoint(original, *args, use_reentrant=False, **kwargs)

        return checkpoint(
            original,
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _second_forward(self, second_context())),
            **kwargs,
        )

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@contextmanager
def _second_forward(block: nn.Module, context: AbstractContextManager[Any]) -> Iterator[None]:
    """Return the context of a second forward, which leaves the statistics of batch norms as the
    first one has made them."""
    norms = [m for m in block.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    own = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # Without track_running_stats it would keep other tensors for the backward than before.
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        with context:
            yield
    finally:
        for norm, (momentum, count) in zip(norms, own, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = count
