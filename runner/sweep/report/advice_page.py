"""The advice in words and as a table, for the terminal, the report and MLflow's page."""

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table as Grid

from runner.config.schema import LARGEST_FORECAST_BATCH
from runner.sweep.report.compare import BASE
from runner.sweep.report.conclusion import format_range, format_ratio
from runner.sweep.report.paired_test import ERROR
from runner.sweep.report.ranking import Advice, PrecisionVerdict
from runner.sweep.report.verdict import gain_words, health_words, outcome_reason, outcome_words
from runner.tracking.metric_names import VAL_LOSS
from runner.utils.formatting import format_number
from runner.utils.markup import Block, Cell, Commands, Heading, Items, Table, Text, Tone
from runner.utils.terminal import quote_command

HEAD = ("precision", "verdict", "speed", "memory", "predicted peak", "health")
NUMBERS = ("speed", "memory", "predicted peak")
TONES: dict[str, Tone] = {
    "recommended": "good",
    "worse": "bad",
    "diverged": "bad",
    "failed": "bad",
    "unclear": "quiet",
    "slow": "quiet",
    "unavailable": "quiet",
}
BUSY = 0.25
"""Share of the processors busy with other work above which speeds are in doubt."""


def advice_sentence(advice: Advice) -> str:
    """Which precision to use, and why, in a sentence."""
    pick = advice.pick
    if pick is None:
        return (
            f"No advice: {BASE} itself did not train in every trial, and others are judged by it."
        )
    unsure = any(line.outcome == "unclear" for line in advice.lines)
    if unsure and not any(line.judged and line.outcome != "unclear" for line in advice.lines):
        return f"Stay with {BASE} for now: nothing could be judged."
    aim = {"time": "faster", "memory": "smaller", "quality": "better"}[advice.question.objective]
    rivals = [line for line in advice.lines if line.name != BASE and not line.emulated]
    if pick.group.name == BASE and not rivals:
        return f"Stay with {BASE} on this machine: whatever else was tried is emulated."
    untimed = not any(line.beside and line.beside.speed for line in rivals)
    if pick.group.name == BASE and advice.question.objective == "time" and untimed:
        return (
            f"Stay with {BASE} for now: too few trials were long enough to tell a speed. Train for "
            "longer (train.epochs, advise.steps, advise.budget), or type advise.objective=memory."
        )
    if pick.group.name == BASE:
        return f"Stay with {BASE}: nothing that trains as well was measured to be {aim}."
    return f"Use {pick.name}: {gain_words(pick)}."


def other_sentences(advice: Advice) -> str:
    """What else there is to say of the answer; empty where there is nothing."""
    told = []
    unsure = [line for line in advice.lines if line.outcome == "unclear"]
    if unsure:
        tried = min(len(line.group.jobs) for line in unsure)
        more = "a larger advise.budget" if tried < advice.question.seeds else "more advise.seeds"
        names = ", ".join(line.name for line in unsure)
        stopped = any(line.group.counts.get("stopped") for line in advice.lines)
        told.append(
            f"It was stopped before it could judge {names}."
            if stopped
            else f"Not enough evidence in this budget about {names}; {more} may tell."
        )
    if imitated := [n.name for n in advice.lines if n.emulated and n.outcome == "fit"]:
        told.append(
            f"Emulated, {', '.join(imitated)} trained as well; only the hardware tells how fast."
        )
    if advice.question.busy > BUSY:
        told.append(
            f"Other programs kept {advice.question.busy:.0%} of the processors busy when this "
            "began; speeds may differ on a quiet machine."
        )
    return " ".join(told)


def advice_blocks(advice: Advice) -> Iterator[Block]:
    """The answer, the command to run next, the table, and how it was judged."""
    yield from _told(advice)
    if advice.pick is not None:
        yield Text("Type next:")
        yield Commands(next_lines(advice))
    yield advice_table(advice)
    others = [line for line in advice.lines if line.outcome in ("fit", "baseline")]
    if here := [quote_command(line.command) for line in others if not line.emulated]:
        yield Heading("What else trains as well")
        yield Commands(here)
    if elsewhere := [line.command for line in others if line.emulated]:
        yield Heading("What trains as well by its numbers, where its hardware is")
        kept = ([w for w in words if w != "precision.emulate=true"] for words in elsewhere)
        yield Commands([quote_command(words) for words in kept])
    if advice.question.absent:
        yield Heading("Not on this machine")
        yield Items([(n, why) for n, _, why in (t.partition(": ") for t in advice.question.absent)])
        if not advice.question.emulated:
            yield Text(
                "precision.emulate=true tries the numbers of those that can be emulated, "
                "without their speed."
            )
    yield Heading("How this was judged")
    yield Items(list(_how(advice)), small=True)


def advice_markdown(advice: Advice) -> tuple[list[Block], Table]:
    """The answer with its command, and the table, for the note of the parent run."""
    return [*_told(advice), Commands(next_lines(advice))], advice_table(advice)


def _told(advice: Advice) -> Iterator[Text]:
    yield Text(advice_sentence(advice), "answer")
    if more := other_sentences(advice):
        yield Text(more)


def advice_table(advice: Advice) -> Table:
    """A row per precision, best first."""
    rows = [_row(line) for line in advice.lines]
    shown = [i for i in range(len(HEAD)) if any(row[i].text for row in rows)]
    marked = 0 if advice.pick is not None else None
    cells = [[row[i] for i in shown] for row in rows]
    words = frozenset(n for n, i in enumerate(shown) if HEAD[i] not in NUMBERS)
    return Table([_head(i) for i in shown], cells, words, marked, cards=True)


def _head(column: int) -> str:
    name = HEAD[column]
    return f"{name} × {BASE}" if name in ("speed", "memory") else name


def _row(line: PrecisionVerdict) -> list[Cell]:
    speed = line.beside.speed if line.beside else None
    told = line.beside and (line.group.on_cpu or not line.emulated)  # there it is the peak
    memory = line.beside.memory if line.beside and told else None
    mib = line.group.memory_mib if told else None
    return [
        Cell(line.name),
        Cell(outcome_words(line), TONES.get(line.outcome, ""), outcome_reason(line)),
        Cell("unknown", "quiet", "emulated")
        if line.emulated
        else Cell(format_ratio(speed), note=format_range(speed)),
        Cell(
            "" if memory is None else f"{memory:.2f}",
            note="" if mib is None else f"{format_number(mib)} MiB",
        ),
        _predicted(line),
        Cell(health_words(line)),
    ]


def _predicted(line: PrecisionVerdict) -> Cell:
    if line.predicted is None:
        return Cell("")
    peak, batch = line.predicted
    more = " or more" if batch == LARGEST_FORECAST_BATCH else ""
    return Cell(f"{format_number(peak)} MiB", note=f"largest batch {batch}{more}" if batch else "")


def _how(advice: Advice) -> Iterator[tuple[str, str]]:
    question = advice.question
    yield (
        "Trials",
        f"{question.steps} optimizer steps each; every precision from the same weights on the same "
        f"batches as {BASE}, for each seed. Jobs ran in turn, seed by seed.",
    )
    if not math.isnan(advice.spread):
        yield (
            "Yardstick",
            f"{BASE} ends at {VAL_LOSS} {format_number(advice.loss)}; its seeds differ by a "
            f"standard deviation of {format_number(advice.spread)}. Tolerated are "
            f"{question.tolerance:g} of them (advise.tolerance).",
        )
    yield (
        "Worse",
        "the mean difference is beyond the tolerance, and above 0 by a one-sided paired t test "
        f"(Student 1908), at {ERROR:.0%} for all precisions together (Bonferroni): the chance "
        "that any that is as good as float32 is called worse. ± is half the interval. A set of "
        "modules is judged without the seed that chose it.",
    )
    yield (
        "Indistinguishable",
        f"the same test, at {ERROR:.0%} for each, finds the difference below the tolerance "
        "(non-inferiority), were the yardstick exact; it is measured by as many seeds, see "
        "docs/advise.md. Neither: not enough evidence.",
    )
    if any(line.predicted for line in advice.lines):
        yield (
            "Predicted peak",
            "of a step at train.batch_size, weights to temporaries, without libraries and data; "
            "the largest batch is a power of two that fits this machine (mode=plan).",
        )
    yield (
        "What this is not",
        f"{question.steps} steps are not a whole training: what goes wrong later is not seen.",
    )


def next_lines(advice: Advice) -> list[str]:
    """The command to run next, if there is one."""
    return [quote_command(advice.pick.command)] if advice.pick else []


def print_advice(console: Console, advice: Advice) -> None:
    """The table, the answer and the command to run next."""
    made = advice_table(advice)
    shown = Grid(title="which precision?", title_justify="left")
    for i, name in enumerate(made.head):
        shown.add_column(name, justify="left" if i in made.words else "right", overflow="fold")
    for row in made.rows:
        shown.add_row(*("\n".join(filter(None, (cell.text, cell.note))) for cell in row))
    console.print(shown)
    console.print(
        " ".join(filter(None, [advice_sentence(advice), other_sentences(advice)])), soft_wrap=True
    )
    for line in next_lines(advice):
        console.print(f"type next: {line}", soft_wrap=True)
