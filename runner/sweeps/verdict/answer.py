"""Define the answer of a sweep as values: pages, records and the exit status are made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from runner.sweeps.sweep_resume import Command
from runner.sweeps.verdict.compare import Comparison


class Reason(StrEnum):
    """Why an answer names a precision to train in, or none."""

    RECOMMENDED = "recommended"
    """Another precision than the baseline trains as well and is measurably better."""
    BASELINE = "baseline"
    """None does."""
    OPEN = "open"
    """More evidence is needed."""
    NOT_COMPARED = "not compared"
    """The jobs that ended compare no precisions on one device."""
    UNFINISHED = "unfinished"
    """Jobs have not ended."""


class CaveatKind(StrEnum):
    """What a caveat is about."""

    FAILED = "failed"
    UNTRAINED = "untrained"
    FROZEN = "frozen"
    NOT_AS_ASKED = "not as asked"
    STAGNANT = "stagnant"
    ROUTERS = "routers"
    UNJUDGED = "unjudged"
    EMULATED = "emulated"
    BUSY = "busy"


class Caveat(NamedTuple):
    """A reservation about an answer, as a sentence."""

    kind: CaveatKind
    text: str


def known_caveats(texts: Mapping[CaveatKind, str | Sequence[str]]) -> tuple[Caveat, ...]:
    """Return a caveat for each sentence that is not empty."""
    caveats: list[Caveat] = []
    for kind, found in texts.items():
        sentences = [found] if isinstance(found, str) else found
        caveats += [Caveat(kind, text) for text in sentences if text]
    return tuple(caveats)


class AnswerRecord(NamedTuple):
    """What MLflow's parent run holds of an answer.

    Attributes:
        metrics: of each group of seeds the gap in quality (group minus baseline; of an evaluated
            checkpoint, minus what it reached in its own precision), half the width of the gap's
            confidence interval, and the ratios of speed and memory.
        tags: the verdicts, which a resumed sweep may change.
        steps: the step of the metrics: the optimizer steps of all jobs.
    """

    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    steps: int


@dataclass(frozen=True)
class Answer:
    """What a sweep says.

    Attributes:
        sentence: which precision to train in, or what prevents an answer.
        caveats: reservations, in the order in which they are shown.
        pick: the group to train in, the baseline's where the answer is to stay; None where the
            sweep cannot tell.
        words: overrides to type: one `precision=` for the training that the answer decides on,
            else what the sweep's own command lacks for an answer.
        command: what to type next, if it is known.
        failed: number of the jobs that should have finished and did not.
        exit_status: of the command whose jobs these are.
    """

    reason: Reason
    sentence: str
    caveats: Sequence[Caveat] = ()
    pick: Comparison | None = None
    words: Sequence[str] = ()
    command: Command | None = None
    failed: int = 0
    exit_status: int = 0
    record: AnswerRecord = field(default=AnswerRecord({}, {}, 0))

    @property
    def text(self) -> str:
        """Return the sentence and the caveats."""
        return " ".join([self.sentence, *(caveat.text for caveat in self.caveats)])
