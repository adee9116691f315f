"""What plans for cards say: one table of precisions and cards, and one sentence."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from runner.core import ConfigError, RunSpec, files, fmt, tensor_facts
from runner.diagnostics.memory.forecast import MAX_FORECAST_BATCH_SIZE
from runner.output.markup import Cell, Table
from runner.planning.card_plan import CardPlan
from runner.planning.room import DeviceSpec, PlanSpec
from runner.sweeps.report.load import load_sweep
from runner.sweeps.report.sweep_data import SweepData
from runner.sweeps.report.wording import join_names, rating_words, verdict_words
from runner.sweeps.verdict.answer import Answer, AnswerRecord
from runner.sweeps.verdict.statistics import Ratio, Verdict

UNTRIED = "The quality was not tried: plan.quality=<a sweep> puts its verdict beside the speed."
UNKNOWN = "contention, power limits, data loading, other kernels than those measured"


def with_quality(plan: CardPlan, spec: RunSpec) -> CardPlan:
    """Return a plan with what the sweep of plan.quality says about its precision.

    Raises:
        ConfigError: there is no such sweep, or it did not try the precision.
        TrackingError: the store does not answer.
    """
    name = spec.section(PlanSpec).quality
    if name is None:
        return plan
    uri = spec.tracking.get("uri")
    data = load_sweep(name, {"tracking.uri": uri} if uri else {}).data
    tried = {}
    for verdict in data.advice.verdicts if data.advice else ():
        words = rating_words(verdict), verdict.is_failing
        tried.setdefault(verdict.group.precision, (*words, verdict.group))
    for one in data.compared:
        is_worse = one.verdict is Verdict.WORSE or bool(one.group.counts["diverged"])
        tried.setdefault(one.group.precision, (verdict_words(one), is_worse, one.group))
    if plan.precision not in tried:
        raise ConfigError(
            f"plan.quality={name} has not tried precision={plan.precision}, but "
            f"{join_names(tried)}. Type one of these, or leave plan.quality= out."
        )
    words, is_worse, group = tried[plan.precision]
    emulated = "emulated, " if any(job.kernels == "emulated" for job in group.jobs) else ""
    seeds = "one seed" if len(group.jobs) == 1 else f"{len(group.jobs)} seeds"
    plan = replace(plan, quality=f"{words} ({emulated}{seeds})", trains_worse=is_worse)
    ratios = _step_ratios(data)
    own, base = ratios.get(plan.precision), ratios.get(plan.baseline)
    if own and base and base.value:
        steps = (own.low / base.value, own.value / base.value, own.high / base.value)
        plan = replace(plan, step_ratio=steps)
    return plan


def _step_ratios(data: SweepData) -> dict[str, Ratio]:
    """Return the steps of 32-true to an equal loss over those of each precision that was tried.

    Speeds of emulated trials mean nothing, so that each step counts alike.
    """
    alike = {"step_ms": 1.0, "examples_per_second": 1.0, "kernels": ""}
    jobs = [replace(job, result=replace(job.result, **alike)) for job in data.jobs]
    compared = replace(data, jobs=jobs).compared
    return {one.group.precision: one.equal_loss for one in compared if one.equal_loss}


def answer_plans(paths: Sequence[Path]) -> Answer:
    """Return what a sweep of plans says.

    Args:
        paths: files of plans, one or more.

    Raises:
        ValueError: a file is damaged.
    """
    plans = []
    for path in paths:
        values = files.read_json(path)
        plans.append(CardPlan(**files.dataclass_fields_from_json(CardPlan, values)))
    metrics = {}
    for plan in plans:
        numbers = {
            "speed_ratio": plan.ratio and plan.ratio[1],
            "step_seconds": plan.seconds and plan.seconds[1],
            "peak_gib": plan.peak_gib,
            "price": plan.price and plan.price[1],
        }
        name = f"{plan.precision}/{plan.place.replace(' ', '-')}"
        metrics |= {f"plan/{key}/{name}": value for key, value in numbers.items() if value}
    text = " ".join(_sentences(plans))
    untried = [] if any(plan.quality for plan in plans) else [UNTRIED]
    record = AnswerRecord(metrics, {"answer": text}, 0)
    rows = [{"precision": one.precision, "card": one.place, **plan_cells(one)} for one in plans]
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(head, [[Cell(row[name]) for name in head] for row in rows])
    return Answer(text, [*untried, f"Not known: {UNKNOWN}."], record=record, table=table)


def plan_cells(plan: CardPlan) -> dict[str, str]:
    """Return what a plan says, by the heads of a table; empty where it says nothing."""
    memory = plan.memory / tensor_facts.GIB
    more = " or more" if plan.largest_batch == MAX_FORECAST_BATCH_SIZE else ""
    in_place = f", as in {plan.memory_of}" if plan.memory_of else ""
    equal_loss = ""
    if plan.ratio and plan.step_ratio:
        product = [a * b for a, b in zip(plan.ratio, plan.step_ratio, strict=True)]
        equal_loss = _estimate(product) if product[1] else "not reached"
    return {
        "speed": "1.00" if plan.precision == plan.baseline else _estimate(plan.ratio),
        "at most": f"{plan.most:.2f}" if plan.most else "",
        "step, ms": _interval(plan.seconds, 1000),
        "memory, GiB": f"{plan.peak_gib:.3g} of {memory:.3g}{in_place}",
        "largest batch": f"{plan.largest_batch or 'none'}{more}",
        "hours": _interval(plan.hours),
        "price": _interval(plan.price),
        "quality": plan.quality,
        "speed to equal loss": equal_loss,
        "why not": plan.reason,
    }


def card_rows(plan: CardPlan, spec: RunSpec) -> dict[str, str]:
    """Return the rows of a single plan's table.

    Args:
        plan: for a card.
        spec: of the run.
    """
    rows = {name: text for name, text in plan_cells(plan).items() if text}
    gib = tensor_facts.GIB
    rows["at the peak"] = ", ".join(f"{name} {n / gib:.2f}" for name, n in plan.peak.items())
    if plan.ratio:
        rows["speed"] += f" × {plan.baseline} there"
    if plan.most:
        rows["at most"] += f", for {fmt.format_share(plan.covered)} of the step changes its format"
        if plan.narrowest:
            rows["at most"] += f"; slower in layers narrower than {plan.narrowest:.0f}"
    parts = [f"{name} {1000 * seconds:.3g}" for name, seconds in plan.parts.items() if seconds]
    rows["expected, ms"] = ", ".join(parts)
    if plan.ratio and not spec.section(PlanSpec).anchor:
        rows["anchor"] = f"none: plan.anchor=<tokens a second in {plan.baseline}> narrows the time"
    sources = spec.section(DeviceSpec).sources
    rows["sources"] = "\n".join(f"{name}: {text}" for name, text in sources.items())
    return rows | {"not known": UNKNOWN}


def _sentences(plans: Sequence[CardPlan]) -> Iterator[str]:
    """Yield the precision to take on each card."""
    for card, each in fmt.grouped((plan.place, plan) for plan in plans).items():
        usable = [plan for plan in each if plan.ratio and not plan.trains_worse]
        fitting = [plan for plan in usable if plan.fits]
        if fitting:
            plan = max(fitting, key=_least_gain)
            words = [*_choice(plan)]
            if _least_gain(plan) < 1:
                words = [plan.baseline, f"for {plan.precision} is {words[1]}"]
            yield f"On {card}: {', '.join(words)}."
        elif usable:
            plan = max(usable, key=lambda one: one.largest_batch or 0)
            size = plan.largest_batch
            smaller = f"{plan.precision} fits with {size} examples a card" if size else "none does"
            yield f"On {card}: this batch does not fit; {smaller}."
        else:
            reasons = "; ".join(dict.fromkeys(plan.reason for plan in each if plan.reason))
            yield f"On {card}: none of these precisions ({reasons or 'each trains worse'})."


def _least_gain(plan: CardPlan) -> float:
    """Return the speed that a plan has at least; 0 where it is measurably no faster to an equal
    loss."""
    assert plan.ratio
    if plan.step_ratio and plan.ratio[2] * plan.step_ratio[2] < 1:
        return 0.0
    return plan.ratio[0]


def _choice(plan: CardPlan) -> Iterator[str]:
    assert plan.ratio
    yield plan.precision
    if plan.precision != plan.baseline:
        yield f"{plan.ratio[0]:.2f} to {plan.ratio[2]:.2f} × {plan.baseline}"
    yield f"{plan.peak_gib:.3g} GiB of {plan.memory / tensor_facts.GIB:.0f}"
    if plan.price:
        yield f"{_interval(plan.price)} USD"
    if plan.quality or plan.precision != plan.baseline:
        yield f"quality: {plan.quality or 'not tried'}"


def _estimate(numbers: Sequence[float] | None) -> str:
    return f"{numbers[1]:.2f} ({numbers[0]:.2f} to {numbers[2]:.2f})" if numbers else ""


def _interval(numbers: Sequence[float] | None, unit: float = 1.0) -> str:
    if not numbers:
        return ""
    ends = (unit * number for number in numbers[::2])
    low, high = (f"{number:.3g}" if number < 100 else f"{number:,.0f}" for number in ends)
    return low if low == high else f"{low} to {high}"
