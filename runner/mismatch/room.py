"""mode=mismatch: whether the precision that trains and the one that serves are one policy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runner.core import Mode, Room, RunResult, RunSpec, errors, fmt

if TYPE_CHECKING:
    from runner.core import LoadedCheckpoint, RunContext, Strategy, run_context

FLOORS = ("batch", "padding", "cache", "compile")
"""Other ways to execute one precision, whose differences are the floor."""


@dataclass(frozen=True)
class MismatchSpec:
    """What mode=mismatch compares, and what it accepts.

    Attributes:
        max_ratio: largest accepted mean of exp(|difference of log-probabilities|) per token.
        max_kl: largest accepted KL divergence from the serving to the training side, in nats per
            token.
        batches: validation batches that are scored by both sides.
        new_tokens: tokens that the serving side generates from each example; 0 generates none.
        temperature: of the generation, above 0.
        top_k: most probable tokens that the generation draws from; null for all.
        top_p: probability of the tokens that the generation draws from, the most probable first.
        floor: other executions of each side whose differences are the floor: batch, padding, cache,
            compile.
        cause: look for the module that contributes most.
        cures: try what makes the sides alike.
    """

    max_ratio: float = 1.02
    max_kl: float = 1e-3
    batches: int = 4
    new_tokens: int = 32
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    floor: list[str] = field(default_factory=lambda: list(FLOORS[:-1]))
    cause: bool = True
    cures: bool = True

    def problems(self, spec: RunSpec) -> Iterator[str]:
        """Yield a message for each value that is not allowed."""
        yield from errors.count_problems("mismatch", self, ("batches", "top_k"))
        ranges = {
            "max_ratio": (self.max_ratio >= 1, "1 and up"),
            "max_kl": (self.max_kl >= 0, "0 and up"),
            "new_tokens": (self.new_tokens >= 0, "0 and up"),
            "temperature": (self.temperature > 0, "above 0"),
            "top_p": (0 < self.top_p <= 1, "above 0, up to 1"),
            "floor": (set(self.floor) <= set(FLOORS), f"[{','.join(FLOORS)}] and parts of it"),
        }
        for key, (is_allowed, allowed) in ranges.items():
            if not is_allowed:
                value = fmt.typed_value(getattr(self, key))
                yield f"mismatch.{key}={value} is not allowed. Allowed: {allowed}."


class MismatchMode(Mode):
    """Compare what a precision trains with what another one serves, on the same weights."""

    name = "mismatch"
    takes_checkpoint = True
    reads_training_data = False
    adapts = True
    is_recorded = True
    failure_status = 2

    def key_problems(self, spec: RunSpec) -> Iterator[str]:
        serving = spec.value("serving")
        if (spec.mode == self.name) != (serving is not None):
            yield (
                "mode=mismatch needs serving=<precision>, and serving= needs mode=mismatch. Type "
                "mode=mismatch serving=bf16-true, or any other precision that serves."
            )

    def plan(
        self, plan: "run_context.PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> "run_context.PlannedRun":
        if plan.spec.checkpoint.path is None:
            return plan
        from runner.modes.evaluate import plan_evaluation

        return plan_evaluation(plan)

    def run(
        self, context: "RunContext", saved: "LoadedCheckpoint | None"
    ) -> "run_context.RunOutcome":
        from runner.mismatch.mismatch import compare_sides

        return compare_sides(context, saved)

    def exit_status(self, result: RunResult) -> int:
        """Return 1 where the sides are further apart than is accepted."""
        return int(not result.metrics["mismatch/accepted"])


ROOM = Room(
    sections={
        "mismatch": MismatchSpec,
        "serving": "the side that serves in mode=mismatch: a precision (serving=bf16-true), or "
        "values of its keys and of model.* (serving=precision=int8,precision.keep_fp32=[head])",
    },
    modes=(MismatchMode(),),
)
