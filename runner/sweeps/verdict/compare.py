"""Group a sweep's jobs by seed and compare each group with 32-true: ratios and verdicts.

A `Group` holds the jobs that differ in their seeds alone; a `Comparison` sets it against the
32-true group with the same other settings on the same device.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Literal

from runner.core import RunResult, fmt, metric_names
from runner.sweeps.other_programs import BUSY_SHARE
from runner.sweeps.verdict.statistics import (
    MIN_SEEDS,
    Difference,
    Ratio,
    Spread,
    Tolerance,
    Verdict,
    quality_tests,
)
from runner.tracking.result_table import change_since_training, shared_settings

BASELINE = "32-true"
"""The precision that every other one is compared with."""
FIRST_SWEEP = "A"
SECOND_SWEEP = "B"
"""The sweeps of a report on two: the jobs of both are compared with 32-true of A."""
MIN_GAIN_SEEDS = 0.05
"""Median speed ratios of several seeds that are nearer to 1 are called even: on a shared machine
speeds vary as much."""
MIN_GAIN_ONE_SEED = 0.10
"""The same for one seed: no interval shows how much the speed varies."""
MAX_EVEN_RANGE = 1.5
"""If the upper end of an interval around 1 is this many times the lower one, nothing was measured:
the verdict is "unclear", not "even"."""
MAX_STALLED_SHARE = 0.5
"""Share of a precision's weights that did not move, above which it is not recommended, as for
fewer the guard of a run does not warn either."""
MIN_TRAINED_RATIO = 0.5
"""A precision that trains a smaller part of its weights than this share of the baseline's part is
not compared with it: its frozen weights would be judged, not its numbers."""


@dataclass(frozen=True)
class Group:
    """Jobs that differ in their seeds alone, on one device.

    Attributes:
        name: the label without the seed, and in a report on two sweeps the sweep.
        counts: jobs by outcome.
        quality, loss: over the complete jobs (finished, not diverged); the other spreads are
            over all jobs that finished or were stopped as diverged.
        change: in mode=evaluate, quality minus what the checkpoint reached in its own precision.
        speed: training speed in examples/s.
        weights_mib: in MiB.
        memory_mib: the mean of RunResult.memory_mib, in MiB.
        reasons: why jobs did not finish, each reason once.
    """

    name: str
    precision: str
    device: str
    jobs: tuple[RunResult, ...]
    counts: Counter[str]
    quality: Spread | None
    loss: Spread | None
    change: Spread | None
    speed: Spread | None
    weights_mib: Spread | None
    memory_mib: float | None
    loss_scale: Spread | None
    skipped: Spread | None
    converted: str
    reasons: tuple[str, ...]

    @property
    def finished_count(self) -> int:
        """Return how many jobs reached their end, diverged ones included."""
        return self.counts["finished"] + self.counts["diverged"]

    @property
    def is_complete(self) -> bool:
        """Return whether every job finished with a finite quality."""
        return bool(self.quality) and self.counts["finished"] == len(self.jobs)

    @property
    def is_evaluation(self) -> bool:
        """Return whether the jobs evaluated a checkpoint instead of training."""
        return any(job.trained_in for job in self.jobs)

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the swept settings apart from precision and seed."""
        return tuple(self.jobs[0].settings)

    @property
    def sweep(self) -> str:
        """Return the letter of its sweep in a report on two sweeps, else an empty text."""
        return self.jobs[0].sweep

    @property
    def metric(self) -> str:
        """Return the name of the quality; a job that failed early does not know it."""
        return next((job.quality for job in self.jobs if job.quality), "")

    @property
    def direction(self) -> Literal["max", "min"]:
        """Return whether a greater ("max") or a smaller ("min") quality is better."""
        judged = [job for job in self.jobs if job.quality]
        return judged[0].direction if judged else "max"

    @property
    def is_on_cpu(self) -> bool:
        """Return whether the device is a CPU."""
        return any(job.is_on_cpu for job in self.jobs)

    @property
    def stagnant_share(self) -> float:
        """Return the largest share of its jobs' weights that the last step before an evaluation
        left where they were, 0 to 1."""
        return max(job.stagnant_share or 0.0 for job in self.jobs)

    @property
    def trained_share(self) -> float:
        """Return the smallest share of its parameters' elements that its jobs train, 0 to 1."""
        return min(1.0 if job.trains is None else job.trains for job in self.jobs)


def group_jobs(results: Sequence[RunResult]) -> list[Group]:
    """Return the groups of a sweep, ordered by their first jobs.

    A job that failed before it knew its device counts on the device where its group ran.
    """
    devices = fmt.grouped(
        (group_name(result), result.device) for result in results if result.device
    )
    known = {*chain.from_iterable(devices.values())}
    only = [*known] if len(known) == 1 else [""]
    keyed = []
    for result in results:
        name = group_name(result)
        keyed.append(((name, result.device or devices.get(name, only)[0]), result))
    grouped = fmt.grouped(keyed).items()
    return [_group(name, device, jobs, results) for (name, device), jobs in grouped]


def job_name(result: RunResult) -> str:
    """Return the name of a job in a report: its label, and of two sweeps its sweep."""
    return f"{result.label} sweep={result.sweep}" if result.sweep else result.label


def group_name(result: RunResult) -> str:
    """Return the name of a job's group: that of the job without the seed."""
    return job_name(replace(result, label=result.group or result.label))


def has_several_models(groups: Sequence[Group]) -> bool:
    """Return whether the groups train different models or data, whose qualities do not compare."""
    jobs = [job for group in groups for job in group.jobs]
    models = {job.model for job in jobs} - {""}
    data = {job.data for job in jobs} - {""}
    return len(models) > 1 or len(data) > 1


def _group(
    name: str, device: str, jobs: Sequence[RunResult], sweep_results: Sequence[RunResult]
) -> Group:
    ended = [job for job in jobs if job.outcome in ("finished", "diverged")]
    complete = [job for job in ended if job.outcome == "finished"]

    def spread(
        value: Callable[[RunResult], float | None], among: Sequence[RunResult] = ended
    ) -> Spread | None:
        return Spread.of_values(map(value, among))

    memory = spread(lambda job: job.memory_mib)
    return Group(
        name,
        jobs[0].precision,
        device,
        tuple(jobs),
        Counter(job.outcome for job in jobs),
        quality=spread(lambda job: job.quality_value, complete),
        loss=spread(lambda job: job.metrics.get(metric_names.VAL_LOSS), complete),
        change=spread(lambda job: change_since_training(job.quality, job, sweep_results), complete),
        speed=spread(lambda job: job.examples_per_second),
        weights_mib=spread(lambda job: job.weights_mib),
        memory_mib=memory.mean if memory else None,
        loss_scale=spread(lambda job: job.loss_scale),
        skipped=spread(lambda job: job.skipped_steps),
        converted=", ".join(dict.fromkeys(job.converted_share for job in ended if job.converted)),
        reasons=tuple(dict.fromkeys(job.error for job in jobs if job.error)),
    )


@dataclass(frozen=True)
class Comparison:
    """A group and its baseline: 32-true with the same other settings on the same device.

    Attributes:
        baseline: None if 32-true was not swept; the group itself if it is others' baseline.
        speed_ratio: examples/s over the baseline's, per seed if the seeds match, else of medians;
            above 1 if the group is faster.
        memory_ratio: Group.memory_mib over the baseline's.
        difference: quality minus the baseline's.
        equal_loss: the baseline's time until the higher of both final losses over the group's, see
            with_equal_loss(); 0 if the group ends measurably above the baseline.
        was_busy: other programs kept busy the CPU that it trained on, so that no speed is judged.
        has_learned: the training loss of all its jobs and its baseline's fell, as far as is known.
    """

    group: Group
    baseline: Group | None
    speed_ratio: Ratio | None = None
    memory_ratio: float | None = None
    difference: Difference | None = None
    equal_loss: Ratio | None = None
    was_busy: bool = False
    has_learned: bool = True

    @property
    def is_baseline(self) -> bool:
        """Return whether other groups are compared with this one."""
        return self.baseline is self.group

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict on the quality, None where it was not compared."""
        return self.difference.verdict if self.difference else None

    @property
    def loss_gap(self) -> float:
        """Return by how much the quality is worse, in its own unit; 0 where it was not compared."""
        sign = -1 if self.group.direction == "max" else 1
        return sign * self.difference.value if self.difference else 0.0

    @property
    def is_judged(self) -> bool:
        """Return whether the quality of several seeds was tested against the baseline's."""
        return self.verdict not in (None, Verdict.UNJUDGED)

    @property
    def has_stalled(self) -> bool:
        """Return whether most of its weights no longer moved, in which its training has ended."""
        return self.group.stagnant_share > MAX_STALLED_SHARE

    @property
    def trains_less(self) -> bool:
        """Return whether it trains a much smaller part of the weights than its baseline."""
        needed = self.baseline.trained_share if self.baseline else 0.0
        return self.group.trained_share < MIN_TRAINED_RATIO * needed

    @property
    def speed_verdict(self) -> Literal["faster", "no gain", "slower", "even", "unclear", ""]:
        """Return the verdict on speed by the ratio's interval; empty without a ratio.

        No gain: faster in each step, and measurably no faster to an equal loss.
        """
        ratio = self.speed_ratio
        if not ratio or self.is_baseline:
            return ""
        if self.was_busy:
            return "unclear"
        min_gain = MIN_GAIN_ONE_SEED if ratio.n == 1 else MIN_GAIN_SEEDS
        # Both: an interval that excludes 1 by a hair is no gain, and a large median whose interval
        # includes 1 may be chance.
        if ratio.low > 1 and ratio.value > 1 + min_gain:
            time = self.equal_loss
            return "no gain" if time and time.n > 1 and time.high <= 1 else "faster"
        if ratio.high < 1 and ratio.value < 1 - min_gain:
            return "slower"
        return "even" if ratio.high < MAX_EVEN_RANGE * ratio.low else "unclear"


def compare_with_baselines(
    results: Sequence[RunResult],
    busy: float = 0.0,
    tolerance: Tolerance | None = None,
    untrained: Sequence[RunResult] = (),
) -> list[Comparison]:
    """Compare every group of a sweep with its baseline, in the order of group_jobs().

    Args:
        results: of the jobs.
        busy: share of the processors that other programs kept busy meanwhile.
        tolerance: accepted difference in quality; None for the default one.
        untrained: results whose training loss did not fall.
    """
    groups = group_jobs(results)
    candidates = {}
    for group in groups:
        if group.precision == BASELINE and group.sweep != SECOND_SWEEP:
            candidates[group.settings, group.device] = group
    pairs = [(group, _baseline_of(group, candidates)) for group in groups]
    used = {id(base) for group, base in pairs if base is not group}
    compared = []
    for group, base in pairs:
        # A baseline that no other group is compared with is an ordinary row.
        is_alone = base is group and id(group) not in used
        comparison = compare_two_groups(group, None if is_alone else base, busy)
        jobs = [*group.jobs, *(base.jobs if base else ())]
        compared.append(replace(comparison, has_learned=not any(job in untrained for job in jobs)))
    tested = [i for i, each in enumerate(compared) if has_comparable_quality(each)]
    # Groups with too few seeds get no verdict, so they cannot get a false one.
    family_size = sum(len(qualities_by_seed(groups[i])) >= MIN_SEEDS for i in tested)
    for places in fmt.grouped((id(compared[i].baseline), i) for i in tested).values():
        baseline = compared[places[0]].baseline
        assert baseline
        judged = [groups[i] for i in places]
        tests = quality_tests(
            [qualities_by_seed(group) for group in judged],
            qualities_by_seed(baseline),
            baseline.direction,
            tolerance or Tolerance(),
            family_size,
            quality_resolution(judged, baseline),
        )
        for i, test in zip(places, tests, strict=True):
            stalls = compared[i].has_stalled
            if stalls and test.verdict not in (Verdict.WORSE, Verdict.UNJUDGED):
                test = replace(test, verdict=Verdict.STALLED)
            compared[i] = replace(compared[i], difference=test)
    return compared


def _baseline_of(
    group: Group, candidates: Mapping[tuple[tuple[str, ...], str], Group]
) -> Group | None:
    """Return the baseline with the same settings on the same device, None without one.

    Args:
        group: any group of the sweep.
        candidates: the baseline's groups by (settings, device).
    """
    # Settings that belong to a precision, such as its keep_fp32, have no baseline with the same.
    shared = shared_settings(group.settings)
    exact = candidates.get((group.settings, group.device))
    base = exact or candidates.get((shared, group.device))
    # A second sweep may have run on another machine.
    if not base and group.sweep == SECOND_SWEEP:
        return next((each for (own, _), each in candidates.items() if own == shared), None)
    return base


def compare_two_groups(group: Group, baseline: Group | None, busy: float = 0.0) -> Comparison:
    """Compare the speed and memory of a group and a baseline; without ratios if either has no
    finished job. For `busy` see compare_with_baselines."""
    if not baseline or not baseline.finished_count or not group.finished_count:
        return Comparison(group, baseline)
    memory_ratio = None
    # A process's memory on a CPU and a device's memory are different numbers.
    is_comparable = group.is_on_cpu == baseline.is_on_cpu
    if group.memory_mib is not None and baseline.memory_mib and is_comparable:
        memory_ratio = group.memory_mib / baseline.memory_mib
    speed_ratio = None
    # A job that finished without a speed was too short, or is emulated. The fastest jobs are the
    # shortest ones, and without them the rest would not stand for their group.
    jobs = (*group.jobs, *baseline.jobs)
    if all(job.outcome != "finished" or job.examples_per_second for job in jobs):
        speed_ratio = Ratio.of_groups(_speeds_by_seed(group), _speeds_by_seed(baseline))
    was_busy = group.is_on_cpu and busy > BUSY_SHARE
    return Comparison(group, baseline, speed_ratio, memory_ratio, was_busy=was_busy)


def has_comparable_quality(comparison: Comparison) -> bool:
    """Return whether a group's quality is of the same model, data and metric as its baseline's."""
    group = comparison.group
    baseline = comparison.baseline
    if not baseline or comparison.is_baseline or comparison.trains_less:
        return False
    # An evaluated checkpoint is compared with its own precision (Group.change), not with 32-true.
    if group.is_evaluation or has_several_models([group, baseline]):
        return False
    has_both = bool(group.quality and baseline.quality)
    return has_both and group.metric == baseline.metric


def qualities_by_seed(group: Group) -> list[tuple[int | None, float]]:
    """Return (seed, quality) of each complete job that was evaluated."""
    complete = [job for job in group.jobs if job.outcome == "finished"]
    return [(job.seed, job.metrics[job.quality]) for job in complete if job.quality in job.metrics]


def quality_resolution(groups: Sequence[Group], baseline: Group) -> float:
    """Return the smallest difference of a quality that counts examples; 0 for another one.

    A quality counts examples, as an accuracy does, if it is equal for two jobs of one seed whose
    losses differ or are unknown. The smallest difference between two values in the sweep stands for
    that of one example, which may be smaller.
    """
    base = {job.seed: job.metrics for job in baseline.jobs}
    quality = baseline.metric
    values = {value for _, value in qualities_by_seed(baseline)}
    # Without two values of the baseline, the smallest difference would be that of a bad precision.
    if len(values) < 2:
        return 0.0
    is_counted = False
    for job in chain.from_iterable(group.jobs for group in groups):
        if job.outcome == "finished" and quality in job.metrics:
            value = job.metrics[quality]
            others = base.get(job.seed, {})
            values.add(value)
            has_same_loss = job.metrics.get(metric_names.VAL_LOSS) == others.get(
                metric_names.VAL_LOSS, math.nan
            )
            is_counted |= value == others.get(quality) and not has_same_loss
    steps = (after - before for before, after in pairwise(sorted(values)))
    return min(steps) if is_counted else 0.0


def _speeds_by_seed(group: Group) -> list[tuple[int | None, float | None]]:
    """Return (seed, examples/s) of each job that finished; None for one without a speed."""
    finished = [job for job in group.jobs if job.status == "finished"]
    return [(job.seed, job.examples_per_second or None) for job in finished]
