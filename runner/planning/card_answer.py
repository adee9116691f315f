"""What plans for cards say: one table of precisions and cards, and one sentence."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from runner.core import ConfigError, RunResult, RunSpec, files, fmt, tensor_facts
from runner.diagnostics.memory.forecast import MAX_FORECAST_BATCH_SIZE
from runner.diagnostics.memory.limits import USABLE_MEMORY_SHARE
from runner.output.markup import Cell, Table
from runner.planning.card_plan import CardPlan
from runner.planning.room import DeviceSpec, PlanSpec
from runner.sweeps.report.load import find_parent_run, load_from_folder, load_from_store
from runner.sweeps.report.sweep_data import SweepData
from runner.sweeps.report.wording import join_names, rating_words, verdict_words
from runner.sweeps.verdict.answer import Answer, AnswerRecord
from runner.sweeps.verdict.statistics import Ratio, Verdict

PLAN = "plan.json"
"""File in the folder of a plan for a card."""
HEAD = ("precision", "card", "speed", "at most", "step, ms", "memory, GiB", "largest batch")
BASELINE = "bf16-mixed"
UNTRIED = "The quality was not tried: plan.quality=<a sweep> puts its verdict beside the speed."
UNKNOWN = "Not known: contention, power limits, data loading, other kernels than those measured."


class Quality(NamedTuple):
    """What trials say about a precision.

    Attributes:
        text: the verdict, with how it was tested; empty where it was not.
        is_worse: whether it trains measurably worse.
        equal_loss: steps of bf16-mixed to the loss of 32-true over those of the precision: the
            least, expected and greatest; 0 where it does not reach that loss; None where they were
            not compared.
    """

    text: str = ""
    is_worse: bool = False
    equal_loss: Sequence[float] | None = None


def read_quality(spec: RunSpec, precision: str) -> Quality:
    """Return what the sweep of plan.quality says about a precision.

    Raises:
        ConfigError: there is no such sweep, or it did not try the precision.
        TrackingError: the store does not answer.
    """
    name = spec.section(PlanSpec).quality
    if name is None:
        return Quality()
    if files.path_exists(name):
        try:
            data = load_from_folder(Path(name))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"plan.quality={name} holds no sweep. Type the folder or the MLflow id of a sweep, "
                "mode=advise or mode=gate."
            ) from error
    else:
        from runner.tracking.reader import Reader  # imports mlflow

        reader = Reader(spec.tracking.get("uri") or "")
        data = load_from_store(reader, find_parent_run(reader, name))
    found = {}
    for verdict in data.advice.verdicts if data.advice else ():
        words = rating_words(verdict), verdict.is_failing
        found.setdefault(verdict.group.precision, (*words, verdict.group))
    for one in data.compared:
        is_worse = one.verdict is Verdict.WORSE or bool(one.group.counts["diverged"])
        found.setdefault(one.group.precision, (verdict_words(one), is_worse, one.group))
    if precision not in found:
        raise ConfigError(
            f"plan.quality={name} has not tried precision={precision}, but "
            f"{join_names(found)}. Type one of these, or leave plan.quality= out."
        )
    words, is_worse, group = found[precision]
    jobs = group.jobs
    emulated = "emulated, " if any(job.kernels == "emulated" for job in jobs) else ""
    seeds = "one seed" if len(jobs) == 1 else f"{len(jobs)} seeds"
    ratios = _step_ratios(data)
    ratio = ratios.get(precision)
    base = ratios[BASELINE].value if BASELINE in ratios else 0.0
    equal_loss = (
        [each / (base or 1.0) for each in (ratio.low, ratio.value, ratio.high)] if ratio else None
    )
    return Quality(f"{words} ({emulated}{seeds})", is_worse, equal_loss)


def _step_ratios(data: SweepData) -> dict[str, Ratio]:
    """Return the steps of 32-true to an equal loss over those of each precision that was tried.

    Speeds of emulated trials mean nothing, so that each step counts alike.
    """
    alike = {"step_ms": 1.0, "examples_per_second": 1.0, "kernels": ""}
    jobs = [replace(job, result=replace(job.result, **alike)) for job in data.jobs]
    compared = replace(data, jobs=jobs).compared
    return {one.group.precision: one.equal_loss for one in compared if one.equal_loss}


def answer_plans(results: Sequence[RunResult]) -> Answer:
    """Return what a sweep of plans says."""
    found: list[tuple[CardPlan, Quality]] = []
    for result in results:
        path = Path(result.folder, PLAN)
        if path.is_file():
            found.append(read_plan(path))
    if not found:
        return Answer(f"No {PLAN} is in the folders of these jobs.", table=Table(HEAD, []))
    sentences = [*_sentences(found)]
    metrics = {}
    for plan, _ in found:
        name = f"{plan.precision}/{plan.place.replace(' ', '-')}"
        metrics |= {f"plan/{key}/{name}": value for key, value in plan_metrics(plan).items()}
    record = AnswerRecord(metrics, {"answer": " ".join(sentences)}, 0)
    remarks = [UNKNOWN] if any(quality.text for _, quality in found) else [UNTRIED, UNKNOWN]
    return Answer(" ".join(sentences), remarks, record=record, table=plans_table(found))


def read_plan(path: Path) -> tuple[CardPlan, Quality]:
    """Read a plan and the quality beside it from a file.

    Raises:
        ValueError: the file is damaged.
    """
    values = files.read_json(path)
    quality = Quality(**values.pop("quality"))
    return CardPlan(**files.dataclass_fields_from_json(CardPlan, values)), quality


def plan_metrics(plan: CardPlan) -> dict[str, float]:
    """Return the numbers of a plan by the ends of their names."""
    numbers = {
        "speed_ratio": plan.ratio and plan.ratio[1],
        "step_seconds": plan.seconds and plan.seconds[1],
        "peak_gib": sum(plan.peak.values()) / tensor_facts.GIB,
        "price": plan.price and plan.price[1],
    }
    return {name: value for name, value in numbers.items() if value}


def card_rows(plan: CardPlan, quality: Quality, spec: RunSpec) -> dict[str, str]:
    """Return the rows of a single plan's table.

    Args:
        plan: for a card.
        quality: of its precision.
        spec: of the run.
    """
    gib = tensor_facts.GIB
    peak, largest = _memory_cells(plan)
    rows = {
        "peak of a step": f"{peak} GiB" + (f", as in {plan.memory_of}" if plan.memory_of else ""),
        "at the peak": ", ".join(f"{name} {size / gib:.2f}" for name, size in plan.peak.items()),
        "largest batch": f"{largest} examples on a card, in {USABLE_MEMORY_SHARE:g} of the card's memory",
    }
    if not plan.ratio or not plan.seconds:
        return rows | {"speed": plan.reason}
    speed, most, step = _speed_cells(plan)
    if quality.text:
        rows["quality"] = quality.text
    rows["speed"] = f"{speed} × {plan.baseline} there, with its 80 % interval"
    if plan.most:
        rows["bound"] = (
            f"{fmt.format_share(plan.covered)} of {plan.baseline}'s step changes its format: at "
            f"most {most} ×"
        )
        if plan.narrowest:
            rows["bound"] += f"; slower in layers narrower than {plan.narrowest:.0f}"
    rows["a step computes"] = f"{plan.teraflops:.4g} TFLOP"
    rows["a step takes"] = f"{step} ms"
    parts = {name: 1000 * seconds for name, seconds in plan.parts.items() if seconds}
    rows["expected"] = ", ".join(f"{name} {one:.3g}" for name, one in parts.items()) + " ms"
    if plan.hours:
        price = f", {_interval(plan.price)} USD" if plan.price else ""
        rows["all steps"] = f"{_interval(plan.hours)} hours{price}"
    if not plan.anchored:
        rows["anchor"] = (
            f"none: plan.anchor=<tokens per second in {plan.baseline}> narrows the time"
        )
    sources = spec.section(DeviceSpec).sources
    rows["sources"] = "\n".join(f"{name}: {text}" for name, text in sources.items())
    return rows | {"not known": UNKNOWN.partition(": ")[2]}


def _sentences(found: Sequence[tuple[CardPlan, Quality]]) -> Iterator[str]:
    """Yield the precision to take on each card."""
    by_card = fmt.grouped((plan.place, (plan, quality)) for plan, quality in found)
    for card, pairs in by_card.items():
        usable = [(p, q) for p, q in pairs if p.ratio and not q.is_worse]
        fitting = [(p, q) for p, q in usable if p.fits]
        if fitting:
            plan, quality = max(fitting, key=lambda pair: _least_gain(*pair))
            words = [*_choice(plan, quality)]
            if _least_gain(plan, quality) < 1:
                words = [plan.baseline, f"for {plan.precision} is {words[1]}"]
            yield f"On {card}: {', '.join(words)}."
        elif usable:
            plan = max((p for p, _ in usable), key=lambda p: p.largest_batch or 0)
            size = plan.largest_batch
            smaller = (
                f"{plan.precision} fits with {size} examples on a card" if size else "none does"
            )
            yield f"On {card}: this batch does not fit; {smaller}."
        else:
            reasons = "; ".join(dict.fromkeys(plan.reason for plan, _ in pairs if plan.reason))
            yield f"On {card}: none of these precisions ({reasons or 'each trains worse'})."


def _least_gain(plan: CardPlan, quality: Quality) -> float:
    """Return the speed that a plan has at least; 0 where it is measurably no faster to an equal
    loss."""
    assert plan.ratio
    if quality.equal_loss and plan.ratio[2] * quality.equal_loss[2] < 1:
        return 0.0
    return plan.ratio[0]


def _choice(plan: CardPlan, quality: Quality) -> Iterator[str]:
    assert plan.ratio
    yield plan.precision
    if plan.precision != plan.baseline:
        yield f"{plan.ratio[0]:.2f} to {plan.ratio[2]:.2f} × {plan.baseline}"
    peak = sum(plan.peak.values()) / tensor_facts.GIB
    yield f"{peak:.3g} GiB of {plan.memory / tensor_facts.GIB:.0f}"
    if plan.price:
        yield f"{_interval(plan.price)} USD"
    if quality.text or plan.precision != plan.baseline:
        yield f"quality: {quality.text or 'not tried'}"


def plans_table(found: Sequence[tuple[CardPlan, Quality]]) -> Table:
    """Return the table with one row for each plan."""
    with_hours = any(plan.hours for plan, _ in found)
    with_quality = any(quality.text for _, quality in found)
    head = [*HEAD]
    head += ["hours", "price"] if with_hours else []
    head += ["quality", "speed to equal loss"] if with_quality else []
    head += ["why not"] if any(plan.reason for plan, _ in found) else []
    rows = []
    for plan, quality in found:
        row = [plan.precision, plan.place, *_speed_cells(plan), *_memory_cells(plan)]
        if with_hours:
            row += [_interval(plan.hours), _interval(plan.price)]
        if with_quality:
            row += [quality.text, _equal_loss_cell(plan, quality)]
        row += [plan.reason] if "why not" in head else []
        rows.append([*map(Cell, row)])
    return Table(head, rows)


def _speed_cells(plan: CardPlan) -> list[str]:
    if not plan.ratio or not plan.seconds:
        return ["", "", ""]
    speed = f"{plan.ratio[1]:.2f} ({plan.ratio[0]:.2f} to {plan.ratio[2]:.2f})"
    most = f"{plan.most:.2f}" if plan.most else ""
    milliseconds = [1000 * seconds for seconds in plan.seconds]
    is_baseline = plan.precision == plan.baseline
    return ["1.00" if is_baseline else speed, most, _interval(milliseconds)]


def _equal_loss_cell(plan: CardPlan, quality: Quality) -> str:
    if not plan.ratio or quality.equal_loss is None:
        return ""
    if not quality.equal_loss[1]:
        return "not reached"
    low, value, high = (a * b for a, b in zip(plan.ratio, quality.equal_loss, strict=True))
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def _memory_cells(plan: CardPlan) -> list[str]:
    peak = sum(plan.peak.values()) / tensor_facts.GIB
    memory = plan.memory / tensor_facts.GIB
    more = " or more" if plan.largest_batch == MAX_FORECAST_BATCH_SIZE else ""
    return [f"{peak:.3g} of {memory:.3g}", f"{plan.largest_batch or 'none'}{more}"]


def _interval(numbers: Sequence[float] | None) -> str:
    if not numbers:
        return ""
    low, high = (f"{number:.3g}" if number < 100 else f"{number:,.0f}" for number in numbers[::2])
    return low if low == high else f"{low} to {high}"
