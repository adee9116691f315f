"""Which published claims about low precision hold on this machine's CPU?

    python -m bench.claims                           all, in less than a minute
    python -m bench.claims hopper-sums nf4-error     these two; writes no file
    python -m bench.claims --list                    what each claim says

It measures with the code that runs use (update rules, emulated FP8 and FP4, packed weights of
bitsandbytes and torchao), so that a claim that fails points at a broken kernel, library or
emulation. Exit status: 0 if every claim holds, 1 if one does not, 2 for a name that does not exist.
To add a claim: a function in measurements.py, an entry in catalogue.py, and a fault in BROKEN of
tests/bench/test_claims.py that makes it fail. Writes bench/results/claims.md.
"""

import argparse
import sys
from collections.abc import Sequence

from bench.claims.catalogue import CLAIMS
from bench.claims.claim import ClaimResult, check_claim
from bench.common import table, versions, write

NOTES = """\
- A claim holds if the values that have a bound are within it. The random numbers are seeded: two
  runs on one machine give the same values.
- Most papers report accuracies and losses of large models, which no CPU repeats in seconds. Then
  the table has their number, and what is measured is the error of the numbers that leads to it:
  that NF4 rounds normal weights more exactly than int4 is shown, the perplexities are not.
- `log-probabilities`: the pretrained network of `experiment=molecules` had a ratio of 7.972 (commit
  8b755b9).
- `hopper-sums`: the paper does not say which random numbers it took, nor relative to what it
  measured. With normal numbers the model of Hopper's sums is near the paper's 2 %, with uniform
  ones in [0, 1), whose sums only grow, it is 8 %."""


def show(result: ClaimResult) -> None:
    """Print what the paper says and what is measured, and each reason why it does not hold."""
    claim = result.claim
    state = "ok" if result.holds else "FAILED"
    text = f"{state:7} {claim.name:20} {claim.published:41} {result.measured}"
    print(f"{text} ({result.seconds:.1f} s)", flush=True)
    for problem in result.problems:
        print(f"{'':8}{problem}")


def write_results(results: Sequence[ClaimResult]) -> None:
    """Write the table of all claims."""
    rows = []
    for result in results:
        claim = result.claim
        bounds = ", ".join(f"{name} {bound}" for name, bound in claim.bounds.items())
        holds = "yes" if result.holds else f"**no**: {'; '.join(result.problems)}"
        source = f"{claim.source} ({claim.checked})"
        words = (claim.statement, claim.published, claim.method, result.measured)
        rows.append([f"`{claim.name}`", *words, bounds, holds, source])
    head = ["name", "claim", "the paper says", "computed here", "measured", "bounds", "holds"]
    libraries = versions("torchao", "bitsandbytes")
    body = f"{libraries}.\n\n{table([*head, 'source'], rows)}\n\n{NOTES}"
    write("claims", "Which published claims about low precision hold here?", body)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure claims and return 0 if all hold, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="claim", help="by default all")
    parser.add_argument("--list", action="store_true", help="print what each claim says")
    chosen = parser.parse_args(argv)
    known = [claim.name for claim in CLAIMS]
    unknown = [name for name in chosen.names if name not in known]
    if unknown:
        parser.error(f"there is no claim {unknown[0]}. Allowed: {', '.join(known)}")
    claims = [claim for claim in CLAIMS if not chosen.names or claim.name in chosen.names]
    if chosen.list:
        for claim in claims:
            print(f"{claim.name:20} {claim.statement}")
        return 0
    results = []
    for claim in claims:
        results.append(check_claim(claim))
        show(results[-1])
    if not chosen.names:
        write_results(results)
    return int(not all(result.holds for result in results))


if __name__ == "__main__":
    sys.exit(main())
