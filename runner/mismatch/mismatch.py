"""mode=mismatch: measure the mismatch between what trains and what serves, explain and judge it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import Any

from runner.core import (
    Batch,
    ConfigError,
    LoadedCheckpoint,
    RunContext,
    RunnerError,
    RunSpec,
    fmt,
    run_context,
    terminal,
)
from runner.diagnostics.numerics.numerics_page import page_head
from runner.mismatch import findings
from runner.mismatch.record import Mismatch
from runner.mismatch.room import MismatchSpec
from runner.mismatch.sides import (
    Side,
    build_sides,
    check_task,
    compare_generation,
    compare_scores,
    first_rows,
    measure_floor,
    text_of,
)
from runner.modes.diff import DiffReference, resolve_reference, split_overrides
from runner.modes.execution import build_result
from runner.modes.startup import prepare_loaders, try_batch
from runner.output.markup import Block, Cell, Commands, Heading, Items, Table, Text, to_html

PAGE = "mismatch.html"
NUMBERS = "mismatch.json"
CAUSE_ROWS = 4
"""Examples by which the cause is looked for: all their activations are held."""
MIN_BIAS = 1e-6
"""Nats; rounding makes less."""
MAX_ROWS = 20
"""Kinds of modules on the page."""


@dataclass(frozen=True)
class Tried:
    """A cure that was tried.

    Attributes:
        what: in words.
        words: overrides to type in place of the command's own.
        left: the record of both sides with it; None where it cannot be tried.
        reason: why not.
    """

    what: str
    words: Sequence[str]
    left: Mismatch | None
    reason: str = ""


@dataclass
class Report:
    """What was found, as mismatch.json has it.

    Attributes:
        training, serving: names of the sides.
        allowed: mismatch.max_ratio and mismatch.max_kl.
        scored: the record of the validation batches.
        generated: of generated tokens; None without a generation.
        truncation: mean of -log(kept mass) of the generation, in nats.
        floor: by side and what was changed, the record of a side against itself.
        wrong_module: that adds more than rounding explains; empty where none does.
        contributions: rms that the own errors of a kind of modules make, the largest first.
        flips: by layer of experts, the share of tokens that go to other experts.
        cures: what was tried, the cheapest first.
        notes: what could not be measured, and why.
    """

    training: str
    serving: str
    allowed: tuple[float, float]
    scored: Mismatch
    generated: Mismatch | None = None
    truncation: float = 0.0
    floor: dict[str, Mismatch] = field(default_factory=dict)
    wrong_module: str = ""
    contributions: Mapping[str, float] = field(default_factory=dict)
    flips: Mapping[str, float] = field(default_factory=dict)
    cures: list[Tried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def judged(self) -> list[Mismatch]:
        """Return the records that must be within what is allowed."""
        return [one for one in (self.scored, self.generated) if one]

    def accepts(self, *records: Mismatch) -> bool:
        """Return whether records are within what is allowed; NaN is not."""
        max_ratio, max_kl = self.allowed
        return all(one.mean_ratio <= max_ratio and one.kl <= max_kl for one in records)

    @property
    def is_accepted(self) -> bool:
        """Return whether what serves is what trains."""
        return self.accepts(*self.judged)

    @property
    def floor_rms(self) -> float:
        """Return the largest rms of a side against itself, in nats."""
        return max((one.rms for one in self.floor.values()), default=0.0)

    @property
    def cure(self) -> Tried | None:
        """Return the cheapest cure that is enough."""
        return next(
            (tried for tried in self.cures if tried.left and self.accepts(tried.left)), None
        )

    @property
    def sentence(self) -> str:
        """Return the answer, in at most fifteen words."""
        worst = max(self.judged, key=lambda one: one.mean_ratio)
        numbers = f"mean ratio {worst.mean_ratio:.4g}, KL {worst.kl:.1e}"
        if not self.is_accepted:
            return f"{self.serving} does not serve what {self.training} trains: {numbers}."
        if self.scored.rms <= self.floor_rms or not self.scored.rms:
            return f"{self.serving} serves what {self.training} trains: no more than its floor."
        return f"{self.serving} serves what {self.training} trains: {numbers}."

    def details(self) -> Iterator[str]:
        """Yield the sentences below the answer."""
        max_ratio, max_kl = self.allowed
        yield f"Allowed: a mean ratio of {max_ratio:g} and a KL of {max_kl:g} nats per token."
        if not self.scored.rms and self.training != self.serving:
            yield "Equal in every bit: of fresh weights a head may be 0. Type checkpoint=<a run>."
        if self.wrong_module:
            yield f"{self.wrong_module} adds more than rounding explains: look there first."
        elif self.contributions:
            modules, rms = next(iter(self.contributions.items()))
            yield (
                f"Rounding alone. {modules} adds most of it: {rms:.2g} nats (rms) by its own "
                f"errors, {self.scored.rms:.2g} by all."
            )
        if any(self.flips.values()):
            layer, share = max(self.flips.items(), key=lambda one: one[1])
            yield f"{fmt.format_share(share)} of tokens go to other experts in {layer}."
        if self.cure and self.cure.left:
            left = f"{self.cure.left.mean_ratio:.5g}"
            yield f"Cheapest cure: {self.cure.what}, leaves a mean ratio of {left}."
        if self.truncation > MIN_BIAS:
            yield (
                f"After truncation a server's log-probabilities are {self.truncation:.3g} nats "
                "larger than these: -log of the kept mass."
            )
        yield from self.notes


def compare_sides(run: RunContext, saved: LoadedCheckpoint | None) -> run_context.RunOutcome:
    """Compare the side that trains with the one that serves, and write and record it.

    Raises:
        ConfigError: serving= names no side, or the sides cannot be compared.
    """
    start = perf_counter()
    check_task(run)
    settings = run.spec.section(MismatchSpec)
    served = _serving_reference(run.spec)
    specs = (run.spec, served.spec)
    own = served.own.split()
    if served.spec.precision["name"] != run.spec.precision["name"]:
        own = [word for word in own if not word.startswith("precision.")]
    names = (_name(run.spec, own), _name(served.spec, split_overrides(served.label)))
    with run.signals.interruptible():
        loaders = prepare_loaders(run, saved)
        batches = [*islice(loaders.val.epoch(0), settings.batches)]
        sides = build_sides(run, specs, names, saved, batches[0])
        with sides[0].computing():
            try_batch(run, sides[0].state, loaders.val)
        run.say(f"mismatch: {names[0]} trains, {names[1]} serves")
        report = Report(
            *names, (settings.max_ratio, settings.max_kl), compare_scores(*sides, batches)
        )
        _measure(report, settings, sides, batches[0])
        conversion = sides[0].report
        cures = findings.cures(*sides, first_rows(batches[0], CAUSE_ROWS))
        tried = [*cures] if settings.cures and not report.is_accepted else []
        del sides, cures  # else the models of a cure would be held beside these
        report.cures += [_try(run, cure, saved, batches) for cure in tried]
    return _record(run, report, conversion, perf_counter() - start)


def _serving_reference(spec: RunSpec) -> DiffReference:
    """Return the side that serves.

    Raises:
        ConfigError: serving= names no precision and no values of keys.
    """
    found = resolve_reference(spec, "serving")
    if found.dump or found.spec.init != spec.init:
        raise ConfigError(
            f"serving={spec.value('serving')} names other weights, and both sides have the same. "
            "Type serving=<a precision>, and checkpoint=<it> or init.weights=<it>."
        )
    return found


def _name(spec: RunSpec, words: Sequence[str]) -> str:
    """Return the name of a side: its precision, and the words that set other keys."""
    keys = [word for word in words if "=" in word and not word.startswith("precision=")]
    return " ".join([str(spec.precision["name"]), *keys])


def _measure(
    report: Report, settings: MismatchSpec, sides: tuple[Side, Side], batch: Batch
) -> None:
    """Add the floor, a generation and the cause to a report."""
    training, serving = sides
    for role, side in (("training", training), ("serving", serving)):
        found = measure_floor(side, batch, settings.floor)
        report.floor |= {f"{role}: other {kind}": record for kind, record in found.items()}
    text = text_of(training.state.task, batch)
    rows = first_rows(batch, CAUSE_ROWS)
    if settings.new_tokens and text is None:
        report.notes.append("Nothing was generated: no unpadded text to continue.")
    elif settings.new_tokens and text is not None:
        generated, cached, drawn = compare_generation(training, serving, text, settings)
        report.generated = generated
        report.truncation = -drawn.kept.log().mean().item()
        if serving.cache_name and "cache" in settings.floor:
            if findings.cache_is_wrong(serving, rows, cached):
                report.wrong_module = "the cache of keys and values"
            else:
                report.floor["serving: with a cache"] = cached
        elif not serving.cache_name:
            report.notes.append("No cache: the model's forward takes none.")
    if settings.cause and report.scored.rms:
        comparison = findings.compare_modules(training, serving, rows)
        report.flips = comparison.flips
        found = findings.contributions(training, serving, rows)
        report.contributions = found
        report.wrong_module = report.wrong_module or findings.wrong_module(comparison, found)


def _try(
    run: RunContext, cure: findings.Cure, saved: LoadedCheckpoint | None, batches: Sequence[Batch]
) -> Tried:
    try:
        sides = build_sides(run, cure.specs, ("", ""), saved, batches[0])
        return Tried(cure.what, cure.words, compare_scores(*sides, batches))
    except RunnerError as error:
        return Tried(cure.what, cure.words, None, str(error))


def _record(
    run: RunContext, report: Report, conversion: Any, seconds: float
) -> run_context.RunOutcome:
    """Print, write and record a report."""
    run.say(report.sentence)
    for detail in report.details():
        run.say(detail)
    if report.cure:
        run.say(f"Type {terminal.quote_command(report.cure.words)}")
    numbers = report.scored.metrics()
    numbers |= report.generated.metrics("mismatch/generated") if report.generated else {}
    numbers |= {f"mismatch/flips/{layer}": share for layer, share in report.flips.items()}
    metrics = {
        "mismatch/mean_ratio": report.scored.mean_ratio,
        "mismatch/kl": report.scored.kl,
        "mismatch/rms": report.scored.rms,
        "mismatch/floor_rms": report.floor_rms,
        "mismatch/truncation_bias": report.truncation,
        "mismatch/accepted": float(report.is_accepted),
    }
    run.tracker.log_metrics([(0, fmt.now_ms(), numbers | metrics)])
    run.tracker.tags({"mismatch": report.sentence, "serving": report.serving})
    head = page_head(run, run.device_name, run.spec.tracking.get("note") or "")
    page = to_html(f"{report.training} and {report.serving}", [*head, *page_blocks(report)])
    if run.save_artifact(run.out / PAGE, lambda path: path.write_text(page)):
        run.say(f"mismatch: see {fmt.relative_path(run.out / PAGE)}")
    answer = {"sentence": report.sentence, "accepted": report.is_accepted}
    run.save_json(NUMBERS, answer | asdict(report))
    summary = {"metrics": metrics, "steps": 0, "peak_memory_mib": run.accelerator.peak_memory_mib()}
    result = build_result(run, summary, seconds)
    # A sweep over sides that serve compares them by it.
    result = replace(result, quality="mismatch/mean_ratio", direction="min")
    return run_context.RunOutcome(result, conversion)


def page_blocks(report: Report) -> Iterator[Block]:
    """Yield the blocks of the page."""
    yield Text(report.sentence, "answer")
    yield Text(" ".join(report.details()))
    if report.cure:
        yield Commands([terminal.quote_command(report.cure.words)])
    columns = {"on the data": report.scored}
    if report.generated:
        columns["generated"] = report.generated
    yield Heading("How far apart")
    yield _records_table("", columns)
    if report.floor:
        yield Heading("The floor: each side against itself")
        yield _records_table("", report.floor)
    for title, head, numbers in (
        ("Where it comes from", ["modules", "rms of their own errors, nats"], report.contributions),
        ("Tokens that go to other experts", ["layer", "share"], report.flips),
    ):
        largest = max(numbers.values(), default=0.0)
        ordered = sorted(numbers.items(), key=lambda one: -one[1])[:MAX_ROWS]
        if largest:
            rows = [[Cell(name), Cell(f"{one:.2g}", bar=one / largest)] for name, one in ordered]
            yield Heading(title)
            yield Table(head, rows)
    if report.cures:
        yield Heading("What was tried, the cheapest first")
        yield _records_table("cure", {one.what: one.left for one in report.cures if one.left})
        yield Items([(one.what, one.reason) for one in report.cures if one.reason])


def _records_table(title: str, records: Mapping[str, Mismatch]) -> Table:
    head = [title, "tokens", "mean ratio", "KL, nats", "rms, nats", "99.9 %", "outside 0.9 to 1.1"]
    head += ["outside 0.8 to 1.25", "worst", "flipped"]
    rows = []
    for name, one in records.items():
        row = [
            *(name, f"{one.tokens:,}", f"{one.mean_ratio:.5g}", f"{one.kl:.2g}"),
            *(f"{one.rms:.2g}", f"{one.quantiles['0.999']:.2g}"),
            *(fmt.format_share(one.outside_narrow), fmt.format_share(one.outside_wide)),
            f"{one.worst:+.2g}",
            "" if one.flipped is None else fmt.format_share(one.flipped),
        ]
        rows.append([*map(Cell, row)])
    return Table(head, rows)
