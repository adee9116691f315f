"""What trials in several precisions say about the one to use: ranked, judged, with its reasons."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from runner.modes.result import RunResult
from runner.sweep.advisor.settings import AdviseSettings
from runner.sweep.report.compare import BASE, Comparison, Group, compare_jobs, group_jobs
from runner.sweep.report.paired_test import LEAST, PairedTest, baseline_spread, test_non_inferiority
from runner.sweep.report.statistics import Ratio
from runner.tracking.metric_names import VAL_LOSS

Outcome = Literal[
    "recommended",
    "baseline",
    "fit",
    "unclear",
    "worse",
    "diverged",
    "slow",
    "failed",
    "unavailable",
]
GAIN = 0.02
"""A share of memory below this is no gain."""


@dataclass(frozen=True)
class PrecisionVerdict:
    """One precision, or one with modules kept out of it.

    Attributes:
        beside: against 32-true; None without a baseline.
        judged: None where no seed came to its end in both.
        step: at which it diverged.
        found: what float32's numbers say of it.
        predicted: see Question.
        tried: words that leave modules out of it, and what the first seed's loss then is beside
            32-true's; NaN where it did not come to its end. Empty where any mended it.
    """

    group: Group
    outcome: Outcome
    beside: Comparison | None = None
    judged: PairedTest | None = None
    step: int | None = None
    emulated: bool = False
    command: Sequence[str] = ()
    found: str = ""
    predicted: tuple[float, int] | None = None
    tried: Sequence[tuple[str, float]] = ()

    @property
    def name(self) -> str:
        return self.group.name

    @property
    def good(self) -> bool:
        """Whether it trains as well as float32."""
        return self.outcome in ("recommended", "baseline", "fit")

    @property
    def failing(self) -> bool:
        """Whether its numbers are what is wrong with it."""
        return self.outcome in ("worse", "diverged")


@dataclass(frozen=True)
class Advice:
    """The answer.

    Attributes:
        lines: best first.
        spread: standard deviation of 32-true's final loss between seeds; NaN below two.
        loss: 32-true's mean.
    """

    question: AdviseSettings
    lines: Sequence[PrecisionVerdict]
    spread: float
    loss: float

    @property
    def pick(self) -> PrecisionVerdict | None:
        """The recommended one; None where 32-true came to nothing."""
        return next((line for line in self.lines if line.outcome == "recommended"), None)


def rank_precisions(results: Sequence[RunResult], question: AdviseSettings) -> Advice:
    """Judge and rank every precision's trials."""
    every = group_jobs(results)
    trials = [g for g in every if not _other(g)]
    base = next((g for g in trials if g.name == BASE), None)
    losses = _losses(base, question) if base else {}
    spread = baseline_spread([*losses.values()])
    mean = sum(losses.values()) / len(losses) if losses else math.nan
    found = [(g, _gaps(g, losses, question)) for g in trials if g is not base]
    judged = sum(len(gaps) >= LEAST for _, gaps in found)
    lines = [
        _line(
            g,
            base,
            test_non_inferiority(gaps, spread, question.tolerance, judged) if gaps else None,
            question,
        )
        for g, gaps in found
    ]
    if base is not None:
        lines.append(_baseline(base, question))
    tries = [(g, _first(g, losses, question)) for g in every if _other(g)]
    ranked = _ranked([_tried(line, lines, tries) for line in lines], question.objective)
    return Advice(question, ranked, spread, mean)


def _other(group: Group) -> bool:
    """Whether its jobs are looks at the numbers, or tries of a search that went on elsewhere."""
    tried = bool(group.settings) and group.counts.get("finished", 0) <= LEAST
    return tried or "numerics." in group.settings


def _losses(group: Group, question: AdviseSettings) -> dict[int | None, float]:
    """Final losses by seed, of the trials that came to their end."""
    return {
        job.seed: job.metrics[VAL_LOSS]
        for job in group.jobs
        if job.outcome == "finished" and job.steps >= question.steps and VAL_LOSS in job.metrics
    }


def _gaps(
    group: Group, losses: Mapping[int | None, float], question: AdviseSettings
) -> list[float]:
    """Differences to 32-true, seed by seed; without the one that chose the modules to leave out."""
    found = _losses(group, question)
    chose = min((s for s in found if s is not None), default=None) if group.settings else None
    return [
        q - losses[s] for s, q in found.items() if s in losses and (chose is None or s != chose)
    ]


def _first(group: Group, losses: Mapping[int | None, float], question: AdviseSettings) -> float:
    """Difference to 32-true of the first seed; NaN where it did not come to its end."""
    found = _losses(group, question)
    return next((loss - losses[seed] for seed, loss in found.items() if seed in losses), math.nan)


def _tried(
    line: PrecisionVerdict, lines: Sequence[PrecisionVerdict], tries: Sequence[tuple[Group, float]]
) -> PrecisionVerdict:
    """With what was tried on it, where no verdict says that any of it is good."""
    own = [n for n in lines if n.group.settings and n.group.precision == line.group.precision]
    if not line.failing or line.group.settings or any(one.good for one in own):
        return line
    mine = [(g.settings, gap) for g, gap in tries if g.precision == line.group.precision]
    return replace(line, tried=mine)


def _baseline(base: Group, question: AdviseSettings) -> PrecisionVerdict:
    line = _line(base, base, None, question)
    return replace(line, outcome="baseline") if base.finished and not line.failing else line


def _line(
    group: Group, base: Group | None, judged: PairedTest | None, question: AdviseSettings
) -> PrecisionVerdict:
    outcome, step = _outcome(group, judged, question), None
    if outcome == "diverged":
        step = min(_end(job) for job in group.jobs if job.outcome == "diverged")
    return PrecisionVerdict(
        group,
        outcome,
        _beside(group, base),
        judged,
        step,
        group.precision in question.emulated,
        _command(group, question),
        "" if group.settings else question.told(group.precision),
        None if group.settings else question.predicted(group.precision),
    )


def _beside(group: Group, base: Group | None) -> Comparison:
    """Without a speed that fewer seeds tell than a verdict needs: the others were too short."""
    found = compare_jobs(group, base)
    sure = found.speed is not None and found.speed.n >= LEAST
    return found if sure else replace(found, speed=None)


def _outcome(group: Group, judged: PairedTest | None, question: AdviseSettings) -> Outcome:
    if group.counts.get("unavailable"):
        return "unavailable"
    if group.counts.get("diverged"):
        return "diverged"
    if group.counts.get("failed") and not group.finished:
        return "failed"
    if any(job.status == "finished" and job.steps < question.steps for job in group.jobs):
        return "slow"
    if judged is None or judged.verdict == "unclear":
        return "unclear"
    return "worse" if judged.verdict == "worse" else "fit"


def _end(job: RunResult) -> int:
    """The step that a guard names, else the last one."""
    named = re.search(r"step (\d+)", job.error)
    return int(named[1]) if named else job.steps


def _command(group: Group, question: AdviseSettings) -> Sequence[str]:
    own = [w.partition(" ")[2] for w in question.own if w.startswith(f"{group.precision} ")]
    return [*question.command, f"precision={group.precision}", *own, *group.settings.split()]


_ORDER: Mapping[Outcome, int] = {
    "recommended": 0,
    "fit": 1,
    "baseline": 1,
    "unclear": 2,
    "worse": 3,
    "diverged": 4,
    "slow": 5,
    "failed": 6,
    "unavailable": 7,
}


def _ranked(lines: Sequence[PrecisionVerdict], objective: str) -> list[PrecisionVerdict]:
    """The recommended one first, then what is as good by the objective, then the rest by how far
    it is from being good."""
    fit = [line for line in lines if line.outcome in ("fit", "baseline") and not line.emulated]
    paces = _paces(lines)
    merits = {id(line): _merit(line, objective, paces[id(line)]) for line in lines}
    best = max(fit, key=lambda line: merits[id(line)], default=None)
    if not any(line.outcome == "baseline" for line in fit):
        best = None
    named = [replace(line, outcome="recommended") if line is best else line for line in lines]
    merit = {id(new): merits[id(old)] for new, old in zip(named, lines, strict=True)}

    def place(line: PrecisionVerdict) -> tuple[float, ...]:
        gap = line.judged.gap if line.judged and line.outcome == "worse" else 0.0
        return _ORDER[line.outcome], line.emulated, gap, *(-m for m in merit[id(line)])

    return sorted(named, key=place)


def _paces(lines: Sequence[PrecisionVerdict]) -> dict[int, float]:
    """Speeds over 32-true's by the lines' identity: 1 where no difference was measured, and that
    of the fastest where its seeds' range and theirs overlap, so that chance ranks nobody."""
    sure = [
        (id(line), beside.speed)
        for line in lines
        if (beside := line.beside) and beside.speed and beside.pace in ("faster", "slower")
    ]
    found = dict.fromkeys(map(id, lines), 1.0)
    leader: Ratio | None = None
    for key, speed in sorted(sure, key=lambda pair: pair[1].value, reverse=True):
        if leader is None or speed.high < leader.low or (speed.value > 1) != (leader.value > 1):
            leader = speed
        found[key] = leader.value
    return found


def _merit(line: PrecisionVerdict, objective: str, speed: float) -> tuple[float, ...]:
    """The greater the better; what was not measured to be a gain counts as none."""
    c, home = line.beside, float(line.outcome == "baseline")
    memory = c.memory if c and c.memory is not None and abs(c.memory - 1) > GAIN else 1.0
    quality = -line.judged.gap if line.judged and line.judged.verdict == "better" else 0.0
    if line.emulated:
        speed = memory = 1.0
    order = {
        "time": (speed, home, -memory, quality),
        "memory": (-memory, speed, home, quality),
        "quality": (quality, home, speed, -memory),
    }
    return order[objective]
