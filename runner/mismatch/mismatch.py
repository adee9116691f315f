"""mode=mismatch: measure the mismatch between what trains and what serves, explain and judge it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from time import perf_counter

from torch import Tensor

from runner.core import (
    Batch,
    ConfigError,
    ConversionReport,
    LoadedCheckpoint,
    RunContext,
    RunnerError,
    RunSpec,
    errors,
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
    measure_floor,
    prompts_of,
    rows_of,
)
from runner.modes.diff import resolve_reference
from runner.modes.execution import build_result
from runner.modes.startup import prepare_loaders, try_batch
from runner.output.markup import Block, Cell, Commands, Heading, Items, Table, Text, to_html

PAGE = "mismatch.html"
NUMBERS = "mismatch.json"
CAUSE_ROWS = slice(4)
"""Examples by which the cause is looked for: all their activations are held."""
MAX_ROWS = 20
"""Kinds of modules on the page."""


@dataclass
class Report:
    """What was found, as mismatch.json has it.

    Attributes:
        training, serving: the overrides that each side has of its own.
        settings: what was measured, and what is allowed.
        data: the record of the validation batches.
        generation: of generated tokens; None without a generation.
        truncation: mean of -log(kept mass) of the generation, in nats.
        floor: by side and what was changed, the record of a side against itself.
        cause: the module that makes the difference; empty where rounding explains all of it.
        contributions: rms that the own errors of a kind of modules make, the largest first.
        flips: by layer of experts, the share of tokens that go to other experts.
        cures: what was tried, the cheapest first.
        notes: what could not be measured, and why.
    """

    training: str
    serving: str
    settings: MismatchSpec
    data: Mismatch
    generation: Mismatch | None = None
    truncation: float = 0.0
    floor: dict[str, Mismatch] = field(default_factory=dict)
    cause: str = ""
    contributions: Mapping[str, float] = field(default_factory=dict)
    flips: Mapping[str, float] = field(default_factory=dict)
    cures: list[findings.Cure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> Mismatch:
        """Return the record that is judged: of the data or of the generation."""
        return max(filter(None, (self.generation, self.data)), key=self.excess)

    def excess(self, record: Mismatch) -> float:
        """Return how far a record is over what is allowed; infinite for NaN."""
        settings = self.settings
        excess = max(record.mean_ratio - settings.max_ratio, record.kl - settings.max_kl)
        return excess if record.mean_ratio + record.kl < math.inf else math.inf

    def accepts(self, record: Mismatch | None) -> bool:
        """Return whether a record is within what is allowed."""
        return record is not None and self.excess(record) <= 0

    @property
    def is_accepted(self) -> bool:
        """Return whether what serves is what trains."""
        return self.accepts(self.worst)

    @property
    def floor_rms(self) -> float:
        """Return the largest rms of a side against itself, in nats."""
        return max((one.rms for one in self.floor.values()), default=0.0)

    @property
    def cure(self) -> findings.Cure | None:
        """Return the cheapest cure that is enough."""
        return next((cure for cure in self.cures if self.accepts(cure.remainder)), None)

    @property
    def sentence(self) -> str:
        """Return the answer, in at most fifteen words."""
        training, serving = self.training.split()[0], self.serving.split()[0]
        numbers = f"mean ratio {self.worst.mean_ratio:.4g}, KL {self.worst.kl:.1e}"
        verb = "serves" if self.is_accepted else "does not serve"
        floor = ", within their floor" if self.worst.rms <= self.floor_rms else ""
        return f"{serving} {verb} what {training} trains{floor}: {numbers}."

    def details(self) -> Iterator[str]:
        """Yield the sentences below the answer."""
        max_ratio, max_kl = self.settings.max_ratio, self.settings.max_kl
        allowed = f"a mean ratio of {max_ratio:g} and a KL of {max_kl:g} nats per token"
        yield f"{self.training} trains, {self.serving} serves. Allowed: {allowed}."
        if not self.data.rms and self.training != self.serving:
            yield "Equal in every bit: a fresh head may be 0, which one of checkpoint=<run> is not."
        if self.cause:
            yield f"{self.cause} makes the difference, which rounding does not explain."
        elif self.contributions:
            modules, rms = next(iter(self.contributions.items()))
            yield (
                f"Rounding alone. {modules} adds most of it: {rms:.2g} nats (rms) by its own "
                f"errors, {self.data.rms:.2g} by all."
            )
        if any(self.flips.values()):
            layer, share = max(self.flips.items(), key=lambda one: one[1])
            yield f"{fmt.format_share(share)} of tokens go to other experts in {layer}."
        if self.truncation:
            yield (
                f"After truncation a server's log-probabilities are {self.truncation:.3g} nats "
                "larger than these: -log of the kept mass."
            )
        yield from self.notes
        if self.cure and self.cure.remainder:
            ratio = f"{self.cure.remainder.mean_ratio:.5g}"
            yield f"Cheapest cure: {self.cure.what}, leaves a mean ratio of {ratio}. Type"


def compare_sides(run: RunContext, saved: LoadedCheckpoint | None) -> run_context.RunOutcome:
    """Compare the side that trains with the one that serves, and write and record it.

    Raises:
        ConfigError: serving= names no side, or the sides cannot be compared.
    """
    start = perf_counter()
    check_task(run)
    if run.spec.train.compile:
        run.say("mode=mismatch computes uncompiled; mismatch.floor=[compile] measures the rest")
        run = replace(run, spec=replace(run.spec, train=replace(run.spec.train, compile=False)))
    settings = run.spec.section(MismatchSpec)
    specs = (run.spec, _serving_spec(run.spec))
    with run.signals.interruptible():
        loaders = prepare_loaders(run, saved)
        batches = [*islice(loaders.val.epoch(0), settings.batches)]
        sides = build_sides(run, specs, saved, batches[0])
        with sides[0].computing():
            try_batch(run, sides[0].state, loaders.val)
        names = (_name(*specs), _name(*specs[::-1]))
        report = Report(names[0], names[1], settings, compare_scores(*sides, batches))
        prompts = prompts_of(sides[0], batches[0]) if settings.new_tokens else None
        if settings.new_tokens and prompts is None:
            report.notes.append("Nothing was generated: no unpadded text to continue.")
        _measure(report, sides, batches[0], prompts)
        conversion = sides[0].report
        cures = findings.cures(*sides, rows_of(batches[0], CAUSE_ROWS))
        tried = [*cures] if settings.cures and not report.is_accepted else []
        del sides, cures  # else the models of a cure would be held beside these
        for cure in tried:
            try:
                # No name holds the sides, which the next cure's would be beside.
                remainder = _remaining(
                    report, build_sides(run, cure.specs, saved, batches[0]), batches, prompts
                )
                report.cures.append(replace(cure, remainder=remainder))
            except (RunnerError, RuntimeError) as error:
                report.cures.append(replace(cure, reason=errors.first_line(error)))
    return _record(run, report, conversion, perf_counter() - start)


def _remaining(
    report: Report, sides: tuple[Side, Side], batches: Sequence[Batch], prompts: Tensor | None
) -> Mismatch:
    """Return the record of two sides that is judged, of the data or of what they generate."""
    left = [compare_scores(*sides, batches)]
    if prompts is not None:
        left.append(compare_generation(*sides, prompts, report.settings)[0])
    return max(left, key=report.excess)


def _name(spec: RunSpec, other: RunSpec) -> str:
    """Return the name of a side: its precision and the keys that it has of its own."""
    return " ".join(findings.words_of(spec, other)).removeprefix("precision=")


def _serving_spec(spec: RunSpec) -> RunSpec:
    """Return the spec of the side that serves.

    Raises:
        ConfigError: serving= names no precision and no keys of it or of the model.
    """
    found = resolve_reference(spec, "serving")
    shared = ("accelerator", "adapter", "init", "seed", "train")
    if found.dump or any(getattr(found.spec, key) != getattr(spec, key) for key in shared):
        raise ConfigError(
            f"serving={spec.value('serving')}: both sides have the same weights, device and "
            "settings. Type serving=<a precision>, or values of keys of precision.* and model.*; "
            "checkpoint= and init.weights= name the weights."
        )
    return found.spec


def _measure(
    report: Report, sides: tuple[Side, Side], batch: Batch, prompts: Tensor | None
) -> None:
    """Add the floor, a generation and the cause to a report.

    Args:
        report: with the record of the data.
        sides: that trains, and that serves.
        batch: the first one.
        prompts: of it, int64 [B, P].
    """
    training, serving = sides
    settings = report.settings
    for role, side in zip(("training", "serving"), sides, strict=True):
        found = measure_floor(side, batch, settings.floor)
        report.floor |= {f"{role}: other {kind}": record for kind, record in found.items()}
    if prompts is not None:
        report.generation, text = compare_generation(*sides, prompts, settings)
        report.truncation = -text.kept_mass.log().mean().item() + 0.0
        if not serving.cache_name:
            report.notes.append("No cache: the model's forward takes none.")
        elif "cache" in settings.floor:
            own = serving.score_text(text, settings.temperature)
            if findings.cache_is_wrong(serving, text, settings.temperature):
                report.cause = "the cache of keys and values"
            else:
                report.floor["serving: with a cache"] = text.record(own)
    if settings.cause and report.data.rms:
        rows = rows_of(batch, CAUSE_ROWS)
        comparison = findings.compare_modules(training, serving, rows)
        report.flips = comparison.flips
        report.contributions = findings.contributions(training, serving, rows)
        report.cause = report.cause or findings.wrong_module(comparison)
        if training.spec.precision == serving.spec.precision:
            # Both round alike, and whatever differs is computed otherwise.
            report.cause = report.cause or next(iter(report.contributions), "")


def _record(
    run: RunContext, report: Report, conversion: ConversionReport, seconds: float
) -> run_context.RunOutcome:
    """Print, write and record a report."""
    for line in (report.sentence, *report.details()):
        run.say(line)
    if report.cure:
        run.say(f"    {terminal.quote_command(report.cure.words)}")
    metrics = report.data.metrics()
    metrics |= report.generation.metrics("mismatch/generation") if report.generation else {}
    metrics |= {f"mismatch/flips/{layer}": share for layer, share in report.flips.items()}
    summary = {
        "mismatch/mean_ratio": report.data.mean_ratio,
        "mismatch/kl": report.data.kl,
        "mismatch/rms": report.data.rms,
        "mismatch/floor_rms": report.floor_rms,
        "mismatch/truncation_bias": report.truncation,
        "mismatch/accepted": float(report.is_accepted),
    }
    run.tracker.log_metrics([(0, fmt.now_ms(), metrics | summary)])
    run.tracker.tags({"mismatch": report.sentence, "serving": report.serving})
    head = page_head(run, run.device_name, run.spec.tracking.get("note") or "")
    page = to_html(f"{report.training} and {report.serving}", [*head, *page_blocks(report)])
    if run.save_artifact(run.out / PAGE, lambda path: path.write_text(page)):
        run.say(f"mismatch: see {fmt.relative_path(run.out / PAGE)}")
    answer = {"sentence": report.sentence, "accepted": report.is_accepted}
    cures = [{k: v for k, v in asdict(cure).items() if k != "specs"} for cure in report.cures]
    run.save_json(NUMBERS, answer | {**asdict(report), "cures": cures})
    result = build_result(
        run,
        {"metrics": summary, "steps": 0, "peak_memory_mib": run.accelerator.peak_memory_mib()},
        seconds,
    )
    # A sweep over sides that serve compares them by it.
    result = replace(result, quality="mismatch/mean_ratio", direction="min")
    return run_context.RunOutcome(result, conversion)


def page_blocks(report: Report) -> Iterator[Block]:
    """Yield the blocks of the page."""
    yield Text(report.sentence, "answer")
    yield Text(" ".join(report.details()))
    if report.cure:
        yield Commands([terminal.quote_command(report.cure.words)])
    columns = {"on the data": report.data}
    if report.generation:
        columns["generated"] = report.generation
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
        yield _records_table(
            "cure", {one.what: one.remainder for one in report.cures if one.remainder}
        )
        yield Items([(one.what, one.reason) for one in report.cures if one.reason])


def _records_table(title: str, records: Mapping[str, Mismatch]) -> Table:
    head = [title, "tokens", "mean ratio", "KL, nats", "rms, nats", "99.9 %", "outside 0.9 to 1.1"]
    head += ["outside 0.8 to 1.25", "worst", "argmax flips"]
    rows = []
    for name, one in records.items():
        row = [
            *(name, f"{one.tokens:,}", f"{one.mean_ratio:.5g}", f"{one.kl:.2g}"),
            *(f"{one.rms:.2g}", f"{one.quantiles['0.999']:.2g}"),
            *(fmt.format_share(one.outside_narrow), fmt.format_share(one.outside_wide)),
            f"{one.worst:+.2g}",
            "" if one.argmax_flips is None else fmt.format_share(one.argmax_flips),
        ]
        rows.append([*map(Cell, row)])
    return Table(head, rows)
