"""What a sweep's jobs say about its precisions: groups of seeds, ratios to 32-true, verdicts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from runner.modes.result import RunResult
from runner.modes.tables import relative_change, shared_settings
from runner.sweep.report.statistics import Difference, Ratio, Spread, quality_difference
from runner.tracking.metric_names import VAL_LOSS

BASE = "32-true"
SURE_SEEDS, SURE_SINGLE = 0.05, 0.10
"""Ratios of speed nearer to 1 are called even: a machine that others use varies as much."""
UNCLEAR = 1.5
"""Where the greatest ratio is so many times the least, and 1 between them, nothing was measured."""


@dataclass(frozen=True)
class Group:
    """Jobs that differ in their seeds alone, on one device.

    Attributes:
        name: the label without the seed.
        counts: jobs by outcome; best, quality, loss and change are of the sound ones (finished,
            not diverged), the rest of all that finished or were stopped as diverged.
        change: in mode=evaluate, quality minus what the checkpoint reached in its own precision.
        speed: examples/s of training. step_ms: host milliseconds. *_mib: MiB.
        reasons: why jobs did not finish, each once.
    """

    name: str
    precision: str
    device: str
    jobs: tuple[RunResult, ...]
    counts: Mapping[str, int]
    quality: Spread | None
    best: Spread | None
    loss: Spread | None
    change: Spread | None
    speed: Spread | None
    step_ms: Spread | None
    peak_mib: Spread | None
    weights_mib: Spread | None
    optimizer_mib: Spread | None
    loss_scale: Spread | None
    skipped: Spread | None
    converted: str
    reasons: tuple[str, ...]

    @property
    def finished(self) -> int:
        """Jobs that came to their end, diverged ones too."""
        return self.counts.get("finished", 0) + self.counts.get("diverged", 0)

    @property
    def sound(self) -> bool:
        """Whether every job finished with a finite quality."""
        return self.quality is not None and self.counts.get("finished", 0) == len(self.jobs)

    @property
    def evaluated(self) -> bool:
        """Whether its jobs evaluated a checkpoint instead of training."""
        return any(job.trained_in for job in self.jobs)

    @property
    def settings(self) -> str:
        """What was swept beside precision and seed."""
        return self.jobs[0].settings

    @property
    def on_cpu(self) -> bool:
        """As runner.utils.accelerator names a CPU."""
        return "threads)" in self.device

    @property
    def memory_mib(self) -> float | None:
        """What may be compared between jobs: the device's peak; on a CPU the weights and the
        optimizer's state, for a process's resident set holds what earlier jobs left."""
        if not self.on_cpu:
            return self.peak_mib.mean if self.peak_mib else None
        if self.weights_mib is None:
            return None
        return self.weights_mib.mean + (self.optimizer_mib.mean if self.optimizer_mib else 0)


def group_jobs(results: Sequence[RunResult]) -> list[Group]:
    """The groups in the order in which their first jobs were asked for. A job that failed before
    it knew its device counts where its group ran."""
    devices = {r.device for r in results if r.device}
    only = devices.pop() if len(devices) == 1 else ""
    homes: dict[str, str] = {}
    for r in results:
        if r.device:
            homes.setdefault(r.group or r.label, r.device)
    keyed: dict[tuple[str, str], list[RunResult]] = {}
    for r in results:
        name = r.group or r.label
        keyed.setdefault((name, r.device or homes.get(name, only)), []).append(r)
    return [_group(*key, jobs, results) for key, jobs in keyed.items()]


def _group(name: str, device: str, jobs: Sequence[RunResult], every: Sequence[RunResult]) -> Group:
    done = [j for j in jobs if j.outcome in ("finished", "diverged")]
    sound = [j for j in done if j.outcome == "finished"]

    def spread(value: Callable[[RunResult], float | None]) -> Spread | None:
        return Spread.of(map(value, done))

    return Group(
        name,
        jobs[0].precision,
        device,
        tuple(jobs),
        Counter(j.outcome for j in jobs),
        quality=Spread.of(j.metrics.get(j.quality) for j in sound),
        best=Spread.of(j.best for j in sound),
        loss=Spread.of(j.metrics.get(VAL_LOSS) for j in sound),
        change=Spread.of(relative_change(j.quality, j, every) for j in sound),
        speed=spread(lambda j: j.examples_per_second),
        step_ms=spread(lambda j: j.step_ms),
        peak_mib=spread(lambda j: j.peak_memory_mib),
        weights_mib=spread(lambda j: j.weights_mib),
        optimizer_mib=spread(lambda j: j.optimizer_mib),
        loss_scale=spread(lambda j: j.loss_scale),
        skipped=spread(lambda j: j.skipped_steps),
        converted=", ".join(dict.fromkeys(j.converted for j in done if j.converted)),
        reasons=tuple(dict.fromkeys(j.error for j in jobs if j.error)),
    )


@dataclass(frozen=True)
class Comparison:
    """A group beside its baseline: 32-true with the same other settings on the same device.

    Attributes:
        base: None where 32-true was not swept; the group itself for one that others have as
            their baseline.
        speed: examples/s over the baseline's, per seed where the seeds match, else of the medians.
        memory: Group.memory_mib over the baseline's.
    """

    group: Group
    base: Group | None
    speed: Ratio | None = None
    memory: float | None = None
    quality: Difference | None = None

    @property
    def is_base(self) -> bool:
        """Whether the others are compared with it."""
        return self.base is self.group

    @property
    def pace(self) -> Literal["faster", "slower", "even", "unclear", ""]:
        """Judged by the range over seeds, and by SURE_*; empty without a ratio."""
        if self.speed is None or self.is_base:
            return ""
        sure = SURE_SINGLE if self.speed.n == 1 else SURE_SEEDS
        if self.speed.low > 1 and self.speed.value > 1 + sure:
            return "faster"
        if self.speed.high < 1 and self.speed.value < 1 - sure:
            return "slower"
        return "even" if self.speed.high < UNCLEAR * self.speed.low else "unclear"


def compare(results: Sequence[RunResult]) -> list[Comparison]:
    """Every group with its ratios and its difference, in the order of groups()."""
    found = group_jobs(results)
    bases = {(g.settings, g.device): g for g in found if g.precision == BASE}
    beside = [_base(g, bases) for g in found]
    used = {id(b) for g, b in zip(found, beside, strict=True) if b is not None and b is not g}
    return [
        compare_jobs(g, None if b is g and id(b) not in used else b)
        for g, b in zip(found, beside, strict=True)
    ]


def _base(group: Group, bases: Mapping[tuple[str, str], Group]) -> Group | None:
    exact = bases.get((group.settings, group.device))
    return exact or bases.get((shared_settings(group.settings), group.device))


def compare_jobs(group: Group, base: Group | None) -> Comparison:
    """A group beside another."""
    if base is None or not base.finished or not group.finished:
        return Comparison(group, base)
    memory = None
    if group.memory_mib is not None and base.memory_mib:
        memory = group.memory_mib / base.memory_mib
    quality = None
    if group is not base and not group.evaluated and group.quality and base.quality:
        direction = base.jobs[0].direction
        quality = quality_difference(_qualities(group), _qualities(base), direction)
    return Comparison(group, base, _speed(group, base), memory, quality)


def _qualities(group: Group) -> list[tuple[int | None, float]]:
    return [(j.seed, j.metrics[j.quality]) for j in group.jobs if j.outcome == "finished"]


def _speed(group: Group, base: Group) -> Ratio | None:
    """Ratios of examples/s, with the range that seeds span. A job that was too short has none, and
    is no reason to compare others across seeds."""
    mine, others = _rates(group), _rates(base)
    if _share_seeds(group, base) or not mine or not others:
        rates = dict(others)
        return Ratio.of(rate / rates[seed] for seed, rate in mine if seed in rates)
    a, b = (sorted(rate for _, rate in rates) for rates in (mine, others))
    value = median(a) / median(b)
    return Ratio(value, min(len(a), len(b)), a[0] / b[-1], a[-1] / b[0])


def _share_seeds(group: Group, base: Group) -> bool:
    """Whether some seeds are in both, and each once."""
    mine, others = ([job.seed for job in one.jobs] for one in (group, base))
    once = len({*mine}) == len(mine) and len({*others}) == len(others)
    return once and bool({*mine} & {*others} - {None})


def _rates(group: Group) -> list[tuple[int | None, float]]:
    done = (j for j in group.jobs if j.status == "finished")
    return [(j.seed, j.examples_per_second) for j in done if j.examples_per_second]


def pareto_front(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those that no other on the same device beats in means: at least as good in speed, memory
    and quality, better in one. Only groups whose every job finished, and did not diverge."""
    fit = [c for c in comparisons if c.group.sound and c.group.speed]
    return [c for c in fit if not any(_dominates(o.group, c.group) for o in fit)]


def _dominates(a: Group, b: Group) -> bool:
    if a.device != b.device:
        return False
    gains = [x - y for x, y in zip(_merits(a), _merits(b), strict=True)]
    return min(gains) >= 0 and max(gains) > 0


def _merits(group: Group) -> tuple[float, float, float]:
    """Speed, memory and quality, each the greater the better."""
    assert group.speed is not None
    assert group.quality is not None
    sign = 1 if group.jobs[0].direction == "max" else -1
    return group.speed.mean, -(group.memory_mib or 0.0), sign * group.quality.mean
