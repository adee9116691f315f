"""mode=plan: what a run would hold, convert and cost, on this machine and on a card."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core import Mode, Room, RunResult, RunSpec, Unavailable, errors

if TYPE_CHECKING:
    from runner.core import LoadedCheckpoint, RunContext, Strategy, run_context

DEFAULT_REACH = 0.77
"""Share of a peak that large products reach where nobody has measured it on the card, nor that of
bfloat16, which then stands for other formats: the median of those that somebody has."""
BANDWIDTH_REACH = 0.88
"""Share of a datasheet's bandwidth that a copy reaches (bench/results/gpu/h200.md)."""
FORMATS = (
    *("float64", "float32", "tf32", "float16", "bfloat16", "float8", "mxfp8", "float4", "int8"),
)
"""Keys of device.tflops and device.reach."""


@dataclass(frozen=True)
class DeviceSpec:
    """Facts about a card that need not be here; `device=` chooses a card of conf/device/.

    Attributes:
        name: of the card; null plans for the device of accelerator=.
        memory_gib: memory that its driver shows, in GiB.
        bandwidth: of its memory, in GB/s of the datasheet.
        link: bandwidth to other cards, in GB/s, in one direction.
        capability: compute capability, as in [9,0]; null for what is no NVIDIA GPU.
        tflops: dense peak of products by format, in TFLOP/s; sums of half precision and FP8 in
            float32.
        reach: share of the peak that large products reach, by format; and of the bandwidth that a
            copy reaches.
        price: of an hour, in USD or any other unit; null prints no price.
        sources: where each fact is from, and its date.
    """

    name: str | None = None
    memory_gib: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    capability: list[int] | None = None
    tflops: dict[str, float] = field(default_factory=dict)
    reach: dict[str, float] = field(default_factory=dict)
    price: float | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def problems(self, spec: RunSpec) -> Iterator[str]:
        """Yield a message for each value that is not allowed."""
        if self.name is None:
            if self != DeviceSpec():
                yield "device.* is of a card. Type device=h100, or leave device.* out."
            return
        if "float32" not in self.tflops:
            yield "device.tflops has no float32. Type its dense peak in TFLOP/s."
        for key in ("link", "price"):
            if (getattr(self, key) or 0) < 0:
                yield f"device.{key}={getattr(self, key):g} is negative. Allowed: 0 and up."
        if spec.mode != Plan.name:
            yield f"device={self.name} is for mode=plan. Type mode=plan, or leave device= out."
        unknown = {*self.tflops, *self.reach} - {*FORMATS, "bandwidth"}
        if unknown:
            allowed = ", ".join(FORMATS)
            yield f"device.tflops and device.reach have {sorted(unknown)}. Allowed: {allowed}."
        values = {
            "memory_gib": self.memory_gib,
            "bandwidth": self.bandwidth,
            **{f"tflops.{key}": value for key, value in self.tflops.items()},
            **{f"reach.{key}": value for key, value in self.reach.items()},
        }
        for key, value in values.items():
            if not value > 0:
                yield f"device.{key}={value:g} is not allowed. Allowed: above 0."

    def ceiling(self, number_format: str) -> float:
        """Return the operations per second that large products reach; 0 in a format that the card
        lacks."""
        peak = self.tflops.get(number_format, 0.0)
        reach = self.reach.get(number_format, self.reach.get("bfloat16", DEFAULT_REACH))
        return 1e12 * peak * reach

    @property
    def copy_rate(self) -> float:
        """Return the bytes per second that a copy reads and writes."""
        return 1e9 * self.bandwidth * self.reach.get("bandwidth", BANDWIDTH_REACH)


@dataclass(frozen=True)
class PlanSpec:
    """What mode=plan with device= takes into account.

    Attributes:
        anchor: tokens (examples, of a task without tokens) per second that bf16-mixed reached on
            one such card; narrows hours and price.
        gpus: cards that share a step.
        strategy: how they share it: fsdp or ddp.
        fuses: with train.compile=true the compiler fuses around converted layers, as in some other
            trainers; in this one they end what it fuses.
        quality: sweep (folder or MLflow id) whose verdict on each precision stands beside its
            speed.
    """

    anchor: float | None = None
    gpus: int = 1
    strategy: str = "fsdp"
    fuses: bool = False
    quality: str | None = None

    def problems(self, spec: RunSpec) -> Iterator[str]:
        """Yield a message for each value that is not allowed."""
        yield from errors.count_problems("plan", self, ("gpus",))
        if self.anchor is not None and not self.anchor > 0:
            yield f"plan.anchor={self.anchor:g} is not allowed. Allowed: above 0, or null."
        if self != PlanSpec() and spec.section(DeviceSpec).name is None:
            yield "plan.* is for a card. Type mode=plan device=h100, or leave plan.* out."
        if self.strategy not in ("fsdp", "ddp"):
            yield f"plan.strategy={self.strategy} is not known. Allowed: fsdp, ddp."
        card = spec.section(DeviceSpec)
        if self.gpus > 1 and not card.link:
            yield f"plan.gpus={self.gpus} needs device.link, the GB/s between cards. Type it."
        if self.gpus > 1 and spec.train.batch_size % self.gpus:
            yield (
                f"train.batch_size={spec.train.batch_size} is over all cards, and plan.gpus="
                f"{self.gpus} does not divide it. Type a multiple of {self.gpus}."
            )


class Plan(Mode):
    """Print what a run would hold and convert, without its data, here or on a card."""

    name = "plan"
    needs_data = False
    adapts = True

    def plan(
        self, plan: "run_context.PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> "run_context.PlannedRun":
        """Return a plan for a card as one that runs here, on tensors without values: on the CPU,
        emulated where the CPU lacks the precision."""
        spec = plan.spec
        if spec.section(DeviceSpec).name is None:
            return plan
        import torch

        from runner.core import targets

        spec = replace(spec, accelerator=replace(spec.accelerator, name="cpu", index=0))
        try:
            targets.build_group("precision", spec.precision).require(torch.device("cpu"))
        except Unavailable:
            if "emulate" not in spec.precision:
                raise
            spec = replace(spec, precision={**spec.precision, "emulate": True})
        return plan._replace(spec=spec)

    def run(self, context: "RunContext", saved: "LoadedCheckpoint | None") -> None:
        from runner.planning.plan import plan

        plan(context)

    def records_sweep(self, config: Any) -> bool:
        words = config.hydra.overrides.task
        return any(word.startswith(("device=", "device.")) for word in words)


PLAN = "plan.json"
"""File in the folder of a plan for a card."""


def _sweep_answer(results: Sequence[RunResult]) -> Any:
    paths = [path for result in results if (path := Path(result.folder, PLAN)).is_file()]
    if not paths:
        return None
    from runner.planning.card_answer import answer_plans  # imports torch

    return answer_plans(paths)


ROOM = Room(
    sections={"device": DeviceSpec, "plan": PlanSpec}, modes=(Plan(),), sweep_answer=_sweep_answer
)
