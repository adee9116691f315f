"""Answer for mode=advise and mode=gate, and lay out what their page has under the answer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from runner.core import fmt, terminal
from runner.output.markup import Block, Cell, Commands, Heading, Items, Table, Text, Tone
from runner.sweeps.other_programs import busy_sentence
from runner.sweeps.report.columns import advice_table
from runner.sweeps.report.wording import (
    VERDICT_LOOKS,
    capitalised_sentence,
    cast_note,
    equal_loss_words,
    memory_words,
    reason_sentence,
    speed_words,
    unasked_sentences,
)
from runner.sweeps.sweep_resume import RUNNER_COMMAND, Command
from runner.sweeps.verdict.answer import Answer
from runner.sweeps.verdict.compare import Comparison
from runner.sweeps.verdict.gate import GateVerdict
from runner.sweeps.verdict.ranking import Advice, PrecisionVerdict, jobs_of
from runner.sweeps.verdict.statistics import ERROR_RATE, MIN_SEEDS, Verdict, format_interval

# What the recommended precision would have to be, by advise.objective.
GAIN_WORDS = {"time": "faster", "memory": "smaller", "quality": "better"}
_GATE_TONES: dict[str, Tone] = {"accepted": "good", "rejected": "bad", "undecided": "quiet"}
WORSE_NOTE = (
    "the mean difference is beyond the tolerance, and above 0 by a one-sided paired t test "
    f"(Student 1908), at {ERROR_RATE:.0%} for all precisions together (Bonferroni): the chance "
    "that any that is as good as the baseline is called worse. ± is half the interval. A remedy "
    "is judged without the seed that chose it."
)
INDISTINGUISHABLE_NOTE = (
    f"the same test, at {ERROR_RATE:.0%} for each, finds the difference below the tolerance "
    "(non-inferiority). A tolerance in standard deviations is measured by as few seeds, and its "
    "lower 95 % bound counts. Neither: not enough evidence."
)
EQUAL_LOSS_NOTE = (
    "time of the baseline until the higher of both final losses, over the time of the precision, "
    "by their smoothed curves (docs/sweeps.md). Not reached: its final loss is measurably higher, "
    "by more than is tolerated, or it is worse or diverged."
)
PEAK_NOTE = (
    "of a step at train.batch_size, weights to temporaries, without libraries and data; the "
    "largest batch is a power of two that fits this machine (mode=plan)."
)


def advice_answer(advice: Advice, gate: GateVerdict | None) -> Answer:
    """Return the answer of mode=advise or mode=gate."""
    if gate:
        return _gate_answer(gate)
    if advice.request.mode == "gate":
        return Answer("Undecided: it was stopped before a trial of the precision had ended.")
    pick = advice.recommendation
    baseline = advice.request.baseline
    caveats = _caveats(advice)
    if not pick:
        text = f"No advice: {baseline}, which others are judged by, did not train in every trial."
        return Answer(text, caveats)
    details: list[str] = []
    ratings = {verdict.rating for verdict in advice.verdicts if verdict.test}
    if _unclear(advice) and ratings <= {Verdict.UNCLEAR}:
        text = f"Stay with {baseline} for now: nothing could be judged."
    elif pick.group.name == baseline:
        text, *details = _stay_sentences(advice)
    else:
        text = _use_sentence(advice, pick)
        details = [f"{pick.name}: {reason_sentence(pick)}."]
        details += _cost_sentences(pick.name, pick.comparison)
    command = Command("run", pick.command[len(RUNNER_COMMAND) :])
    return Answer(text, [*details, *caveats], pick=pick.comparison, command=command)


def _cost_sentences(name: str, comparison: Comparison) -> Iterator[str]:
    """Yield speed and memory of a precision where they differ from the baseline's."""
    time_part = equal_loss_words(comparison)
    if time_part or comparison.speed_verdict in ("faster", "slower"):
        yield f"{name} is {speed_words(comparison)}{time_part}."
    memory = memory_words(comparison, f"{name} takes ")
    if memory:
        yield f"{memory}."


def _use_sentence(advice: Advice, pick: PrecisionVerdict) -> str:
    """Return the gain and the loss of the recommended precision."""
    comparison = pick.comparison
    gain = "no costlier"
    if comparison.memory_ratio and comparison.memory_ratio < 1:
        gain = memory_words(comparison) or gain
    if comparison.speed_verdict == "faster" and advice.request.objective != "memory":
        gain = speed_words(comparison)
    test = pick.test
    loss = f"{advice.request.noun} {VERDICT_LOOKS[test.verdict].words}" if test else "the baseline"
    return f"Use {pick.name}: {gain}, {loss}."


def _stay_sentences(advice: Advice) -> list[str]:
    """Return that the baseline is the one to stay with, then what to do about it."""
    objective = advice.request.objective
    baseline = advice.request.baseline
    rivals = [v for v in advice.verdicts if v.name != baseline and not v.is_emulated]
    if not rivals:
        return [f"Stay with {baseline} on this machine: whatever else was tried is emulated."]
    is_timed = any(verdict.comparison.speed_ratio for verdict in rivals)
    if objective == "time" and not is_timed:
        return [
            f"Stay with {baseline} for now: no trial was long enough to measure a speed.",
            "Train for longer (train.epochs, advise.steps, advise.budget), or type "
            "advise.objective=memory.",
        ]
    aim = GAIN_WORDS[objective]
    return [f"Stay with {baseline}: nothing that trains as well was measured to be {aim}."]


def _caveats(advice: Advice) -> Sequence[str]:
    """Return the reservations about an advice."""
    unclear = _unclear(advice)
    evidence = ""
    if unclear:
        names = ", ".join(verdict.name for verdict in unclear)
        if any(verdict.group.counts["stopped"] for verdict in advice.verdicts):
            evidence = f"It was stopped before it could judge {names}."
        else:
            # Fewer trials than seeds asked for: the budget was the limit, not advise.seeds.
            fewest = min(len(verdict.group.jobs) for verdict in unclear)
            is_short = fewest < advice.request.seeds
            more = "a larger advise.budget" if is_short else "more advise.seeds"
            evidence = f"Not enough evidence in this budget about {names}; {more} may decide."
    emulated = ", ".join(v.name for v in advice.verdicts if v.is_emulated and v.is_acceptable)
    emulation = (
        f"Emulated, {emulated} trained as well; the hardware itself is needed to measure the speed."
    )
    caveats = [
        evidence,
        emulation if emulated else "",
        *unasked_sentences(jobs_of(advice.verdicts)),
        busy_sentence(advice.request.busy),
    ]
    return [*filter(None, caveats)]


def _unclear(advice: Advice) -> list[PrecisionVerdict]:
    return [verdict for verdict in advice.verdicts if verdict.rating is Verdict.UNCLEAR]


def _gate_answer(gate: GateVerdict) -> Answer:
    """Return the decision of mode=gate, with what the precision costs if that differs from the
    baseline, and what to type where more seeds or time may decide."""
    request = gate.advice.request
    details = [capitalised_sentence(gate.reason)]
    comparison = gate.precision.comparison
    details += _cost_sentences("It", comparison)
    if gate.decision == "undecided" and gate.looks:
        if gate.looks[-1].seeds < request.seeds:
            details.append("The budget ended first: a larger advise.budget may decide.")
        else:
            details.append(f"More seeds may decide: type advise.seeds={2 * request.seeds}.")
    caveats = [*details, *unasked_sentences(gate.precision.group.jobs)]
    answer = Answer(f"{gate.name} is {gate.decision}.", caveats)
    if gate.decision != "accepted":
        return answer
    command = Command("run", gate.precision.command[len(RUNNER_COMMAND) :])
    return replace(answer, pick=comparison, command=command)


def _looks_table(gate: GateVerdict) -> Table:
    """Return the table with one row per look of the sequential test."""
    request = gate.advice.request
    bar = Cell(fmt.format_number(request.sign * gate.bar))
    rows = []
    for look in gate.looks:
        gap = Cell(format_interval(request.sign * look.gap, look.half_width, "+"))
        decision = Cell(look.decision, _GATE_TONES[look.decision])
        rows.append([Cell(str(look.seeds)), gap, bar, decision])
    title = f"{request.noun} minus that of {request.baseline}"
    return Table(["seeds", title, "bar", "decision"], rows, frozenset([3]))


def advice_blocks(advice: Advice, gate: GateVerdict | None) -> Iterator[Block]:
    """Yield what the page has under the answer: the table and alternatives."""
    if gate and gate.looks:
        yield _looks_table(gate)
    if not gate:
        yield advice_table(advice)
        yield from _alternatives(advice)
        if advice.request.unavailable:
            yield Heading("Not on this machine")
            lacking = advice.request.unavailable.items()
            reasons = fmt.grouped((why.removeprefix(f"precision={n} "), n) for n, why in lacking)
            yield Items([(", ".join(names), why) for why, names in reasons.items()])
            if not advice.request.emulated:
                yield Text(
                    "precision.emulate=true tries the numbers of those that can be emulated, "
                    "without their speed."
                )


def _alternatives(advice: Advice) -> Iterator[Block]:
    """Yield the commands of the other precisions that train as well."""
    headings = {
        False: "What else trains as well",
        True: "What trains as well by its numbers, where its hardware is",
    }
    commands = []
    for verdict in advice.verdicts:
        if verdict.is_acceptable and verdict is not advice.recommendation:
            # On its own hardware an emulated precision runs without emulation.
            words = [word for word in verdict.command if word != "precision.emulate=true"]
            commands.append((verdict.is_emulated, terminal.quote_command(words)))
    for is_emulated, lines in fmt.grouped(commands).items():
        yield Heading(headings[is_emulated])
        yield Commands(lines)


def method_notes(advice: Advice, gate: GateVerdict | None) -> Iterator[tuple[str, str]]:
    """Yield (term, explanation) of what the table says, and of how it was judged."""
    request = advice.request
    text = (
        f"{request.steps} optimizer steps each; every precision from the same weights on the same "
        f"batches as {request.baseline}, for each seed. Jobs ran in turn, seed by seed."
    )
    if request.recorded_in:
        text += f" {request.baseline} was trained before, in {request.recorded_in}."
    yield "Trials", text
    if len(advice.baseline_losses) > 1:
        ends_at = request.sign * fmean(advice.baseline_losses.values())
        accepted = f"Tolerated are {request.tolerance:g} of them (advise.tolerance)."
        if request.max_gap is not None:
            accepted = f"Accepted is a difference of {request.max_gap:g} (advise.max_gap)."
        yield (
            "Baseline",
            f"{request.baseline} ends at {request.metric} {fmt.format_number(ends_at)}; its seeds "
            "differ by a standard deviation of "
            f"{fmt.format_number(advice.baseline_spread)}. {accepted}",
        )
    if gate:
        yield (
            "Test",
            f"after each seed from the {MIN_SEEDS}rd to the {request.seeds}th at most, a "
            "confidence interval of the mean difference is looked at: accepted if it lies within "
            "the bar, rejected if it lies beyond. Over all looks the chance of each error is "
            f"{ERROR_RATE:.0%} (a sequential t test, Pocock 1977; docs/gate.md).",
        )
    else:
        yield "Worse", WORSE_NOTE
        yield "Within tolerance", INDISTINGUISHABLE_NOTE
        if any(verdict.forecast for verdict in advice.verdicts):
            yield "Predicted peak", PEAK_NOTE
    if any(verdict.comparison.equal_loss for verdict in advice.verdicts):
        yield "Speed to equal loss", EQUAL_LOSS_NOTE
    casts = cast_note(jobs_of(advice.verdicts))
    if casts:
        yield "Autocast", casts
    steps = f"{request.steps} steps are not a whole training"
    yield "What this is not", f"{steps}: what goes wrong later is not seen."
