"""Present the answer of mode=advise: in the terminal, in the report and in MLflow's note."""

from collections.abc import Iterator

from rich.console import Console

from runner.config.invocation import given_keys, python_call
from runner.sweeps.report.columns import advice_table, advice_terminal_table
from runner.sweeps.report.gate import gate_verdict
from runner.sweeps.report.gate_page import gate_blocks, gate_notes, gate_sentence, looks_table
from runner.sweeps.report.judging_notes import baseline_note, limits_note, trials_note
from runner.sweeps.report.number_text import format_interval
from runner.sweeps.report.ranking import Advice, PrecisionVerdict
from runner.sweeps.report.statistics import ERROR_RATE, Verdict
from runner.sweeps.report.wording import memory_words, speed_words
from runner.utils.markup import (
    Block,
    Commands,
    Heading,
    Items,
    Table,
    Text,
    notebook_frame,
    to_html,
)
from runner.utils.terminal import quote_command

BUSY_SHARE = 0.25
"""Share of the processors used by other programs above which speeds are doubtful."""
# What the recommended precision would have to be, by advise.objective.
GAIN_WORDS = {"time": "faster", "memory": "smaller", "quality": "better"}


def advice_sentence(advice: Advice) -> str:
    """Return which precision to use, and why, in one sentence."""
    if advice.settings.mode == "gate":
        return "Undecided: it was stopped before a trial of the precision had ended."
    pick = advice.recommendation
    baseline = advice.settings.baseline
    if pick is None:
        return (
            f"No advice: {baseline} itself did not train in every trial, and others are judged by "
            "it."
        )
    unclear = _unclear(advice)
    tested = [line for line in advice.verdicts if line.test]
    if unclear and all(line.rating is Verdict.UNCLEAR for line in tested):
        return f"Stay with {baseline} for now: nothing could be judged."
    if pick.group.name == baseline:
        return _stay_sentence(advice)
    return f"Use {pick.name}: {_gain_words(pick)}."


def _stay_sentence(advice: Advice) -> str:
    """Return why to stay with the baseline."""
    objective = advice.settings.objective
    baseline = advice.settings.baseline
    rivals = [line for line in advice.verdicts if line.name != baseline and not line.is_emulated]
    if not rivals:
        return f"Stay with {baseline} on this machine: whatever else was tried is emulated."
    is_timed = any(line.comparison.speed_ratio for line in rivals)
    if objective == "time" and not is_timed:
        return (
            f"Stay with {baseline} for now: too few trials were long enough to measure a speed. "
            "Train for longer (train.epochs, advise.steps, advise.budget), or type "
            "advise.objective=memory."
        )
    aim = GAIN_WORDS[objective]
    return f"Stay with {baseline}: nothing that trains as well was measured to be {aim}."


def _gain_words(verdict: PrecisionVerdict) -> str:
    """Return speed, memory and loss of the recommended precision, compared with the baseline."""
    comparison = verdict.comparison
    has_speed = comparison.speed_verdict in ("faster", "slower")
    gains = [speed_words(comparison) if has_speed else "", memory_words(comparison)]
    gain = " and ".join(filter(None, gains)) or "no costlier"
    return f"{gain}, and its {verdict.noun} is {_loss_words(verdict)}"


def _loss_words(verdict: PrecisionVerdict) -> str:
    test = verdict.test
    if test is None:
        return "the baseline"
    if test.verdict is Verdict.BETTER:
        which = "lower" if verdict.sign > 0 else "higher"
        return f"{which} by {format_interval(-test.value, test.ci_half_width)}"
    return f"indistinguishable from {verdict.baseline}'s"


def other_sentences(advice: Advice) -> str:
    """Return the reservations about the answer: missing evidence, emulation, a busy machine."""
    sentences = []
    unclear = _unclear(advice)
    if unclear:
        sentences.append(_unclear_sentence(advice, unclear))
    emulated = [line for line in advice.verdicts if line.is_emulated and line.is_acceptable]
    if emulated:
        names = ", ".join(line.name for line in emulated)
        sentences.append(
            f"Emulated, {names} trained as well; the hardware itself is needed to measure the "
            "speed."
        )
    if advice.settings.busy > BUSY_SHARE:
        sentences.append(
            f"Other programs kept {advice.settings.busy:.0%} of the processors busy when this "
            "began; speeds may differ on a quiet machine."
        )
    return " ".join(sentences)


def _unclear(advice: Advice) -> list[PrecisionVerdict]:
    return [line for line in advice.verdicts if line.rating is Verdict.UNCLEAR]


def _unclear_sentence(advice: Advice, unclear: list[PrecisionVerdict]) -> str:
    names = ", ".join(line.name for line in unclear)
    if any(line.group.counts.get("stopped") for line in advice.verdicts):
        return f"It was stopped before it could judge {names}."
    # Fewer trials than seeds asked for: the budget was the limit, not advise.seeds.
    fewest = min(len(line.group.jobs) for line in unclear)
    more = "a larger advise.budget" if fewest < advice.settings.seeds else "more advise.seeds"
    return f"Not enough evidence in this budget about {names}; {more} may decide."


def advice_blocks(advice: Advice) -> Iterator[Block]:
    """Yield the report's parts: answer, next command, table, alternatives, method."""
    gate = gate_verdict(advice)
    if gate is not None:
        yield from gate_blocks(gate)
        if gate.looks:
            yield looks_table(gate)
        yield Heading("How this was judged")
        yield Items([trials_note(advice), *gate_notes(gate), limits_note(advice)], small=True)
        return
    yield from _answer(advice)
    command = next_command(advice)
    if command:
        yield Text("Next:")
        yield Commands([command])
    yield advice_table(advice)
    yield from _alternatives(advice)
    yield from _unavailable(advice)
    yield Heading("How this was judged")
    yield Items(list(_method_notes(advice)), small=True)


def advice_markdown(advice: Advice) -> tuple[list[Block], Table]:
    """Return the answer with its command, and the table, for the note of the parent run."""
    gate = gate_verdict(advice)
    if gate is not None:
        return [*gate_blocks(gate)], looks_table(gate)
    command = next_command(advice)
    commands = [Commands([command])] if command else []
    return [*_answer(advice), *commands], advice_table(advice)


def _answer(advice: Advice) -> Iterator[Text]:
    yield Text(advice_sentence(advice), "answer")
    reservations = other_sentences(advice)
    if reservations:
        yield Text(reservations)


def _alternatives(advice: Advice) -> Iterator[Block]:
    """Yield the commands of the other precisions that train as well."""
    native = []
    emulated = []
    for line in advice.verdicts:
        if line is advice.recommendation or not line.is_acceptable:
            continue
        if line.is_emulated:
            # On its own hardware the precision runs without emulation.
            words = [word for word in line.command if word != "precision.emulate=true"]
            emulated.append(quote_command(words))
        else:
            native.append(quote_command(line.command))
    if native:
        yield Heading("What else trains as well")
        yield Commands(native)
    if emulated:
        yield Heading("What trains as well by its numbers, where its hardware is")
        yield Commands(emulated)


def _unavailable(advice: Advice) -> Iterator[Block]:
    """Yield the precisions that this machine lacks, with the reasons."""
    if not advice.settings.unavailable:
        return
    yield Heading("Not on this machine")
    yield Items(list(advice.settings.unavailable.items()))
    if not advice.settings.emulated:
        yield Text(
            "precision.emulate=true tries the numbers of those that can be emulated, "
            "without their speed."
        )


def _method_notes(advice: Advice) -> Iterator[tuple[str, str]]:
    """Yield (term, explanation) of what the table says."""
    yield trials_note(advice)
    if len(advice.baseline_losses) > 1:
        yield baseline_note(advice)
    yield (
        "Worse",
        "the mean difference is beyond the tolerance, and above 0 by a one-sided paired t test "
        f"(Student 1908), at {ERROR_RATE:.0%} for all precisions together (Bonferroni): the chance "
        "that any that is as good as the baseline is called worse. ± is half the interval. A "
        "remedy is judged without the seed that chose it.",
    )
    yield (
        "Indistinguishable",
        f"the same test, at {ERROR_RATE:.0%} for each, finds the difference below the tolerance "
        "(non-inferiority) if the tolerance is exact; in standard deviations it is measured by as "
        "many seeds, see docs/advise.md. Neither: not enough evidence.",
    )
    if any(line.forecast for line in advice.verdicts):
        yield (
            "Predicted peak",
            "of a step at train.batch_size, weights to temporaries, without libraries and data; "
            "the largest batch is a power of two that fits this machine (mode=plan).",
        )
    yield limits_note(advice)


def next_command(advice: Advice) -> str:
    """Return the command line, or the call of the Python API, to run next; empty without a
    recommended precision."""
    if advice.recommendation is None:
        return ""
    words = advice.recommendation.command
    given = given_keys()
    if not given:
        return quote_command(words)
    return python_call("run", [word for word in words if "=" in word], given)


def advice_html(advice: Advice) -> str:
    """Return the answer as a notebook shows it."""
    return notebook_frame(to_html("mode=advise", [*advice_blocks(advice)]))


def print_advice(console: Console, advice: Advice) -> None:
    """Print the table, the answer and the command to run next."""
    gate = gate_verdict(advice)
    if gate is not None:
        console.print(gate_sentence(gate), soft_wrap=True)
        return
    console.print(advice_terminal_table(advice))
    sentences = filter(None, [advice_sentence(advice), other_sentences(advice)])
    console.print(" ".join(sentences), soft_wrap=True)
    command = next_command(advice)
    if command:
        console.print(f"Next: {command}", soft_wrap=True)
