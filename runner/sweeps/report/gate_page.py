"""Present the answer of mode=gate: in the terminal, in the report and in MLflow's note."""

from collections.abc import Iterator

from runner.sweeps.report.gate import GateVerdict
from runner.sweeps.report.judging_notes import Note, baseline_note
from runner.sweeps.report.statistics import ERROR_RATE, MIN_SEEDS
from runner.sweeps.report.wording import memory_name, speed_words
from runner.utils.formatting import format_number
from runner.utils.markup import Block, Cell, Commands, Table, Text, Tone
from runner.utils.terminal import quote_command

_TONES: dict[str, Tone] = {"accepted": "good", "rejected": "bad", "undecided": "quiet"}


def gate_sentence(gate: GateVerdict) -> str:
    """Return the answer, with what the precision costs if that differs from the baseline."""
    answer = f"{gate.name} is {gate.decision}: {gate.reason}."
    return " ".join(filter(None, [answer, *_cost_sentences(gate), _remedy(gate)]))


def _remedy(gate: GateVerdict) -> str:
    """Return what to type for a decision; empty where there is one, or more seeds cannot help."""
    if gate.decision != "undecided" or not gate.looks:
        return ""
    seeds = gate.advice.settings.seeds
    if gate.looks[-1].seeds < seeds:
        return "The budget ended first: a larger advise.budget may decide."
    return f"More seeds may decide: type advise.seeds={2 * seeds}."


def _cost_sentences(gate: GateVerdict) -> Iterator[str]:
    comparison = gate.precision.comparison
    # The time of emulated arithmetic says nothing about the precision.
    if comparison.speed_verdict in ("faster", "slower") and not gate.precision.is_emulated:
        yield f"It is {speed_words(comparison)}."
    if comparison.memory_ratio is not None and f"{comparison.memory_ratio:.2f}" != "1.00":
        memory = memory_name(comparison)
        baseline = gate.precision.baseline
        yield f"It takes {comparison.memory_ratio:.2f} × the {memory} of {baseline}."


def gate_blocks(gate: GateVerdict) -> Iterator[Block]:
    """Yield the answer and the command that trains in the precision."""
    yield Text(gate_sentence(gate), "answer")
    if gate.decision == "accepted":
        yield Text("Next:")
        yield Commands([quote_command(gate.precision.command)])


def looks_table(gate: GateVerdict) -> Table:
    """Return the table with one row per look of the sequential test."""
    rows = [
        [
            Cell(str(look.seeds)),
            Cell(f"{gate.precision.sign * look.gap:+.3g} ± {look.half_width:.2g}"),
            Cell(format_number(gate.precision.sign * gate.bar)),
            Cell(look.decision, tone=_TONES[look.decision]),
        ]
        for look in gate.looks
    ]
    title = f"{gate.precision.noun} minus that of {gate.precision.baseline}"
    return Table(["seeds", title, "bar", "decision"], rows, frozenset([3]))


def gate_notes(gate: GateVerdict) -> Iterator[Note]:
    """Yield notes on the baseline and on the test."""
    if len(gate.advice.baseline_losses) > 1:
        yield baseline_note(gate.advice)
    yield (
        "Test",
        f"after each seed from the {MIN_SEEDS}rd to the {gate.advice.settings.seeds}th at most, a "
        "confidence interval of the mean difference is looked at: accepted if it lies within the "
        "bar, rejected if it lies beyond. Over all looks the chance of each error is "
        f"{ERROR_RATE:.0%} (a sequential t test, Pocock 1977; docs/gate.md).",
    )
