"""Judge and rank the trials of mode=advise: one verdict per precision, the best one first."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from runner.core import RunResult
from runner.sweeps.verdict.advise_request import AdviseRequest
from runner.sweeps.verdict.compare import (
    Comparison,
    Group,
    compare_two_groups,
    group_jobs,
    quality_resolution,
)
from runner.sweeps.verdict.equal_loss import JobCurves, with_equal_loss
from runner.sweeps.verdict.statistics import (
    MIN_SEEDS,
    Difference,
    MeanDifference,
    Ratio,
    Verdict,
    baseline_spread,
    non_inferiority_tests,
)

MIN_MEMORY_GAIN = 0.02
"""A smaller share of memory saved counts as no gain."""
LossBySeed = Mapping[int | None, float]


@dataclass(frozen=True)
class PrecisionVerdict:
    """What the trials say about one precision, or about one with a remedy.

    Attributes:
        comparison: with the baseline, by non_inferiority_tests() of the final loss.
        rating: the verdict of the test, or what mode=advise says instead of it.
        command: words of the command that trains in this precision.
        float32_finding: why the precision fails, as measured on float32's numbers.
        forecast: an entry of AdviseRequest.memory.
        attempted_remedies: overrides that exclude modules or keep updates, each with the first
            seed's loss minus the baseline's; NaN if that trial did not finish. Empty if any of them
            is acceptable.
        gaps: final loss minus the baseline's by seed, in the order of the seeds.
    """

    comparison: Comparison
    rating: Verdict
    request: AdviseRequest
    is_emulated: bool = False
    command: Sequence[str] = ()
    float32_finding: str = ""
    forecast: Mapping[str, float] | None = None
    attempted_remedies: Sequence[tuple[str, float]] = ()
    gaps: LossBySeed = field(default_factory=dict)

    @property
    def group(self) -> Group:
        """Return the trials."""
        return self.comparison.group

    @property
    def test(self) -> Difference | None:
        """Return the difference of the final loss, None if no seed finished in both."""
        return self.comparison.difference

    @property
    def name(self) -> str:
        """Return the precision, with the overrides of a remedy."""
        return self.group.name

    @property
    def diverged_step(self) -> int | None:
        """Return the optimizer step at which the first trial diverged."""
        diverged = [job for job in self.group.jobs if job.outcome == "diverged"]
        return min((job.diverged_step or job.steps for job in diverged), default=None)

    @property
    def is_acceptable(self) -> bool:
        """Return whether it trains as well as the baseline."""
        return self.rating.rank <= Verdict.INDISTINGUISHABLE.rank

    @property
    def is_failing(self) -> bool:
        """Return whether its numbers are the reason that it is not acceptable."""
        return self.rating in (Verdict.WORSE, Verdict.DIVERGED, Verdict.STALLED)


@dataclass(frozen=True)
class Advice:
    """The answer of mode=advise.

    Attributes:
        verdicts: best first.
        baseline_losses: the baseline's final losses by seed, see AdviseRequest.judged_loss.
        page: HTML that a notebook shows in place of the advice, made by the caller.
        text: the answer in a few lines, made by the caller.
    """

    request: AdviseRequest
    verdicts: Sequence[PrecisionVerdict]
    baseline_losses: LossBySeed
    page: str = field(default="", repr=False)
    text: str = ""

    def __repr__(self) -> str:
        return self.text or f"Advice({', '.join(str(v.name) for v in self.verdicts)})"

    def _repr_html_(self) -> str | None:
        """Return the page; None shows the advice as text."""
        return self.page or None

    @property
    def baseline_spread(self) -> float:
        """Return the standard deviation of the baseline's final loss over seeds; NaN below two."""
        return baseline_spread([*self.baseline_losses.values()])

    @property
    def recommendation(self) -> PrecisionVerdict | None:
        """Return the recommended precision, None if the baseline itself did not train."""
        return next((v for v in self.verdicts if v.rating is Verdict.RECOMMENDED), None)


def rank_precisions(
    results: Sequence[RunResult],
    request: AdviseRequest,
    untrained: Sequence[RunResult] = (),
    curves: JobCurves | None = None,
) -> Advice:
    """Judge and rank every precision's trials.

    Args:
        results: of all trials, those of the search for remedies included.
        request: what mode=advise was asked and measured.
        untrained: results whose training loss did not fall: where nothing is learned, precisions do
            not differ, and nothing is judged.
        curves: of the jobs; without them no time to an equal loss is known.
    """
    recorded = [RunResult.from_json(values) for values in request.recorded]
    groups = group_jobs([*results, *recorded])
    dropped = [group for group in groups if _is_search_trial(group)]
    trials = [group for group in groups if group not in dropped]
    # Trials and recorded results of the baseline may come from different devices.
    bases = [group for group in trials if group.name == request.baseline]
    base = bases[0] if bases else None
    base_losses = {}
    for group in bases:
        base_losses |= _final_losses(group, request)
    others = [group for group in trials if group not in bases]
    # A precision may have a group on each of several devices.
    gaps = {(g.name, g.device): _gaps(g, base_losses, request) for g in others}
    judged = {key: [*of_group.values()] for key, of_group in gaps.items() if of_group}
    # Too few seeds get no verdict, so they cannot get a false one.
    family_size = sum(len(of_group) >= MIN_SEEDS for of_group in judged.values())
    # What precisions are judged by may be another metric than the task's quality.
    resolution = 0.0
    if base and base.metric == request.metric:
        resolution = quality_resolution(others, base)
    means = [MeanDifference.of_pairs(of_group, resolution) for of_group in judged.values()]
    losses = [*base_losses.values()]
    found = non_inferiority_tests(means, losses, request.accepted, family_size)
    tests = dict(zip(judged, found, strict=True))
    verdicts = []
    # The baseline comes last, and is compared with nothing.
    for group in [*others, *bases[:1]]:
        key = (group.name, group.device)
        test = tests.get(key)
        jobs = [*group.jobs, *(base.jobs if base else ())]
        if test and any(job in untrained for job in jobs):
            test = replace(test, verdict=Verdict.UNCLEAR)
        verdict = _verdict(group, base, test, gaps.get(key, {}), request)
        comparison = with_equal_loss(verdict.comparison, curves or {}, request.accepted)
        verdicts.append(replace(verdict, comparison=comparison))
    ranked = _rank_verdicts([*_with_attempts(verdicts, dropped, base_losses)], request.objective)
    return Advice(request, ranked, base_losses)


def jobs_of(rows: Iterable[Comparison | PrecisionVerdict]) -> list[RunResult]:
    """Return the jobs of the groups of comparisons or verdicts."""
    return [job for row in rows for job in row.group.jobs]


def unhealed_verdicts(verdicts: Sequence[PrecisionVerdict]) -> list[PrecisionVerdict]:
    """Return the verdicts on precisions that fail, and that no remedy has healed so far."""
    healed = {v.group.precision for v in verdicts if v.group.settings and v.is_acceptable}
    plain = [v for v in verdicts if v.is_failing and not v.group.settings]
    return [v for v in plain if v.group.precision not in healed]


def _is_search_trial(group: Group) -> bool:
    """Return whether the jobs measure numbers, or try remedies that the search dropped."""
    # A remedy that heals is repeated over more seeds than a verdict needs: one of them chose it.
    is_dropped = bool(group.settings) and group.counts["finished"] <= MIN_SEEDS
    return is_dropped or any(word.startswith("numerics.") for word in group.settings)


def _final_losses(group: Group, request: AdviseRequest) -> dict[int | None, float]:
    """Return the final losses by seed of the trials that reached their last step."""
    losses = {}
    for job in group.jobs:
        # A trial that hit its time limit finishes early: its loss is not one of the last step.
        is_whole = job.outcome == "finished" and job.steps >= request.steps
        loss = request.judged_loss(job.metrics)
        if is_whole and loss is not None:
            losses[job.seed] = loss
    return losses


def _gaps(group: Group, base_losses: LossBySeed, request: AdviseRequest) -> LossBySeed:
    """Return the loss minus the baseline's of each seed that both have, in the seeds' order."""
    losses = _final_losses(group, request)
    seeds = sorted(seed for seed in losses if seed is not None and seed in base_losses)
    # The seed that chose a remedy would favour it: it does not judge it.
    if group.settings and losses:
        first = min(seed for seed in losses if seed is not None)
        seeds = [seed for seed in seeds if seed != first]
    return {seed: losses[seed] - base_losses[seed] for seed in seeds}


def _with_attempts(
    verdicts: Sequence[PrecisionVerdict], dropped: Sequence[Group], base_losses: LossBySeed
) -> Iterator[PrecisionVerdict]:
    """Yield the verdicts with the remedies that were attempted.

    Args:
        verdicts: on every precision.
        dropped: the trials of remedies that the search dropped.
        base_losses: the baseline's.
    """
    # A remedy that heals the precision has a row of its own, which says more.
    failing = unhealed_verdicts(verdicts)
    for verdict in verdicts:
        attempts = []
        if verdict in failing:
            for group in dropped:
                losses = _final_losses(group, verdict.request)
                gaps = (losses[seed] - base_losses[seed] for seed in losses if seed in base_losses)
                if group.precision == verdict.group.precision:
                    attempts.append((" ".join(group.settings), next(gaps, math.nan)))
        yield replace(verdict, attempted_remedies=attempts)


def _verdict(
    group: Group,
    base: Group | None,
    test: Difference | None,
    gaps: LossBySeed,
    request: AdviseRequest,
) -> PrecisionVerdict:
    """Return the verdict on a group, before one is recommended."""
    comparison = replace(compare_two_groups(group, base, request.busy), difference=test)
    if base and base.device != group.device:
        # A recorded baseline of another machine: neither its speed nor its memory compares.
        comparison = replace(comparison, speed_ratio=None, memory_ratio=None)
    elif comparison.speed_ratio and comparison.speed_ratio.n < MIN_SEEDS:
        comparison = replace(comparison, speed_ratio=None)
    precision = group.precision
    is_emulated = precision in request.emulated
    if is_emulated and not group.is_on_cpu:
        # Weights take as much memory emulated; an accelerator's peak does not.
        comparison = replace(comparison, memory_ratio=None)
    overrides = request.overrides.get(precision, ())
    # What was measured on float32's numbers belongs to the precision without a remedy.
    is_plain = not group.settings
    return PrecisionVerdict(
        comparison,
        _rating(comparison, request),
        request,
        is_emulated,
        [*request.command, f"precision={precision}", *overrides, *group.settings],
        request.diagnoses.get(precision, "") if is_plain else "",
        request.memory.get(precision) if is_plain else None,
        gaps=gaps,
    )


def _rating(comparison: Comparison, request: AdviseRequest) -> Verdict:
    group = comparison.group
    # A trial that diverged outweighs the test, which sees only the seeds that finished.
    if group.counts["diverged"] and not group.counts["unavailable"]:
        return Verdict.DIVERGED
    if comparison.is_baseline and group.finished_count:
        return Verdict.BASELINE
    if group.counts["unavailable"]:
        return Verdict.UNAVAILABLE
    if group.counts["failed"] and not group.finished_count:
        return Verdict.FAILED
    if any(job.status == "finished" and job.steps < request.steps for job in group.jobs):
        return Verdict.SLOW
    if not comparison.is_judged:
        return Verdict.UNCLEAR
    if comparison.has_stalled and comparison.verdict is not Verdict.WORSE:
        return Verdict.STALLED
    return comparison.verdict or Verdict.UNCLEAR


def _rank_verdicts(verdicts: Sequence[PrecisionVerdict], objective: str) -> list[PrecisionVerdict]:
    """Sort the verdicts by their rating, the acceptable ones by the objective; recommend one."""
    speeds = _ranking_speeds(verdicts)

    def place(verdict: PrecisionVerdict) -> tuple[float, ...]:
        # Among worse precisions the least harmful is first, whatever it gains.
        is_worse = verdict.rating is Verdict.WORSE
        harm = verdict.test.value if verdict.test and is_worse else 0.0
        negated = (-merit for merit in _merit_key(verdict, objective, speeds[id(verdict)]))
        rank = 0 if verdict.is_acceptable else verdict.rating.rank
        return rank, verdict.is_emulated, harm, *negated

    ranked = sorted(verdicts, key=place)
    # If the baseline itself did not train, nothing was measured against it. An emulated precision
    # has no speed here, is behind the others, and is never recommended.
    if any(v.rating is Verdict.BASELINE and not v.is_emulated for v in verdicts):
        ranked[0] = replace(ranked[0], rating=Verdict.RECOMMENDED)
    return ranked


def _ranking_speeds(verdicts: Sequence[PrecisionVerdict]) -> dict[int, float]:
    """Return the speed that each verdict is ranked by, over the baseline's, by the verdict's id().

    1 if no difference was measured. Precisions whose ranges over seeds overlap get the fastest
    one's speed, so that chance does not rank them.
    """
    measured: list[tuple[int, Ratio]] = []
    for verdict in verdicts:
        ratio = verdict.comparison.speed_ratio
        if ratio and verdict.comparison.speed_verdict in ("faster", "slower"):
            measured.append((id(verdict), ratio))
    speeds = dict.fromkeys(map(id, verdicts), 1.0)
    leader: Ratio | None = None
    for key, ratio in sorted(measured, key=lambda pair: pair[1].value, reverse=True):
        # A precision slower than the baseline must not get the speed of one that is faster.
        is_across_baseline = leader and (ratio.value > 1) != (leader.value > 1)
        if not leader or ratio.high < leader.low or is_across_baseline:
            leader = ratio
        speeds[key] = leader.value
    return speeds


def _merit_key(verdict: PrecisionVerdict, objective: str, speed: float) -> tuple[float, ...]:
    """Return the sort key of a verdict, greater is better.

    What was not measured to be a gain counts as none.
    """
    test = verdict.test
    memory = verdict.comparison.memory_ratio
    # Emulation distorts the memory, and has no speed.
    if memory is None or abs(memory - 1) <= MIN_MEMORY_GAIN or verdict.is_emulated:
        memory = 1.0
    quality = 0.0
    if test and test.verdict is Verdict.BETTER:
        quality = -test.value
    # Among equals the baseline itself is the simpler choice.
    is_baseline = float(verdict.rating is Verdict.BASELINE)
    keys = {
        "time": (speed, is_baseline, -memory, quality),
        "memory": (-memory, speed, is_baseline, quality),
        "quality": (quality, is_baseline, speed, -memory),
    }
    return keys[objective]
