"""Explain that memory ran out: in which step, what held it, and which settings would fit."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from runner.core import Batch, RunContext, RunnerError, TrainState, module_tree, tensor_facts
from runner.diagnostics.memory.limits import USABLE_MEMORY_SHARE, memory_limit

if TYPE_CHECKING:
    from runner.diagnostics.memory.forecast import PeakForecast

# Texts of the allocators that raise a plain RuntimeError.
_ALLOCATOR_ERRORS = (
    "DefaultCPUAllocator",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED",
)
_CHECKPOINTING = "train.activation_checkpointing=true"
_EIGHT_BIT_STATE_SHARE = 0.27
"""8 bits in place of 32, and the scales of the blocks that share one."""
_SMALLER_STATE = {"adam": "adam8bit", "adamw": "adamw8bit", "nadam": "adam8bit"}


class OutOfMemory(RunnerError):
    """The run needs more memory than there is.

    The exit status is 1, not that of a config error: the config is right on another machine.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator (a device's, PyTorch's for the CPU or Python's) raised it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATOR_ERRORS)


class MemoryWatch:
    """Turns an allocator's error of a run into an OutOfMemory that says what would fit.

    Attributes:
        run: the run.
        optimizer: name of the optimizer's option (adamw, sgd, ...), empty for one of the user's.
        state: of the training or the evaluation, once it is there.
        batch: loads a batch of the training; None for an evaluation.
        other_bytes: in use beside what the run's settings change.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self.optimizer = run.invocation.choices.get("optimizer", "")
        self.state: TrainState | None = None
        self.batch: Callable[[], Batch] | None = None
        self.other_bytes = 0.0

    def begin_steps(self, state: TrainState, batch: Callable[[], Batch] | None = None) -> None:
        """Take note of the state that is about to run its first step.

        Args:
            state: of the training or the evaluation.
            batch: loads a batch of the training; an estimate is made for training only.
        """
        self.state = state
        self.batch = batch
        if batch is not None:
            taken, _ = memory_limit(self.run.device)
            # Data in memory, libraries and other processes: no setting of the run changes these.
            self.other_bytes = taken - tensor_facts.stored_bytes(state.model)

    def explain(self, error: Exception) -> OutOfMemory | None:
        """Return what held memory and what would fit, for an allocator's error; else None."""
        if not is_out_of_memory(error):
            return None
        self.run.save_traceback()
        return OutOfMemory(out_of_memory_message(self, error))


def out_of_memory_message(watch: MemoryWatch, error: BaseException) -> str:
    """Return a message with what failed, what held memory and settings that need less.

    Settings are those that fit by an estimate, where one can be made. Frees the failed step's
    tensors.
    """
    # PyTorch's CPU allocator begins with the place in its own source.
    first_line = str(error).strip().partition("\n")[0]
    reason = first_line.rpartition("err == 0. ")[2] or type(error).__name__
    state, device = watch.state, watch.run.device
    when = "before the first step"
    sizes = {}
    if state is not None:
        when = "in the first evaluation"
        if state.model.training and state.step:
            when = f"in step {state.step}"
        elif state.step:
            when = f"in the evaluation after step {state.step}"
        sizes["weights"] = tensor_facts.stored_bytes(state.model)
        # No variable holds the gradients: they are freed before a forecast is made.
        sizes["gradients"] = tensor_facts.tensor_bytes(
            *(p.grad for p in state.trainable_parameters if p.grad is not None)
        )
        sizes["optimizer state"] = tensor_facts.tensor_bytes(*state.optimizer_tensors())
    sizes["peak"] = watch.run.accelerator.peak_memory_mib() * tensor_facts.MIB
    if device.type == "cuda":
        sizes["device"] = torch.cuda.get_device_properties(device).total_memory
    lines = [f"Out of memory {when} on {watch.run.accelerator.name}: {reason}"]
    lines += [f"  {name:<16}{size / tensor_facts.MIB:>10.1f} MiB" for name, size in sizes.items()]
    remedies = f"To need less, type {', or '.join(memory_remedies(watch))}."
    return "\n".join([*lines, *(fitting_settings(watch, error) or [remedies])])


def fitting_settings(watch: MemoryWatch, error: BaseException) -> list[str]:
    """Return lines with settings that fit by the forecast, or one that says that none does.

    The list is empty where there is no forecast, or where it does not explain why memory ran out.
    """
    state = watch.state
    if state is None or watch.batch is None:
        return []
    release_frames(error)
    for parameter in state.trainable_parameters:
        parameter.grad = None
    gc.collect()
    # Compiled code would be compiled again for each size, which takes minutes, and memory.
    eager = (
        torch.compiler.set_stance("force_eager") if watch.run.spec.train.compile else nullcontext()
    )
    # Whatever fails here, the message about the first failure must still be written.
    with suppress(Exception), eager:
        from runner.diagnostics.memory.forecast import failed_step_forecast

        sample = watch.batch()
        return _fitting_lines(watch, failed_step_forecast(watch.run.spec, state, sample))
    return []


def release_frames(error: BaseException) -> None:
    """Free the tensors that only the frames of an error's traceback hold."""
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Until Python 3.12 a frame whose f_locals was read before keeps a copy of its variables.
        # Clearing the frame leaves the copy; reading f_locals again drops what was cleared.
        _ = frame.f_locals


def _fitting_lines(watch: MemoryWatch, forecast: "PeakForecast") -> list[str]:
    """Return the lines of `fitting_settings` by a forecast."""
    _, whole = memory_limit(watch.run.device)
    # The share is of what the run itself may take: the rest is in use whatever is typed.
    usable = watch.other_bytes + USABLE_MEMORY_SHARE * (whole - watch.other_bytes)
    from runner.diagnostics.memory.forecast import largest_fitting

    factors = _size_factors(watch)

    def total(size: int, words: str = "") -> float:
        # Each part of the peak times its factor; a missing factor is 1.
        parts = forecast.peak(size)._asdict().items()
        return watch.other_bytes + sum(factors[words].get(name, 1) * part for name, part in parts)

    if total(watch.run.spec.train.batch_size) <= usable:
        return []  # a step that fits by the forecast has failed: the forecast is wrong here
    train = watch.run.spec.train
    # Divisors only: train.accumulate then makes up for the rest, and the step stays the same.
    divisors = [n for n in range(1, train.batch_size + 1) if train.batch_size % n == 0]
    # The batch sizes that fit, each with the first other overrides that it fits with: a change of
    # the precision or the optimizer is named only where it allows one that those before it do not.
    fitting: dict[int, str] = {}
    for words in factors:
        sizes = divisors
        for _ in range(1 if words else 2):
            largest = largest_fitting(sizes, lambda n, words=words: total(n, words) <= usable)
            if largest is None:
                break
            fitting.setdefault(largest, words)
            sizes = sizes[: sizes.index(largest)]
    if not fitting:
        words = list(factors)[-1]
        text = f"train.batch_size=1{words} takes {_share(total(1, words), whole)} by an estimate"
        return [f"No setting fits: {text}. Type model.<size>=<smaller>."]
    lines = []
    for size, words in fitting.items():
        batch = ""
        if size != train.batch_size:
            # Micro-batches of fewer examples in the same step.
            accumulate = train.accumulate * train.batch_size // size
            batch = f" train.batch_size={size} train.accumulate={accumulate}"
        lines.append(f" {batch}{words} ({_share(total(size, words), whole)})")
    if _may_checkpoint_activations(watch):
        lines.append(f"  {_CHECKPOINTING} keeps less for the backward")
    return ["Settings that should fit (estimated); type", *lines]


def _may_checkpoint_activations(watch: MemoryWatch) -> bool:
    """Return whether activation checkpointing is possible, and not in use already."""
    if watch.state is None or not watch.run.spec.trains or watch.run.precision.no_recompute_reason:
        return False
    if watch.run.spec.train.activation_checkpointing:
        return False
    return bool(module_tree.repeated_blocks(watch.state.model))


def _size_factors(watch: MemoryWatch) -> dict[str, dict[str, float]]:
    """Return overrides other than the batch size, each with the factors of the parts of a peak."""
    factors: dict[str, dict[str, float]] = {"": {}}
    smaller = _SMALLER_STATE.get(watch.optimizer)
    narrower = watch.run.precision.narrower_precision
    half = {"weights": 0.5, "gradients": 0.5, "optimizer": 0.5}
    if watch.run.precision.compute.itemsize >= watch.run.precision.storage.itemsize:
        # Mixed precisions compute in half the width already.
        half |= {"activations": 0.5, "temporaries": 0.5}
    if smaller:
        factors[f" optimizer={smaller}"] = {"optimizer": _EIGHT_BIT_STATE_SHARE}
    if narrower:
        factors[f" precision={narrower}"] = half
    if smaller and narrower:
        both = half | {"optimizer": half["optimizer"] * _EIGHT_BIT_STATE_SHARE}
        factors[f" precision={narrower} optimizer={smaller}"] = both
    return factors


def _share(size: float, whole: float) -> str:
    return f"about {size / 2**30:.1f} of {whole / 2**30:.1f} GiB"


def memory_remedies(watch: MemoryWatch) -> Iterator[str]:
    """Yield overrides that need less memory.

    These are fewer examples at a time for the same step, activation checkpointing, a narrower
    precision, and an optimizer with less state.
    """
    spec = watch.run.spec
    training = spec.trains
    size = spec.train.batch_size
    if watch.state and size > 1:
        # The smallest change first: the least divisor, so that the step stays the same.
        part = next(n for n in range(2, size + 1) if size % n == 0)
        accumulate = f" train.accumulate={spec.train.accumulate * part}" if training else ""
        yield f"train.batch_size={size // part}{accumulate}"
    if _may_checkpoint_activations(watch):
        yield _CHECKPOINTING
    narrower = watch.run.precision.narrower_precision
    if narrower:
        # Without a state the model itself did not fit while it was built, in float32.
        yield f"precision={narrower}" + ("" if watch.state else " init.low_memory=true")
    smaller = _SMALLER_STATE.get(watch.optimizer)
    if training and smaller:
        yield f"optimizer={smaller}"
    elif not narrower:
        yield "model.<size>=<smaller>"
