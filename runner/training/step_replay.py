"""Compute steps twice before their update, to find silent data corruption.

A processor or memory that computes wrong raises no error. Two computations of a step from the same
weights, batch and random numbers have the same bits, so a difference is a fault of the machine.

Source: Dixit et al., Silent Data Corruptions at Scale, arXiv:2102.11245.
"""

from collections.abc import Callable, Container, Sequence
from itertools import zip_longest
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from runner.config.schema import RunSpec
from runner.data.batch_layout import Batch
from runner.training.checksum_trace import ChecksumTrace
from runner.training.records import DeviceStepRecord
from runner.training.state import TrainState
from runner.training.step import StepMean, compute_gradients, examples_in, train_step
from runner.utils.accelerator import Accelerator
from runner.utils.errors import ConfigError, RunnerError
from runner.utils.reproducibility import saved_forward_state

REPEATS = 5
"""Computations of a saved step that debug=replay compares."""


def check_replay(spec: RunSpec) -> None:
    """Refuse settings under which two computations of a step may differ without a fault.

    Raises:
        ConfigError: with every problem.
    """
    if spec.guard.replay_every is None or spec.mode not in ("train", "plan"):
        return
    typed = f"guard.replay_every={spec.guard.replay_every}"
    problems: list[str] = []
    if not spec.deterministic:
        # On CUDA, atomic additions; on a CPU, torch adds the float32 gradient of x[index] from
        # several threads in any order.
        problems.append(
            f"{typed} compares gradients bit by bit, and with deterministic=false torch may add "
            "them in another order each time, on a CPU too. Type deterministic=true."
        )
    if spec.numerics.every is not None:
        problems.append(
            f"{typed} computes steps twice, and numerics.every={spec.numerics.every} would measure "
            "both. Type one of them as null."
        )
    if problems:
        raise ConfigError(*problems)


def check_replay_optimizer(spec: RunSpec, state: TrainState) -> None:
    """Refuse an optimizer that changes the weights between the evaluations of one step.

    Raises:
        ConfigError: the optimizer takes a closure.
    """
    if spec.guard.replay_every is not None and state.takes_closure:
        raise ConfigError(
            f"guard.replay_every={spec.guard.replay_every} compares gradients before the update, "
            "and optimizer=lbfgs updates weights between several backwards. Type another "
            "optimizer, or guard.replay_every=null."
        )


class StepMismatch(NamedTuple):
    """A step whose two computations differ.

    Attributes:
        step: its number, from 1.
        loss_scale: in force in the step; None for a precision without one.
        place: the first tensor that differs, and of several processes in which, in words.
        agreeing: which of the two computations a third one agrees with, 1 or 2; None for neither.
    """

    step: int
    loss_scale: float | None
    place: str
    agreeing: int | None

    @property
    def description(self) -> str:
        """Return a sentence without a full stop that names the step and the tensor."""
        return f"step {self.step} was computed twice, and {self.place} differs"

    @property
    def conclusion(self) -> str:
        """Return a sentence without a full stop that says what a third computation shows."""
        if self.agreeing is None:
            return (
                "A third computation agrees with neither: the hardware computes wrong again and "
                "again, or the model keeps state in objects of its own, which a second computation "
                "finds changed (buffers and numbers are restored)"
            )
        agreeing, wrong = ("first", "second") if self.agreeing == 1 else ("second", "first")
        return (
            f"A third computation agrees with the {agreeing} one: a transient fault of the "
            f"hardware in the {wrong} one"
        )


class CorruptedStep(RunnerError):
    """A step that is not applied, in all processes; the state is that before the step."""

    exit_status = 1

    def __init__(self, mismatch: StepMismatch) -> None:
        self.mismatch = mismatch
        super().__init__(f"{mismatch.description}.")


class _Computation(NamedTuple):
    """The result of one forward and backward; the gradients are the parameters' own.

    Attributes:
        mean: what compute_gradients returned.
        places: what each checksum is of, in words.
        sums: the checksums.
    """

    mean: StepMean
    places: list[str]
    sums: list[int]


class StepReplay:
    """Takes the steps of a training, and computes every N-th one twice before its update.

    Args:
        every: N, from one step that is computed twice to the next.
        untraced: names of modules that no hook may be registered on, as those that are compiled.
        warn: called with a mismatch, after which the step continues with the gradients of a third
            computation; None refuses the step.
    """

    def __init__(
        self,
        every: int,
        untraced: Container[str] = (),
        warn: Callable[[StepMismatch], None] | None = None,
    ) -> None:
        self.every = every
        self.untraced = untraced
        self.warn = warn
        self._replay_ms = 0.0

    def train_step(
        self, state: TrainState, micros: Sequence[Batch], sizes: Sequence[int] | None = None
    ) -> DeviceStepRecord:
        """Take a step as training.step.train_step does.

        Raises:
            CorruptedStep: the two computations differ, and the step is refused.
        """
        if (state.step + 1) % self.every:
            return train_step(state, micros, sizes)
        record = train_step(state, micros, sizes, self._compute_twice)
        return record._replace(replay_ms=self._replay_ms)

    def _compute_twice(
        self, state: TrainState, micros: Sequence[Batch], sizes: Sequence[int]
    ) -> StepMean:
        """Compute the gradients twice, and return the mean of the computation that counts."""
        accelerator = Accelerator(state.device)
        accelerator.synchronize()  # the steps before are no part of the time
        start = perf_counter()
        restore = saved_state(state)
        first = _compute(state, micros, sizes, self.untraced)
        restore()
        self._replay_ms = (perf_counter() - start) * 1e3
        second = _compute(state, micros, sizes, self.untraced)
        # All processes ask, and agree.
        if not state.strategy.all_reduce_max(_first_difference(first, second) is not None):
            return second.mean
        restore()
        third = _compute(state, micros, sizes, self.untraced)
        mismatch = _mismatch(state, first, second, third)
        if self.warn is None:
            restore()
            _rewind(state, len(micros))
            raise CorruptedStep(mismatch)
        self.warn(mismatch)
        return third.mean


def repeat_step(state: TrainState, micros: Sequence[Batch]) -> str:
    """Return a sentence that says whether further computations of the next step have equal bits.

    Args:
        state: before the step; it stays as it is.
        micros: the micro-batches of the step, in one process.
    """
    sizes = [examples_in(micro) for micro in micros]
    restore = saved_state(state)
    first = _compute(state, micros, sizes)
    restore()
    for number in range(2, REPEATS + 1):
        other = _compute(state, micros, sizes)
        restore()
        index = _first_difference(first, other)
        if index is not None:
            place = _place(first, other, index)
            return f"The step differs in computations 1 and {number} on this device: {place} first."
    return f"The step has the same bits in {REPEATS} computations on this device."


def _compute(
    state: TrainState,
    micros: Sequence[Batch],
    sizes: Sequence[int],
    untraced: Container[str] = (),
) -> _Computation:
    trained = {id(p) for p in state.trainable_parameters}
    with ChecksumTrace(state.plain_model, untraced) as trace:
        mean = compute_gradients(state, micros, sizes)
    trace.add("the loss", mean.loss)
    # From the last parameter on, which is about the order of a backward.
    for name, p in reversed([*state.plain_model.named_parameters()]):
        if p.grad is None or id(p) not in trained:
            continue
        (grad,) = state.strategy.local_shards([p.grad])
        for part in [grad.indices(), grad.values()] if grad.is_sparse else [grad]:
            trace.add(f"the gradient of {name}", part)
    return _Computation(mean, trace.places, torch.stack(trace.sums).tolist())


def saved_state(state: TrainState) -> Callable[[], None]:
    """Return a function that restores what a computation changes, and drops its gradients."""
    model = state.plain_model
    restore_modules = saved_forward_state(model, state.device)
    # Scales of FP8, which are no buffers.
    scales = tree_map_only(Tensor, Tensor.clone, state.precision.state_dict(model))

    def restore() -> None:
        for p in model.parameters():
            p.grad = None
        restore_modules()
        state.precision.load_state_dict(model, scales)

    return restore


def _first_difference(first: _Computation, second: _Computation) -> int | None:
    """Return the index of the first checksum that differs; None where all are equal."""
    rows = [list(zip(one.places, one.sums, strict=True)) for one in (first, second)]
    for index, (row, other) in enumerate(zip_longest(*rows)):
        if row != other:
            return index
    return None


def _place(first: _Computation, second: _Computation, index: int) -> str:
    """Return what a checksum is of; one of the computations may have fewer of them."""
    return max(first.places, second.places, key=len)[index]


def _mismatch(
    state: TrainState, first: _Computation, second: _Computation, third: _Computation
) -> StepMismatch:
    """Return the first difference in any process; all processes must call it."""
    agreeing = None
    if _first_difference(second, third) is None:
        agreeing = 2
    elif _first_difference(first, third) is None:
        agreeing = 1
    here: tuple[int, int, str, int | None] | None = None
    index = _first_difference(first, second)
    if index is not None:
        place = _place(first, second, index)
        if state.strategy.place.world_size > 1:
            place += f" in process {state.strategy.place.rank}"
        here = (index, state.strategy.place.rank, place, agreeing)
    everywhere = [one for one in state.strategy.gather_object(here) if one is not None]
    # A fault reaches the other processes through the reduced gradients, which come last.
    earliest = min(everywhere) if everywhere else None
    _, _, place, agreeing = state.strategy.broadcast_object(earliest)
    scale = state.scale.value
    return StepMismatch(state.step, None if scale is None else scale.item(), place, agreeing)


def _rewind(state: TrainState, micro_batches: int) -> None:
    """Set the counters to those before the step, so that a resumed run repeats the step."""
    state.step -= 1
    state.position -= micro_batches
    if state.position == 0:
        state.epoch -= 1  # accumulation_batches counts it again
