"""What was found where two executions were compared in some steps: diff.json and the lines of the
console."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.diagnostics.divergence.added_error import AddedError
from runner.diagnostics.divergence.compare import BatchComparison
from runner.diagnostics.divergence.divergence_text import describe_cause, describe_divergence
from runner.diagnostics.divergence.findings import Divergence, ModuleErrors, first_divergence
from runner.diagnostics.divergence.log_probabilities import LogProbabilityError
from runner.utils.files import write_json

FORMAT = 1
"""Version of diff.json."""
_LISTED = 4
"""Names that a sentence lists; the others are counted."""


@dataclass(frozen=True)
class StepComparison:
    """Two executions in one step.

    Attributes:
        step: number of the optimizer step whose forward and backward were compared.
        batch: what was found.
        log_probabilities: None where the task predicts no class.
    """

    step: int
    batch: BatchComparison
    log_probabilities: LogProbabilityError | None


@dataclass(frozen=True)
class DivergenceReport:
    """What mode=diff found.

    Attributes:
        name: label of the execution.
        against: label of the reference.
        steps: in their order, at least one.
    """

    name: str
    against: str
    steps: Sequence[StepComparison]

    @property
    def chosen(self) -> StepComparison:
        """Return the first step in which the executions part, else the first step."""
        parted = (step for step in self.steps if first_divergence(step.batch.rows))
        return next(parted, self.steps[0])

    @property
    def divergence(self) -> Divergence | None:
        """Return where the executions part first; None where rounding explains everything."""
        return first_divergence(self.chosen.batch.rows)

    @property
    def sentence(self) -> str:
        """Return the sentence that says what was found."""
        batch = self.chosen.batch
        text = describe_divergence(
            batch.rows,
            self.name,
            self.against,
            batch.is_exact,
            batch.same_format,
            batch.uneven_calls,
        )
        text += _remarks(batch)
        if len(self.steps) == 1:
            return text
        if self.divergence is None:
            return f"In all {len(self.steps)} steps: {text}"
        return f"In step {self.chosen.step}: {text}"


def _remarks(batch: BatchComparison) -> str:
    """Return sentences on what a reader must know of a comparison beside its first divergence."""
    text = ""
    if batch.uneven_calls:
        counts = [
            f"`{name}` ({_times(found)} against {wanted})"
            for name, (found, wanted) in batch.uneven_calls.items()
        ]
        text += f" Not called equally often by both: {_listed(counts)}."
    if batch.other_weights:
        count = len(batch.other_weights)
        text += (
            f" Both have other weights in {count} {'module' if count == 1 else 'modules'}, so that "
            f"errors there are no bug of their code: {_names(batch.other_weights)}."
        )
    reshaped = [
        row.module
        for row in batch.rows
        if row.added and row.added.found.other_shape and not row.added.is_unexplained
    ]
    if reshaped:
        text += f" Not compared, for rounding gives them other shapes: {_names(reshaped)}."
    return text


def _names(modules: Sequence[str]) -> str:
    return _listed([f"`{name}`" for name in modules])


def _listed(words: Sequence[str]) -> str:
    """Return the first words of a list, and how many there are more."""
    listed = ", ".join(words[:_LISTED])
    more = len(words) - _LISTED
    return f"{listed} and {more} more" if more > 0 else listed


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def metrics(step: StepComparison) -> dict[str, float]:
    """Return the numbers of a step under the names that the store has."""
    batch = step.batch
    reference, loss = batch.losses
    found = {
        "diff/loss": loss,
        "diff/loss_reference": reference,
        "diff/output_error": batch.output_error,
        "diff/gradient_error": batch.gradient_error,
        "diff/unexplained_modules": float(len(unexplained(batch.rows))),
    }
    if step.log_probabilities is not None:
        found["diff/log_probability_rms"] = step.log_probabilities.rms
        found["diff/argmax_changed"] = step.log_probabilities.changed
    return found


def unexplained(rows: Sequence[ModuleErrors]) -> list[ModuleErrors]:
    """Return the modules that add more than rounding explains."""
    return [row for row in rows if any(added.is_unexplained for added in _errors(row))]


def _errors(row: ModuleErrors) -> list[AddedError]:
    return [added for added in (row.added, row.gradient_added) if added is not None]


def write_json_report(report: DivergenceReport, path: Path) -> None:
    """Write diff.json.

    Raises:
        OSError: the file cannot be written.
    """
    first = report.divergence
    content = {
        "format": FORMAT,
        "precision": report.name,
        "against": report.against,
        "sentence": report.sentence,
        "parts": first is not None,
        "step": report.chosen.step,
        "module": first.row.module if first else None,
        "backward": first.is_backward if first else None,
        "cause": describe_cause(first.added) if first else None,
        "steps": [
            {
                "step": step.step,
                "loss_scale": step.batch.scale,
                **_finite(metrics(step)),
                "modules": [_module_record(row) for row in step.batch.rows],
            }
            for step in report.steps
        ],
    }
    write_json(path, content)


def _module_record(row: ModuleErrors) -> dict[str, Any]:
    return {
        "module": row.module,
        "class": row.kind,
        "arrived": _number(row.arrived),
        "gradient_arrived": _number(row.gradient_arrived),
        "added": _error_record(row.added),
        "gradient_added": _error_record(row.gradient_added),
    }


def _error_record(added: AddedError | None) -> dict[str, Any] | None:
    if added is None:
        return None
    found = added.found
    return {
        "tensor": added.tensor,
        "dtype": added.dtype,
        "relative": _number(found.relative),
        "expected": _number(added.expected),
        "ratio": _number(added.ratio),
        "ulps": _number(added.ulps),
        "sqnr_db": _number(found.sqnr_db),
        "nonfinite": found.nonfinite,
        "flushed": found.flushed,
        "subnormal": found.subnormal,
        "different": found.different,
        "elements": found.elements,
        "unexplained": added.is_unexplained,
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> float | None:
    """Return a number as JSON has it: None in place of infinity and NaN."""
    return value if math.isfinite(value) else None
