"""Write what became of the claims: lines for the terminal, prove.json and prove.html."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runner.claims.claim import Bound, Claim, ClaimResult, Measurement
from runner.utils.accelerator import choose_accelerator
from runner.utils.files import write_json, write_text
from runner.utils.formatting import format_number
from runner.utils.markup import Block, Cell, Heading, Items, Table, Text, to_html

PAGE = "prove.html"
RECORD = "prove.json"
_LIBRARIES = ("torch", "torchao", "bitsandbytes")
_NAME_WIDTH = 20
_PUBLISHED_WIDTH = 41


def result_line(result: ClaimResult) -> str:
    """Return a claim's line in the terminal; under it one for each reason why it does not hold."""
    claim = result.claim
    state = "ok" if result.holds else "FAILED"
    line = f"{state:7} {claim.name:{_NAME_WIDTH}} {claim.published:{_PUBLISHED_WIDTH}} "
    line += f"{_deciding_text(result)} ({result.seconds:.1f} s)"
    return "\n".join([line, *(f"        {problem}" for problem in result.problems)])


def head_line() -> str:
    """Return the titles of the columns of result_line."""
    return f"{'':7} {'claim':{_NAME_WIDTH}} {'the paper says':{_PUBLISHED_WIDTH}} measured here"


def list_line(claim: Claim) -> str:
    """Return a claim's name and statement, for --list."""
    return f"{claim.name:{_NAME_WIDTH}} {claim.statement}"


def summary(results: Sequence[ClaimResult]) -> str:
    """Return one sentence on all claims."""
    holding = sum(result.holds for result in results)
    seconds = sum(result.seconds for result in results)
    return f"{holding} of {len(results)} claims hold on this machine ({seconds:.0f} s)."


def _record(results: Sequence[ClaimResult], command: str) -> dict[str, Any]:
    """Return the content of prove.json, whose keys docs/prove.md describes."""
    return {
        "command": command,
        "machine": choose_accelerator(name="cpu").name,
        "versions": {name: _version(name) for name in _LIBRARIES},
        "passed": all(result.holds for result in results),
        "seconds": round(sum(result.seconds for result in results), 1),
        "claims": [_claim_record(result) for result in results],
    }


def write_report(results: Sequence[ClaimResult], command: str, folder: Path) -> None:
    """Write prove.html and prove.json into a folder that exists."""
    content = _record(results, command)
    write_text(folder / PAGE, to_html("runner prove", [*_page_blocks(results, content)]))
    write_json(folder / RECORD, content)


def _claim_record(result: ClaimResult) -> dict[str, Any]:
    claim = result.claim
    texts = ("name", "statement", "source", "checked", "published", "method")
    return {
        **{key: getattr(claim, key) for key in texts},
        **asdict(result.measurement),
        "bounds": {name: _limits(bound) for name, bound in claim.bounds.items()},
        "passed": result.holds,
        "problems": list(result.problems),
        "seconds": round(result.seconds, 2),
    }


def _limits(bound: Bound) -> list[float | None]:
    """Return the least and the greatest value; None, which JSON can hold, for no limit."""
    limits = (bound.least, bound.greatest)
    return [limit if math.isfinite(limit) else None for limit in limits]


def _page_blocks(results: Sequence[ClaimResult], content: dict[str, Any]) -> Iterator[Block]:
    yield Text(summary(results), "answer")
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    yield Text(f"{content['command']} on {content['machine']}; {versions}", "small")
    head = ["claim", "holds", "the paper says", "measured here", "bounds", "seconds"]
    yield Table(head, [_page_row(result) for result in results], frozenset(range(5)), cards=True)
    for result in results:
        claim = result.claim
        yield Heading(claim.name)
        yield Text(claim.statement)
        facts = [
            ("Measured", claim.method + (f" ({_note(result)})" if _note(result) else "")),
            ("Source", f"{claim.source} ({claim.checked})"),
        ]
        yield Items(facts + [("Does not hold", problem) for problem in result.problems])


def _page_row(result: ClaimResult) -> list[Cell]:
    claim = result.claim
    state = Cell("yes", "good") if result.holds else Cell("NO", "bad")
    bounds = ", ".join(f"{name} {bound}" for name, bound in claim.bounds.items())
    return [
        Cell(claim.name),
        state,
        Cell(claim.published),
        Cell(str(result.measurement) or "nothing", note=_note(result)),
        Cell(bounds, "quiet"),
        Cell(format_number(round(result.seconds, 1))),
    ]


def _deciding_text(result: ClaimResult) -> str:
    """Return the values that a claim is judged by, and what they were measured on."""
    values = result.measurement.values
    deciding = {name: values[name] for name in result.claim.bounds if name in values}
    text = str(Measurement(deciding)) or "nothing"
    return f"{text}; {_note(result)}" if _note(result) else text


def _note(result: ClaimResult) -> str:
    return result.measurement.note


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
