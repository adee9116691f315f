"""A published claim, what it is measured by, and whether it holds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

from runner.core.base.fmt import format_number
from runner.core.base.random_streams import process_state


@dataclass(frozen=True)
class Bound:
    """The least and the greatest value with which a claim holds, both included."""

    least: float = -math.inf
    greatest: float = math.inf

    def __str__(self) -> str:
        if self.least == self.greatest:
            return format_number(self.least)
        if self.least == -math.inf:
            return f"at most {format_number(self.greatest)}"
        if self.greatest == math.inf:
            return f"at least {format_number(self.least)}"
        return f"{format_number(self.least)} to {format_number(self.greatest)}"

    def holds(self, value: float) -> bool:
        """Return whether a value is inside; NaN never is."""
        return self.least <= value <= self.greatest


def exactly(value: float) -> Bound:
    """Return the bound that one value alone satisfies."""
    return Bound(value, value)


@dataclass(frozen=True)
class Claim:
    """A published claim.

    Attributes:
        name: for the command line.
        statement: the claim in one sentence.
        source: authors, title, arXiv number and section.
        checked: which part of the source was read when the claim was written down.
        published: the source's numbers.
        method: what is computed here.
        measure: computes it.
        bounds: of the values that decide, by their names; the claim holds if all do.
    """

    name: str
    statement: str
    source: str
    checked: str
    published: str
    method: str
    measure: Callable[[], Mapping[str, float]]
    bounds: Mapping[str, Bound]


@dataclass(frozen=True)
class ClaimResult:
    """Whether a claim holds on this machine.

    Attributes:
        claim: the claim.
        values: the measured numbers by name; none if that failed.
        seconds: that it took.
        problems: a sentence for each reason why the claim does not hold.
    """

    claim: Claim
    values: Mapping[str, float]
    seconds: float
    problems: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Return whether the claim holds."""
        return not self.problems

    @property
    def measured(self) -> str:
        """Return the text of the measured numbers."""
        values = [f"{name} {format_number(value)}" for name, value in self.values.items()]
        return ", ".join(values) or "nothing"


def check_claim(claim: Claim) -> ClaimResult:
    """Measure a claim and judge the values by their bounds.

    The random streams are seeded, and are as before afterwards. What measure() raises is a reason
    why the claim does not hold, so that one broken kernel does not hide the other claims.
    """
    start = perf_counter()
    try:
        with process_state():
            torch.manual_seed(0)
            # The tensors are small: on a busy machine several threads take a hundred times longer.
            torch.set_num_threads(1)
            values = claim.measure()
    except Exception as error:
        text = str(error).partition("\n")[0]
        problem = f"nothing was measured: {type(error).__name__}: {text}"
        return ClaimResult(claim, {}, perf_counter() - start, (problem,))
    problems = []
    for name, bound in claim.bounds.items():
        if not bound.holds(values[name]):
            problems.append(f"{name} is {format_number(values[name])}, and has to be {bound}")
    return ClaimResult(claim, values, perf_counter() - start, tuple(problems))
