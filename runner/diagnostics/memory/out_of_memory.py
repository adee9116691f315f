"""Out of memory, as a message: in which step, what held it, which settings would fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from runner.diagnostics.memory.limits import (
    USABLE,
    MemoryEstimate,
    divisors,
    estimate_step_memory,
    memory_limit,
)
from runner.training.state import TrainState
from runner.utils.errors import RunnerError
from runner.utils.modules import repeated_blocks
from runner.utils.tensors import MIB, stored_bytes, tensor_bytes
from runner.utils.tpu import is_tpu

if TYPE_CHECKING:
    from runner.modes.context import RunContext

# What the allocators say that raise a plain RuntimeError.
_SAID = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "RESOURCE_EXHAUSTED")
_NARROWER = {
    "64-true": "32-true",
    "32-true": "bf16-true",
    "tf32": "bf16-true",
    "16-mixed": "bf16-true",
    "bf16-mixed": "bf16-true",
}
_TWICE = "train.activation_checkpointing=true"
_SMALLER_STATE = {"adam": "adam8bit", "adamw": "adamw8bit", "nadam": "adam8bit"}


class OutOfMemory(RunnerError):
    """The run needs more memory than there is. Exit status 1: the config is right elsewhere."""

    exit_status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's allocator, the CPU's, or Python's has nothing left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)


@contextmanager
def explain_out_of_memory(this: "RunContext") -> Iterator[None]:
    """Context in which an allocator's error becomes an OutOfMemory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        this.traceback()
        raise OutOfMemory(out_of_memory_message(this, error)) from error


def out_of_memory_message(this: "RunContext", error: BaseException) -> str:
    """What happened, the memory's table, and settings that would fit by an estimate; without one,
    settings that need less."""
    # PyTorch's CPU allocator begins with the place in its own source.
    said = str(error).strip().partition("\n")[0].rpartition("err == 0. ")[2]
    said = said or type(error).__name__
    lines = [f"Out of memory {_when(this.state)} on {this.accelerator.name}: {said}"]
    lines += [f"  {name:<16}{size / MIB:>10.1f} MiB" for name, size in _table(this)]
    lines += fitting_settings(this, error) or [
        f"To need less, type {', or '.join(memory_remedies(this))}."
    ]
    return "\n".join(lines)


def _when(state: TrainState | None) -> str:
    if state is None:
        return "before the first step"
    if state.model.training:
        return f"in step {state.step}"
    return f"in the evaluation after step {state.step}" if state.step else "in the first evaluation"


def _table(this: "RunContext") -> Iterator[tuple[str, float]]:
    if state := this.state:
        yield "weights", stored_bytes(state.model)
        yield "gradients", tensor_bytes(*(p.grad for p in state.trainable if p.grad is not None))
        yield "optimizer state", tensor_bytes(*state.optimizer_tensors())
    yield "peak", this.accelerator.peak_memory_mib() * MIB
    if this.device.type == "cuda":
        yield "device", torch.cuda.get_device_properties(this.device).total_memory


def fitting_settings(this: "RunContext", error: BaseException) -> list[str]:
    """Lines with settings that would fit, or that none does; nothing where no estimate explains
    why memory ran out."""
    if this.state is None or this.loader is None or is_tpu(this.device):
        return []  # room.limit knows no TPU's memory
    taken, (_, whole) = estimate_step_memory(this, error, this.loader), memory_limit(this.device)
    size, usable = this.spec.train.batch_size, this.other + USABLE * (whole - this.other)
    if taken is None or taken.of(size) <= usable:
        return []
    found: dict[int, tuple[str, float]] = {}  # by batch size: more of it, or it is not worth more
    for words, after in _changes(this, taken):
        fits = [n for n in divisors(size) if after.of(n) <= usable]
        for n in fits[: 1 if words else 2]:
            found.setdefault(n, (_batch(this, n) + words, after.of(n)))
    if not found:
        words, least = list(_changes(this, taken))[-1]
        text = f"train.batch_size=1{words} takes {_share(least.of(1), whole)} by an estimate"
        return [f"No setting fits: {text}. Type model.<size>=<smaller>."]
    told = [f" {words} ({_share(size, whole)})" for words, size in found.values()]
    more = [f"  {_TWICE} keeps less for the backward"] if _may_compute_twice(this) else []
    return ["By an estimate these fit; type", *told, *more]


def _may_compute_twice(this: "RunContext") -> bool:
    """Whether activation checkpointing is left to try."""
    if this.state is None or this.spec.mode != "train" or this.precision.unrepeatable:
        return False
    return not this.spec.train.activation_checkpointing and bool(repeated_blocks(this.state.model))


def _changes(this: "RunContext", taken: MemoryEstimate) -> Iterator[tuple[str, MemoryEstimate]]:
    """Overrides beside the batch size, and what a step takes with them."""
    yield "", taken
    name, optimizer = this.precision.name, this.origin.choices.get("optimizer", "")
    if smaller := _SMALLER_STATE.get(optimizer):
        yield f" optimizer={smaller}", taken.smaller_state()
    if narrower := _NARROWER.get(name):
        yield f" precision={narrower}", taken.narrower("mixed" in name)
    if smaller and narrower:
        both = taken.narrower("mixed" in name).smaller_state()
        yield f" precision={narrower} optimizer={smaller}", both


def _batch(this: "RunContext", examples: int) -> str:
    """For the same step; nothing where the batch stays whole."""
    train = this.spec.train
    if examples == train.batch_size:
        return ""
    accumulate = train.accumulate * train.batch_size // examples
    return f" train.batch_size={examples} train.accumulate={accumulate}"


def _share(size: float, whole: float) -> str:
    return f"about {size / 2**30:.1f} of {whole / 2**30:.1f} GiB"


def memory_remedies(this: "RunContext") -> Iterator[str]:
    """Overrides that need less: fewer examples at a time for the same step, activations that are
    computed twice, a narrower precision, an optimizer with less state."""
    spec, training = this.spec, this.spec.mode == "train"
    size = spec.train.batch_size
    if this.state and size > 1:
        part = next(n for n in range(2, size + 1) if size % n == 0)
        accumulate = f" train.accumulate={spec.train.accumulate * part}" if training else ""
        yield f"train.batch_size={size // part}{accumulate}"
    if _may_compute_twice(this):
        yield _TWICE
    if narrower := _NARROWER.get(this.precision.name):
        yield f"precision={narrower}" + ("" if this.state else " init.low_memory=true")
    optimizer = this.origin.choices.get("optimizer", "")
    if training and (smaller := _SMALLER_STATE.get(optimizer)):
        yield f"optimizer={smaller}"
    elif not narrower:
        yield "model.<size>=<smaller>"
