"""Explain that memory ran out: in which step, what held it, and which settings would fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from runner.config.schema import RunSpec
from runner.data.loader import Loader
from runner.diagnostics.memory.limits import (
    USABLE_MEMORY_SHARE,
    MemoryEstimate,
    divisors,
    estimate_step_memory,
    memory_limit,
)
from runner.precision.precision import Precision
from runner.training.state import TrainState
from runner.utils.accelerator import Accelerator
from runner.utils.errors import RunnerError
from runner.utils.modules import repeated_blocks
from runner.utils.tensors import MIB, stored_bytes, tensor_bytes
from runner.utils.tpu import is_tpu

# Texts of the allocators that raise a plain RuntimeError.
_ALLOCATOR_ERRORS = (
    "DefaultCPUAllocator",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED",
)
_CHECKPOINTING = "train.activation_checkpointing=true"
_SMALLER_STATE = {"adam": "adam8bit", "adamw": "adamw8bit", "nadam": "adam8bit"}


class OutOfMemory(RunnerError):
    """The run needs more memory than there is.

    The exit status is 1, not that of a config error: the config is right on another machine.
    """

    exit_status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator (a device's, PyTorch's for the CPU or Python's) raised it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATOR_ERRORS)


class MemoryWatch:
    """Turns an allocator's error of a run into an OutOfMemory that says what would fit.

    Args:
        spec: of the run.
        precision: of the run.
        accelerator: the device that the run computes on.
        optimizer: name of the optimizer's option (adamw, sgd, ...), empty for one of the user's.
        save_traceback: writes the traceback of the error being handled to a file.
    """

    def __init__(
        self,
        spec: RunSpec,
        precision: Precision,
        accelerator: Accelerator,
        optimizer: str,
        save_traceback: Callable[[], object],
    ) -> None:
        self.spec = spec
        self.precision = precision
        self.accelerator = accelerator
        self.optimizer = optimizer
        self.state: TrainState | None = None
        self.loader: Loader | None = None
        self.other_bytes = 0.0
        self._save_traceback = save_traceback

    def begin_steps(self, state: TrainState, loader: Loader | None = None) -> None:
        """Take note of the state that is about to run its first step.

        Args:
            state: of the training or the evaluation.
            loader: yields the training batches; an estimate is made for training only.
        """
        self.state = state
        self.loader = loader
        if loader is not None:
            taken, _ = memory_limit(self.accelerator.device)
            # Data in memory, libraries and other processes: no setting of the run changes these.
            self.other_bytes = taken - stored_bytes(state.model)

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Return a context in which an allocator's error becomes an OutOfMemory."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._save_traceback()
            raise OutOfMemory(out_of_memory_message(self, error)) from error


def out_of_memory_message(watch: MemoryWatch, error: BaseException) -> str:
    """Return a message with what failed, what held memory and settings that need less.

    Settings are those that fit by an estimate, where one can be made. Frees the failed step's
    tensors.
    """
    # PyTorch's CPU allocator begins with the place in its own source.
    first_line = str(error).strip().partition("\n")[0]
    reason = first_line.rpartition("err == 0. ")[2] or type(error).__name__
    lines = [f"Out of memory {_when(watch.state)} on {watch.accelerator.name}: {reason}"]
    lines += [f"  {name:<16}{size / MIB:>10.1f} MiB" for name, size in _table(watch)]
    fitting = fitting_settings(watch, error)
    if fitting:
        lines += fitting
    else:
        lines.append(f"To need less, type {', or '.join(memory_remedies(watch))}.")
    return "\n".join(lines)


def _when(state: TrainState | None) -> str:
    if state is None:
        return "before the first step"
    if state.model.training:
        return f"in step {state.step}"
    return f"in the evaluation after step {state.step}" if state.step else "in the first evaluation"


def _table(watch: MemoryWatch) -> Iterator[tuple[str, float]]:
    """Yield name and bytes of each part of the memory that is known."""
    state = watch.state
    device = watch.accelerator.device
    if state is not None:
        gradients = [p.grad for p in state.trainable_parameters if p.grad is not None]
        yield "weights", stored_bytes(state.model)
        yield "gradients", tensor_bytes(*gradients)
        yield "optimizer state", tensor_bytes(*state.optimizer_tensors())
    yield "peak", watch.accelerator.peak_memory_mib() * MIB
    if device.type == "cuda":
        yield "device", torch.cuda.get_device_properties(device).total_memory


def fitting_settings(watch: MemoryWatch, error: BaseException) -> list[str]:
    """Return lines with settings that fit by an estimate, or one that says that none does.

    The list is empty where there is no estimate, or where it does not explain why memory ran out.
    """
    device = watch.accelerator.device
    if watch.state is None or watch.loader is None or is_tpu(device):
        return []  # memory_limit does not know a TPU's memory
    compiled = bool(watch.spec.train.compile)
    estimate = estimate_step_memory(watch.state, error, watch.loader, watch.other_bytes, compiled)
    _, whole = memory_limit(device)
    # The share is of what the run itself may take: the rest is in use whatever is typed.
    usable = watch.other_bytes + USABLE_MEMORY_SHARE * (whole - watch.other_bytes)
    if estimate is None or estimate.total(watch.spec.train.batch_size) <= usable:
        return []  # a step that fits by the estimate has failed: the estimate is wrong here
    fitting = _fitting_overrides(watch, estimate, usable)
    if not fitting:
        words, least = list(_estimates_by_overrides(watch, estimate))[-1]
        text = f"train.batch_size=1{words} takes {_share(least.total(1), whole)} by an estimate"
        return [f"No setting fits: {text}. Type model.<size>=<smaller>."]
    lines = [f" {words} ({_share(size, whole)})" for words, size in fitting]
    if _may_checkpoint_activations(watch):
        lines.append(f"  {_CHECKPOINTING} keeps less for the backward")
    return ["Settings that should fit (estimated); type", *lines]


def _fitting_overrides(
    watch: MemoryWatch, estimate: MemoryEstimate, usable: float
) -> list[tuple[str, float]]:
    """Return overrides that fit into `usable` bytes, with the bytes of each.

    A change of the precision or of the optimizer is named only where it allows a batch size that
    the changes before it do not.
    """
    size = watch.spec.train.batch_size
    by_batch_size: dict[int, tuple[str, float]] = {}
    for words, changed in _estimates_by_overrides(watch, estimate):
        # Divisors only: train.accumulate then makes up for the rest, and the step stays the same.
        sizes = [n for n in divisors(size) if changed.total(n) <= usable]
        for n in sizes[: 1 if words else 2]:
            by_batch_size.setdefault(n, (_batch_overrides(watch, n) + words, changed.total(n)))
    return list(by_batch_size.values())


def _may_checkpoint_activations(watch: MemoryWatch) -> bool:
    """Return whether activation checkpointing is possible, and not in use already."""
    if watch.state is None or watch.spec.mode != "train" or watch.precision.no_recompute_reason:
        return False
    if watch.spec.train.activation_checkpointing:
        return False
    return bool(repeated_blocks(watch.state.model))


def _estimates_by_overrides(
    watch: MemoryWatch, estimate: MemoryEstimate
) -> Iterator[tuple[str, MemoryEstimate]]:
    """Yield overrides other than the batch size, and the estimate with them."""
    yield "", estimate
    has_half_activations = watch.precision.compute.itemsize < watch.precision.storage.itemsize
    smaller = _SMALLER_STATE.get(watch.optimizer)
    narrower = watch.precision.narrower_precision
    if smaller:
        yield f" optimizer={smaller}", estimate.with_8bit_optimizer()
    if narrower:
        yield f" precision={narrower}", estimate.with_half_width(has_half_activations)
    if smaller and narrower:
        both = estimate.with_half_width(has_half_activations).with_8bit_optimizer()
        yield f" precision={narrower} optimizer={smaller}", both


def _batch_overrides(watch: MemoryWatch, examples: int) -> str:
    """Return overrides for micro-batches of so many examples in the same step."""
    train = watch.spec.train
    if examples == train.batch_size:
        return ""
    accumulate = train.accumulate * train.batch_size // examples
    return f" train.batch_size={examples} train.accumulate={accumulate}"


def _share(size: float, whole: float) -> str:
    return f"about {size / 2**30:.1f} of {whole / 2**30:.1f} GiB"


def memory_remedies(watch: MemoryWatch) -> Iterator[str]:
    """Yield overrides that need less memory.

    These are fewer examples at a time for the same step, activation checkpointing, a narrower
    precision, and an optimizer with less state.
    """
    spec = watch.spec
    training = spec.mode == "train"
    size = spec.train.batch_size
    if watch.state and size > 1:
        # The smallest change first: the least divisor, so that the step stays the same.
        part = next(n for n in range(2, size + 1) if size % n == 0)
        accumulate = f" train.accumulate={spec.train.accumulate * part}" if training else ""
        yield f"train.batch_size={size // part}{accumulate}"
    if _may_checkpoint_activations(watch):
        yield _CHECKPOINTING
    narrower = watch.precision.narrower_precision
    if narrower:
        # Without a state the model itself did not fit while it was built, in float32.
        yield f"precision={narrower}" + ("" if watch.state else " init.low_memory=true")
    smaller = _SMALLER_STATE.get(watch.optimizer)
    if training and smaller:
        yield f"optimizer={smaller}"
    elif not narrower:
        yield "model.<size>=<smaller>"
