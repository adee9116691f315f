"""Define the answer of a sweep as values: pages, records and the exit status are made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runner.output.markup import Table
from runner.sweeps.sweep_resume import Command
from runner.sweeps.verdict.compare import Comparison


class AnswerRecord(NamedTuple):
    """What MLflow's parent run holds of an answer.

    Attributes:
        metrics: of each group of seeds the gap in quality (group minus baseline; of an evaluated
            checkpoint, minus what it reached in its own precision), half the width of the gap's
            confidence interval, and the ratios of speed and memory.
        tags: the sentence, the recommended group, and the verdicts, which a resumed sweep may
            change.
        steps: the step of the metrics: the optimizer steps of all jobs.
    """

    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    steps: int


@dataclass(frozen=True)
class Answer:
    """What a sweep says.

    Attributes:
        sentence: which precision to train in, or what prevents an answer; short.
        remarks: the numbers behind it and reservations, as sentences in the order in which they
            are shown.
        noted: those of them that the note of MLflow's parent run shows, too.
        pick: the group to train in, the baseline's where the answer is to stay; None where the
            sweep cannot tell.
        command: what to type next, if it is known.
        is_unfinished: there is no answer yet, for jobs have not ended.
        failed: number of the jobs that should have finished and did not.
        exit_status: of the command whose jobs these are.
        table: in the place of the table of groups, of jobs that no quality compares.
    """

    sentence: str
    remarks: Sequence[str] = ()
    noted: Sequence[str] = ()
    pick: Comparison | None = None
    command: Command | None = None
    is_unfinished: bool = False
    failed: int = 0
    exit_status: int = 0
    record: AnswerRecord = field(default=AnswerRecord({}, {}, 0))
    table: Table | None = None

    @property
    def text(self) -> str:
        """Return the sentence and the remarks."""
        return " ".join([self.sentence, *self.remarks])
